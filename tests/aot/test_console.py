"""The voice of the commands: where it goes, what it says, which exit code follows."""

import errno
import io
import os
from collections.abc import Callable

import click
import pytest

from aot import console
from aot.errors import ConfigError, EnvironmentFault, UserError


def command(body: Callable[[], int | None]) -> click.Group:
    @click.group()
    def cli() -> None:
        """Nothing."""

    @cli.command()
    @click.option("--size", type=int)
    def go(size: int | None) -> int | None:
        """Run the body."""
        return body()

    return cli


def fails(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


def run(body: Callable[[], int | None], *arguments: str) -> int:
    return console.run(command(body), "tool", list(arguments) or ["go"])


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (8, 8)])
def test_what_a_command_returns_is_its_exit_code(result: int | None, code: int) -> None:
    assert run(lambda: result) == code


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("it broke", "`mend it`"), 1, "error: it broke\n\nhint: `mend it`\n"),
        (UserError("it broke"), 1, "error: it broke\n"),
        (ConfigError("bad value", "use 3"), 64, "error: bad value\n\nhint: use 3\n"),
        (EnvironmentFault("no compiler", "install one"), 69, "error: no compiler\n\nhint: install one\n"),
        (
            OSError(errno.ENOSPC, "x", "/store/blob"),
            69,
            "error: no space left on device: /store/blob\n\n"
            "hint: free some space, or name another folder: TMPDIR, `--store`, `--output`, `--lock` or "
            "`--remote`, whichever it is\n",
        ),
        (KeyboardInterrupt(), 130, "\nerror: interrupted\n"),
    ],
    ids=["failed", "no hint", "usage", "environment", "disk full", "ctrl-c"],
)
def test_errors_speak_on_stderr_only(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fails(error)) == code
    assert capsys.readouterr() == ("", text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["goo"], "error: no such command 'goo'"),
        (["go", "--siz"], "error: no such option '--siz'"),
        (["go", "--size", "x"], "error: invalid value for '--size': 'x' is not a valid integer\n"),
        (["go", "extra"], "error: got unexpected extra argument (extra)\n"),
    ],
)
def test_a_usage_error_is_64_and_names_the_help(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(lambda: 0, *arguments) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.lower().startswith(text.lower())
    assert err.endswith(" --help` shows the usage\n")


@pytest.mark.parametrize("error", [ValueError("bug"), AssertionError("bug"), FileNotFoundError(2, "bug")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error), match="bug"):
        run(fails(error))


def test_a_table_cuts_nothing_and_aligns_numbers_to_the_right() -> None:
    rows = [("train_step", 512, "1.5 MiB", "ok"), ("eval", 49152, "-", "a long text")]
    assert console.table(("program", "tokens", "size", "note"), rows) == (
        "program     tokens     size  note\n"
        "train_step     512  1.5 MiB  ok\n"
        "eval         49152        -  a long text"
    )
    assert console.table(("a", "b"), []) == "a  b"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_read_well(value: int, text: str) -> None:
    assert console.size_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.84, "0.8 s"), (9.96, "10.0 s"), (42.2, "42 s"), (187, "3:07"), (3765, "1:02:45")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert console.duration_text(seconds) == text


def test_progress_says_one_line_per_step_with_an_eta(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with console.Steps(3, "build", clock=lambda: now[0]) as steps:
        for name in ("a", "b", "c"):
            now[0] += 60.0
            steps.advance(name)
    assert capsys.readouterr() == ("", "[1/3] a, eta 2:00\n[2/3] b, eta 1:00\n[3/3] c\n")


def test_progress_draws_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with console.Steps(2, "build") as steps:
        steps.advance("a")
    assert "[1/2] a" in terminal.getvalue()
    assert "━" in terminal.getvalue()


@pytest.mark.parametrize(("no_color", "colored"), [(None, True), ("1", False)])
def test_colour_is_for_terminals_and_no_color_is_honoured(
    monkeypatch: pytest.MonkeyPatch, no_color: str | None, colored: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    console.report_error("it broke")
    assert ("\x1b[" in terminal.getvalue()) is colored
    assert "error:" in terminal.getvalue()


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EROFS])
def test_a_path_of_the_wrong_kind_is_told_in_one_line(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails without `_PATH_FAULTS` (a traceback), or if the hint knows of `--store` alone."""
    assert run(fails(OSError(code, "x", "/some/path"))) == 69
    out, err = capsys.readouterr()
    message, _, hint = err.partition("\n\n")
    assert (out, message) == ("", f"error: {os.strerror(code).lower()}: /some/path")
    for option in ("--store", "--output", "--lock"):
        assert option in hint
