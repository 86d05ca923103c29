"""This user's private files: what outlives a process, and one folder per process that does not.

    <private>/<digest>.<machine>.tried   this package has run on this machine
    <private>/live/<pid>-<random>/       verified copies of one process, and what torch unpacks from them

A process holds a lock on its own folder as long as it lives, and the kernel lets go of it however the process
ends. So whoever comes next can tell what the dead left, without asking a clock or a process table, and
removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aot.errors import ConfigError, EnvironmentFault, UntrustedArtifact
from aot.trust import check_trusted_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

PRIVATE_VARIABLE = "DFLASH_AOT_PRIVATE_DIR"
LOCK_NAME = "held"

_threads = threading.Lock()


class _Own(NamedTuple):
    pid: int
    path: Path


#: This process's folder, by private folder. Its lock is held by a descriptor that is never closed.
_own: dict[Path, _Own] = {}


def private_folder(path: Path | None = None) -> Path:
    """The folder of this user's private files.

    Raises UntrustedArtifact if anybody else may write there, ConfigError if it is no folder, EnvironmentFault
    if no library may be loaded from it.
    `path`, else DFLASH_AOT_PRIVATE_DIR, else `dflash-aot-UID` in the temporary folder.
    """
    if path is None:
        named = os.environ.get(PRIVATE_VARIABLE)
        path = Path(named) if named else Path(tempfile.gettempdir(), f"dflash-aot-{os.getuid()}")
    hint = f"name a folder of your own: `export {PRIVATE_VARIABLE}=...`"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted_folder(path)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"the private folder '{path}' is no folder", hint) from None
    except UntrustedArtifact as error:
        raise UntrustedArtifact(error.message, hint) from None
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        raise EnvironmentFault(f"'{path}' is mounted noexec: no package can be loaded from it", hint)
    return path.absolute()


def process_folder(private: Path) -> Path:
    """Return this process's own folder, made at the first call, which also removes those of dead processes.

    It goes when the process ends, or with the next process after a kill.
    """
    with _threads:
        own = _own.get(private)
        if own is None or own.pid != os.getpid() or not own.path.is_dir():
            own = _own[private] = _Own(os.getpid(), _make(private / "live"))
            atexit.register(_remove, own)
        return own.path


@contextlib.contextmanager
def unpacking_in(folder: Path) -> Iterator[None]:
    """Have torch's loader unpack into `folder`, one loader at a time: it reads TMPDIR."""
    with _threads:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def _make(live: Path) -> Path:
    live.mkdir(mode=0o700, exist_ok=True)
    # Between its making and its locking a folder looks like that of a dead process: nobody sweeps meanwhile.
    guard = _lock(live, wait=True)
    try:
        for folder in live.glob("*-*"):
            _sweep(folder)
        path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=live))
        _lock(path, wait=False)
    finally:
        os.close(guard)
    return path


def _sweep(folder: Path) -> None:
    # A folder that cannot be looked at or removed is left to the next process.
    with contextlib.suppress(OSError):
        descriptor = _lock(folder, wait=False)
        try:
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def _lock(folder: Path, wait: bool) -> int:
    # A file of its own: not every file system locks folders.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / LOCK_NAME, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove(own: _Own) -> None:
    # A forked child inherits the registration, not the folder.
    if own.pid == os.getpid():
        shutil.rmtree(own.path, ignore_errors=True)
