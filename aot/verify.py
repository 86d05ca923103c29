"""Asks of each artifact, level by level: may it be used here, and if not, what differs and what to run.

    bytes     path, owner, mode, sizes, digests, archive members
    trust     on whose word it may be executed here: its signatures, where it came from, the policy
    env       the machine and torch build it was made for, against this one
    source    the modules, shapes and compile options it was made from, against those of now
    graph     the graph it was compiled from, against one traced now without compiling, in a child process
    numerics  its outputs on fresh inputs against the program's float64 twin, in a child process
    lock      (with a lock file) whether it is the artifact that the lock names

Exit code: the sum of 1 corrupt + 2 untrusted + 4 could not check + 8 stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aot.archive import check_archive
from aot.errors import CorruptArtifact, EnvironmentFault, UntrustedArtifact, UserError
from aot.lockfile import LockedArtifact
from aot.manifest import Difference
from aot.policy import Policy, check_trust
from aot.private import private_folder, process_folder
from aot.recheck import ChildRequest, OutputError, RunSource, ask_child
from aot.runtime import build_command, private_copy, rank, shown
from aot.source import source_files
from aot.trace import key_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from aot.fingerprint import Fingerprint
    from aot.lockfile import Lock
    from aot.manifest import Manifest
    from aot.program import Program
    from aot.runtime import Need
    from aot.store import Store

LEVELS = ("bytes", "trust", "env", "source", "graph", "numerics")
DEFAULT_LEVELS = ("bytes", "trust", "env", "source")
NEEDS_RUN = "needs a run: `dflash-aot verify RUN`"
Status = Literal["ok", "corrupt", "untrusted", "unchecked", "stale"]
EXIT_BITS: dict[Status, int] = {"ok": 0, "corrupt": 1, "untrusted": 2, "unchecked": 4, "stale": 8}


@dataclass(frozen=True)
class Check:
    """One level of one artifact. `command` mends it, `outputs` are the errors that `numerics` measured and
    `differences` what makes it stale.
    """

    artifact: str
    level: str
    status: Status
    detail: str = ""
    command: str | None = None
    outputs: tuple[OutputError, ...] = ()
    differences: tuple[Difference, ...] = ()


def exit_code(checks: Sequence[Check]) -> int:
    """The bit sum over all checks."""
    code = 0
    for check in checks:
        code |= EXIT_BITS[check.status]
    return code


def verify_store(
    store: Store,
    levels: Sequence[str],
    fingerprints: Callable[[str], Fingerprint],
    policy: Policy | None = None,
) -> list[Check]:
    """Check every artifact of a store. `graph` and `numerics` need a run that makes the program."""
    policy = policy or Policy.of()
    checks = []
    for path in store.manifest_paths():
        manifest, bad = _manifest(store, path)
        if manifest is None:
            checks.append(bad)
        else:
            checks += _stored_checks(store, manifest, levels, fingerprints, policy)
    return checks


def verify_lock(
    store: Store,
    lock: Lock,
    levels: Sequence[str],
    fingerprints: Callable[[str], Fingerprint],
    policy: Policy | None = None,
    run: str = "RUN",
) -> list[Check]:
    """Check the artifacts that a lock file names, and that they are those. An absent one is not checked."""
    policy = policy or Policy.of()
    checks = []
    for (program, bucket), entry in sorted(lock.items(), key=lambda pair: pair[0]):
        command = f"`{build_command(run, [bucket], store)}`"
        path = store.manifest_path(program, bucket, entry.key)
        name = f"{program} {bucket} ({entry.key[:12]})"
        if not path.exists():
            checks.append(Check(name, "lock", "unchecked", "the store does not have it", command))
            continue
        manifest, bad = _manifest(store, path, command)
        if manifest is None:
            checks.append(bad)
            continue
        checks.append(_Session(store, manifest, command, policy).lock_check(lock))
        checks += _stored_checks(store, manifest, levels, fingerprints, policy)
    return checks


def _stored_checks(
    store: Store,
    manifest: Manifest,
    levels: Sequence[str],
    fingerprints: Callable[[str], Fingerprint],
    policy: Policy,
) -> list[Check]:
    """The levels that need no run."""
    command = f"`{build_command('RUN', [manifest.bucket], store)}`"
    session = _Session(store, manifest, command, policy)
    known = {
        "bytes": session.bytes_check,
        "trust": session.trust_check,
        "env": lambda: session.stale_check("env", _environment(manifest, fingerprints)),
        "source": lambda: session.stale_check("source", lambda: _changed_sources(manifest)),
    }
    return [
        known[level]() if level in known else session.check(level, "unchecked", NEEDS_RUN) for level in levels
    ]


def verify_run(
    store: Store,
    needs: Sequence[Need],
    levels: Sequence[str],
    fingerprints: Callable[[str], Fingerprint],
    source: RunSource,
    *,
    run: str = "RUN",
    seed: int = 0,
    policy: Policy | None = None,
    lock: Lock | None = None,
) -> list[Check]:
    """Check the artifacts that a run would use: for each program and bucket the nearest one in the store.

    A missing artifact counts as not checked. `seed` draws the inputs of `numerics`.
    """
    policy = policy or Policy.of()
    checks = []
    command = f"`{build_command(run, [bucket for _, bucket in needs], store)}`"
    for program, bucket in needs:
        try:
            wanted = key_inputs(program, bucket, fingerprints(program.device_type))
        except EnvironmentFault as fault:
            checks.append(Check(f"{program.name} {bucket}", "env", "unchecked", fault.message))
            continue
        candidates, unreadable = [], []
        for path in store.manifest_paths(program.name, bucket):
            manifest, bad = _manifest(store, path, command)
            if manifest is None:
                unreadable.append(bad)
            else:
                candidates.append((wanted.differences(manifest.key_inputs), manifest))
        checks += unreadable
        if not candidates:
            if not unreadable:
                checks.append(Check(f"{program.name} {bucket}", "bytes", "unchecked", "no artifact", command))
            continue
        locked = lock.get((program.name, bucket)) if lock else None
        differences, manifest = min(candidates, key=lambda pair: rank(*pair, locked))
        session = _Session(store, manifest, command, policy)
        if lock is not None:
            checks.append(session.lock_check(lock))
        checks += session.run_checks(levels, differences, program, source, seed)
    return checks


def _manifest(store: Store, path: Path, command: str | None = None) -> tuple[Manifest | None, Check]:
    """Read a manifest, or say in a check why that failed."""
    name = str(path.relative_to(store.manifest_root).with_suffix(""))
    try:
        return store.read_manifest(path), Check(name, "bytes", "ok")
    except (UserError, OSError) as error:
        hint = error.hint if isinstance(error, UserError) else None
        return None, Check(name, "bytes", _status(error), _message(error), command or hint)


def _status(error: Exception) -> Status:
    if isinstance(error, CorruptArtifact):
        return "corrupt"
    return "untrusted" if isinstance(error, UntrustedArtifact) else "unchecked"


def _message(error: Exception) -> str:
    return error.message if isinstance(error, UserError) else str(error)


def _environment(
    manifest: Manifest, fingerprints: Callable[[str], Fingerprint]
) -> Callable[[], list[Difference]]:
    inputs = manifest.key_inputs

    def differences() -> list[Difference]:
        here = fingerprints(inputs.call_spec.device_type)
        found = here.differences(inputs.fingerprint, at_load=True)
        return [Difference(f"fingerprint.{name}", *values) for name, values in found.items()]

    return differences


def _changed_sources(manifest: Manifest) -> list[Difference]:
    """Compare the recorded source files with those that their modules lead to now."""
    recorded = manifest.key_inputs.sources
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in recorded]
    now: dict[str, str] = {}
    for module in modules:
        try:
            now.update(source_files([module]))
        except EnvironmentFault:
            # The file is gone: it is absent from `now`, which is the difference.
            continue
    return [
        Difference(f"source.{name}", now.get(name, "(absent)")[:12], recorded.get(name, "(absent)")[:12])
        for name in sorted({*recorded, *now})
        if now.get(name) != recorded.get(name)
    ]


@dataclass(frozen=True)
class _Session:
    """The checks of one artifact."""

    store: Store
    manifest: Manifest
    command: str
    policy: Policy

    def check(self, level: str, status: Status, detail: str = "", **more: Any) -> Check:
        command = self.command if status in ("corrupt", "stale") else None
        return Check(str(self.manifest), level, status, detail, **{"command": command, **more})

    def failed(self, level: str, error: Exception) -> Check:
        """What an error says about an artifact; only a build mends bytes, an owner is changed otherwise."""
        status = _status(error)
        hint = error.hint if isinstance(error, UserError) and status != "corrupt" else self.command
        return self.check(level, status, _message(error), command=hint)

    def run_checks(
        self,
        levels: Sequence[str],
        differences: Sequence[Difference],
        program: Program,
        source: RunSource,
        seed: int,
    ) -> list[Check]:
        """All levels, for a program whose inputs differ so from the artifact's."""
        environment = [item for item in differences if item.field.startswith("fingerprint.")]
        rest = [item for item in differences if item not in environment]

        def numerics() -> Check:
            if differences:
                return self.check("numerics", "unchecked", "stale artifacts are not run")
            return self.numerics_check(program, source, seed)

        known = {
            "bytes": self.bytes_check,
            "trust": self.trust_check,
            "env": lambda: self.stale_check("env", lambda: environment),
            "source": lambda: self.stale_check("source", lambda: rest),
            "graph": lambda: self.graph_check(program, source),
            "numerics": numerics,
        }
        return [known[level]() for level in levels]

    def bytes_check(self) -> Check:
        try:
            check_archive(self.store.read_package(self.manifest), str(self.manifest))
        except (UserError, OSError) as error:
            return self.failed("bytes", error)
        return self.check("bytes", "ok")

    def trust_check(self) -> Check:
        try:
            return self.check("trust", "ok", check_trust(self.store, self.manifest, self.policy))
        except (UserError, OSError) as error:
            return self.failed("trust", error)

    def lock_check(self, lock: Lock) -> Check:
        entry = lock.get((self.manifest.program, self.manifest.bucket))
        if entry is None:
            return self.check("lock", "stale", "the lock file does not name it")
        return self.stale_check("lock", lambda: entry.differences(LockedArtifact.of(self.manifest)))

    def stale_check(self, level: str, differences: Callable[[], list[Difference]]) -> Check:
        try:
            found = differences()
        except UserError as error:
            return self.check(level, "unchecked", error.message)
        return self.check(level, "stale" if found else "ok", shown(found), differences=tuple(found))

    def graph_check(self, program: Program, source: RunSource) -> Check:
        request = ChildRequest("graph", source, program.name, str(self.manifest.bucket))
        answer, failure = ask_child(request)
        if failure:
            return self.check("graph", "unchecked", failure)
        recorded = self.manifest.graph_hash
        same = answer == recorded
        differences = [] if same else [Difference("graph_hash", str(answer)[:12], recorded[:12])]
        return self.stale_check("graph", lambda: differences)

    def numerics_check(self, program: Program, source: RunSource, seed: int) -> Check:
        try:
            folder = process_folder(private_folder())
            # Level `numerics` executes the package: never what the policy refuses.
            check_trust(self.store, self.manifest, self.policy)
            path = private_copy(self.store, self.manifest, folder)
        except (UserError, OSError) as error:
            return self.failed("numerics", error)
        request = ChildRequest(
            "numerics",
            source,
            program.name,
            str(self.manifest.bucket),
            str(path),
            seed,
            {"TMPDIR": str(folder)},
        )
        answer, failure = ask_child(request)
        if failure:
            return self.check("numerics", "unchecked", failure)
        outputs = tuple(OutputError(**record) for record in answer)
        wrong = [output for output in outputs if not output.ok]
        detail = "; ".join(f"{output.name}: {output.error:.1e} > {output.tolerance:.1e}" for output in wrong)
        if not wrong:
            worst = max(outputs, key=lambda output: output.error / output.tolerance)
            detail = f"worst {worst.name}: {worst.error:.1e} (eager {worst.twin_error:.1e})"
        return self.check("numerics", "corrupt" if wrong else "ok", detail, outputs=outputs)
