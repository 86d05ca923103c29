"""One voice for both commands: data on stdout, everything else on stderr, errors with the command that fixes
them.

A command function returns its exit code (None is 0) and raises `aot.errors.UserError` for what a user can
mend. Colour and bars appear on a terminal only, and `NO_COLOR` is honoured. This module imports no torch,
and rich only when something is to be shown.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aot.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK, EXIT_USAGE, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from rich.console import Console

EXIT_INTERRUPTED = 130
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}

#: The machine says no: the message of the system is all there is to tell.
_MACHINE_FAULTS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
        errno.EIO,
    }
)
#: Nor is it a bug if a path that somebody named is of the wrong kind.
_PATH_FAULTS = frozenset({errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
_PLACES = "`--store`, `--output`, `--lock` or `--remote`, whichever it is"

FILE = click.Path(dir_okay=False, path_type=Path)

run_argument = click.argument("run_file", metavar="RUN")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value of the run file."
)
store_option = click.option(
    "--store", "store_root", envvar="DFLASH_AOT_STORE", show_envvar=True, default="artifacts/store",
    type=click.Path(file_okay=False, path_type=Path), help="Folder of artifacts.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout.")
programs_option = click.option(
    "--programs", "factory_name", envvar="DFLASH_AOT_PROGRAMS", show_envvar=True, metavar="NAME",
    help="Entry point of group aot.programs, or module:function; not needed when only one is installed.",
)  # fmt: skip
lock_option = click.option(
    "--lock", "lock_path", envvar="DFLASH_AOT_LOCK", show_envvar=True, default="artifacts.lock",
    type=click.Path(dir_okay=False, path_type=Path), help="File that names the artifacts of the run.",
)  # fmt: skip
buckets_option = click.option(
    "--buckets", "buckets_text", metavar="LIST|auto",
    help="TOKENSxANCHORS, comma-separated, or `auto`: quantiles of the data's micro-batches and the largest. "
    "Without it, the run file's.",
)  # fmt: skip
policy_option = click.option(
    "--policy", "policy_name", envvar="DFLASH_AOT_POLICY", show_envvar=True, metavar="NAME", default="local",
    help="Whom to trust: `local` (own builds) or `signed`. What came from a remote must always be signed.",
)  # fmt: skip
allow_unsigned_option = click.option(
    "--allow-unsigned", multiple=True, metavar="KEY",
    help="Under policy `signed`, let through one artifact that was built here, by the start of its key.",
)  # fmt: skip


def examples(*lines: str) -> str:
    """An epilog that click leaves unwrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def run(cli: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code, telling the user what went wrong.

    UserError exits with its own code, a usage error with 64, a fault of the machine with 69, Ctrl-C with 130.
    Any other exception is a bug and keeps its traceback.
    """
    # Read when torch loads OpenMP. Several workers share the cores: one that waits must not spin on them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = cli.main(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else EXIT_OK
    except UserError as error:
        report_error(error.message, error.hint)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.UsageError as error:
        report_error(_lowered(error.format_message()), _usage_hint(error, name))
        return EXIT_USAGE
    except click.ClickException as error:
        report_error(_lowered(error.format_message()))
        return EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        report_error("interrupted")
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in _MACHINE_FAULTS and not (error.filename and error.errno in _PATH_FAULTS):
            raise
        where = f": {error.filename}" if error.filename else ""
        report_error(f"{os.strerror(error.errno or 0).lower()}{where}", _machine_hint(error))
        return EXIT_ENVIRONMENT


def _lowered(text: str) -> str:
    text = text.strip().rstrip(".")
    return text[:1].lower() + text[1:]


def _usage_hint(error: click.UsageError, name: str) -> str:
    path = error.ctx.command_path if error.ctx is not None else name
    return f"`{path} --help` shows the usage"


def _machine_hint(error: OSError) -> str | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free some space, or name another folder: TMPDIR, {_PLACES}"
    if error.errno == errno.EROFS:
        return f"name a path that can be written: {_PLACES}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"run as the owner of that path, or name another one: {_PLACES}"
    if error.errno in _PATH_FAULTS:
        return f"look what lies there, a file or a folder, and name the right path: {_PLACES}"
    return None


def report_error(message: str, hint: str | None = None) -> None:
    """Print `error: ...`, and a blank line and `hint: ...` if there is one, to stderr."""
    _say("error", "red", message)
    if hint:
        click.echo(err=True)
        _say("hint", "cyan", hint)


def warn(message: str) -> None:
    _say("warning", "yellow", message)


def note(message: str) -> None:
    """Print a line of progress or explanation to stderr."""
    click.echo(message, err=True)


def at_intervals(show: Callable[[int], None], seconds: float = 2.0) -> Callable[[int], None]:
    """Return `show`, called at most once every `seconds`."""
    last = time.monotonic()

    def shown(value: int) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            show(value)

    return shown


def _say(label: str, colour: str, text: str) -> None:
    plain = "NO_COLOR" in os.environ or not sys.stderr.isatty()
    head = f"{label}:" if plain else click.style(f"{label}:", fg=colour, bold=True)
    click.echo(f"{head} {text}", err=True)


def emit(text: str) -> None:
    """Print data to stdout."""
    click.echo(text)


def emit_json(value: Any) -> None:
    """Print one JSON document to stdout; whatever JSON does not know is written as text."""
    click.echo(json.dumps(value, indent=2, default=str))


_NUMBER = re.compile(r"-|-?\d[\d,.:]*( %| s| [KMGT]?i?B)?")


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns two spaces apart, those of numbers, sizes and times to the right. Cuts no cell."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = []
    for header, *column in zip(headers, *cells, strict=True):
        width = max(map(len, [header, *column]))
        right = bool(column) and all(_NUMBER.fullmatch(cell) for cell in column)
        columns.append([f"{cell:>{width}}" if right else f"{cell:<{width}}" for cell in (header, *column)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def size_text(size: float) -> str:
    """Bytes as `512 B`, `3.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration_text(seconds: float) -> str:
    """Seconds as `0.8 s`, `42 s`, `3:07`, `1:02:45`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def stderr_console() -> Console:
    """The rich console that bars and live displays are drawn on."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


class Steps:
    """Progress over a known number of steps with an ETA: a bar on a terminal, one line per step elsewhere.

    The ETA is the mean time of a finished step times the steps left. That holds for parallel steps too,
    because the clock counts wall time per finished step.
    """

    def __init__(self, total: int, title: str, clock: Callable[[], float] = time.monotonic):
        self.total, self.title, self.done = total, title, 0
        self._clock, self._start = clock, clock()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Steps:
        console = stderr_console()
        if console.is_terminal:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("eta {task.fields[eta]}"),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, eta="-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def eta(self) -> str:
        if not self.done:
            return "-"
        return duration_text((self._clock() - self._start) / self.done * (self.total - self.done))

    def say(self, text: str) -> None:
        """Print a line above the bar, or on its own."""
        if self._bar is None:
            note(text)
        else:
            self._bar.console.print(text, markup=False)

    def advance(self, text: str) -> None:
        """Finish one step and say what it was."""
        self.done += 1
        self.say(
            f"[{self.done}/{self.total}] {text}" + (f", eta {self.eta()}" if self.done < self.total else "")
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, eta=self.eta())
