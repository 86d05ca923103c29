"""Row 26: what a dead process unpacked goes with the next one; what a live one uses is left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aot import private
from aot.canary import child_environment
from aot.private import process_folder, unpacking_in

if TYPE_CHECKING:
    import pytest

HOLDER = """
import sys, time
from pathlib import Path
from aot.private import process_folder
folder = process_folder(Path(sys.argv[1]))
(folder / "aotinductor_x").mkdir()
(folder / "aotinductor_x" / "model.so").write_bytes(bytes(100))
print(folder, flush=True)
sys.stdin.read()
"""


def holder(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has unpacked something; it ends when its stdin does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_dead_are_swept_and_the_living_are_not_whatever_the_clock_says(tmp_path: Path) -> None:
    """Fails without `_sweep` (the dead stay), and with one that goes by age: both are given a wrong one."""
    (dead, left), (alive, used) = holder(tmp_path), holder(tmp_path)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert (left / "aotinductor_x" / "model.so").exists()
    os.utime(left, (2**32, 2**32))
    os.utime(used, (0, 0))
    mine = process_folder(tmp_path)
    assert not left.exists()
    assert (used / "aotinductor_x" / "model.so").exists()
    assert set((tmp_path / "live").glob("*-*")) == {mine, used}
    alive.communicate("")
    assert not used.exists()


def test_a_folder_is_one_per_process_and_a_fork_has_its_own(tmp_path: Path) -> None:
    """Fails without the process id in `_own` or in `_remove`: a child would share or remove its parent's."""
    mine = process_folder(tmp_path)
    assert process_folder(tmp_path) == mine
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # What the end of this process would do, had it an ordinary one.
        for own in private._own.values():
            private._remove(own)
        os.write(writer, str(process_folder(tmp_path)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(os.read(reader, 1000).decode()) != mine
    assert mine.is_dir()


RACER = """
import sys
from pathlib import Path
from aot import private
for _ in range(40):
    folder = private.process_folder(Path(sys.argv[1]))
    (folder / "file").write_bytes(b"x")
    assert (folder / "file").read_bytes() == b"x"
    # Forgotten, not unlocked: the descriptor lives on, as in a process that goes on working.
    private._own.clear()
assert all((f / "file").exists() for f in Path(sys.argv[1], "live").glob(f"{__import__('os').getpid()}-*"))
assert len(list(Path(sys.argv[1], "live").glob(f"{__import__('os').getpid()}-*"))) == 40
"""


def test_processes_that_start_together_sweep_nothing_of_each_other(tmp_path: Path) -> None:
    """Fails without the lock on `live` in `_make`: a folder is swept between its making and its locking."""
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path)], env=child_environment())
        for _ in range(6)
    ]
    assert [racer.wait() for racer in racers] == [0] * 6
    process_folder(tmp_path)
    assert len(list((tmp_path / "live").glob("*-*"))) == 1


def test_tmpdir_is_put_back_and_its_absence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/somewhere"):
        monkeypatch.delenv("TMPDIR", raising=False)
        if before:
            monkeypatch.setenv("TMPDIR", before)
        with contextlib.suppress(RuntimeError), unpacking_in(tmp_path):
            assert os.environ["TMPDIR"] == str(tmp_path)
            raise RuntimeError
        assert os.environ.get("TMPDIR") == before
