"""Errors a user can act on: one line that says what is wrong, one that says how to fix it.

Exit codes follow sysexits where one fits: 1 failed, 64 usage or configuration, 69 environment,
75 stopped cleanly and resumable (the only one a launcher restarts).
"""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 64
EXIT_ENVIRONMENT = 69
EXIT_RESUMABLE = 75


class UserError(Exception):
    """Printed as ``error: message`` and ``hint: hint``, without a traceback."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} (hint: {self.hint})"


class ConfigError(UserError):
    """A flag, a variable or a run file is wrong."""

    exit_code = EXIT_USAGE


class EnvironmentFault(UserError):
    """The machine or the installation cannot do what was asked."""

    exit_code = EXIT_ENVIRONMENT


class CorruptArtifact(UserError):
    """Bytes on disk are not the bytes that were published."""


class TrialCrashed(CorruptArtifact):
    """A package killed the child process that tried it. `trial` is the trial's name."""

    def __init__(self, message: str, hint: str | None, trial: str):
        super().__init__(message, hint)
        self.trial = trial


class UntrustedArtifact(UserError):
    """A path could have been written by somebody else."""


class StaleArtifact(UserError):
    """An artifact exists for this program and bucket, built from other inputs."""


class MissingArtifact(UserError):
    """No artifact exists for this program and bucket."""
