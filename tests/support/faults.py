"""Faults at the n-th operation: a publisher is killed, failed or recorded at each call of `os` it makes."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What changes a file system, and what can fail on the way.
OPERATIONS = ("open", "mkdir", "write", "fsync", "close", "link", "replace", "rename", "unlink", "rmdir")


def scaled(full: int, least: int = 1) -> int:
    """A number of cases: full under `make faults`, a fraction of it otherwise."""
    return max(least, int(full * float(os.environ.get("FAULTS_SCALE", "0.02"))))


def full_run() -> bool:
    return float(os.environ.get("FAULTS_SCALE", "0")) >= 1


@contextmanager
def intercepted(act: Callable[[str, Callable[..., Any], tuple, dict], Any]) -> Iterator[None]:
    """Hand every operation to `act(name, original, args, kwargs)`, which makes the call or does not."""
    originals = {name: getattr(os, name) for name in OPERATIONS}

    def wrapper(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: act(name, originals[name], args, kwargs)

    for name in OPERATIONS:
        setattr(os, name, wrapper(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


@dataclass
class FailAt:
    """Raise `code` at one operation; a write puts half of its bytes first, a close closes first."""

    index: int
    code: int
    count: int = 0
    failed: str | None = None

    def __call__(self, name: str, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        self.count += 1
        if self.count != self.index + 1:
            return original(*args, **kwargs)
        self.failed = name
        if name == "write":
            original(args[0], args[1][: len(args[1]) // 2])
        elif name == "close":
            original(*args)
        raise OSError(self.code, os.strerror(self.code))


def killed_at(index: int, action: Callable[[], Any]) -> bool:
    """Run `action` in a forked child that is killed before its n-th operation (in the middle, if it is a
    write); say whether it was.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def act(name: str, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            nonlocal count
            count += 1
            if count == index + 1:
                if name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        code = 1
        try:
            with intercepted(act):
                action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0, "the action failed by itself"
    return False


@dataclass
class Inode:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Disk:
    """What a folder holds now, and what of it a power cut would leave: content since the last fsync of the
    file and names since the last fsync of their folder may be lost, each on its own.
    """

    root: Path
    now: dict[Path, Inode | None] = field(default_factory=dict)
    durable: dict[Path, dict[str, Inode | None]] = field(default_factory=dict)
    descriptors: dict[int, Path] = field(default_factory=dict)
    on_change: Callable[[], None] = lambda: None
    #: Set while a change is looked at: the looker's own operations do not count.
    busy: bool = False

    def load(self) -> None:
        """Take what is on the real disk as durable."""
        for path in sorted(self.root.rglob("*")):
            content = None if path.is_dir() else path.read_bytes()
            self.now[path] = None if content is None else Inode(bytearray(content), content)
        for folder in {self.root, *(path for path, inode in self.now.items() if inode is None)}:
            self._sync_folder(folder)

    def _sync_folder(self, folder: Path) -> None:
        self.durable[folder] = {path.name: inode for path, inode in self.now.items() if path.parent == folder}

    def __call__(self, name: str, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        result = original(*args, **kwargs)
        # Steps relative to a folder are reads, and the removal of private files.
        if not self.busy and kwargs.get("dir_fd") is None:
            self.busy = True
            self._note(name, args, result)
            self.on_change()
            self.busy = False
        return result

    def _note(self, name: str, args: tuple, result: Any) -> None:
        if name == "write":
            inode = self.now.get(self.descriptors.get(args[0], Path()))
            if inode is not None:
                inode.data += bytes(args[1][:result])
            return
        if name == "fsync":
            path = self.descriptors.get(args[0], Path())
            inode = self.now.get(path)
            if inode is not None:
                inode.synced = bytes(inode.data)
            else:
                self._sync_folder(path)
            return
        if name == "close":
            self.descriptors.pop(args[0], None)
            return
        path = Path(args[0])
        if name == "open":
            self.descriptors[result] = path
            if args[1] & os.O_CREAT:
                self.now.setdefault(path, Inode())
        elif name == "mkdir":
            self.now[path] = None
        elif name == "link":
            self.now[Path(args[1])] = self.now[path]
        elif name in ("replace", "rename"):
            self.now[Path(args[1])] = self.now.pop(path)
        elif name == "unlink":
            self.now.pop(path, None)

    def after_power_cut(self, target: Path, names_lost: bool, zeroed: bool) -> None:
        """Write what a cut leaves to `target`: all names or only the synced ones, unsynced content gone or
        zero.
        """
        for name, inode in self._names(self.root, names_lost):
            path = target / name
            if inode is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            lost = bytes(len(inode.data)) if zeroed else b""
            path.write_bytes(inode.synced if inode.synced == inode.data else lost)

    def _names(self, folder: Path, names_lost: bool) -> Iterator[tuple[Path, Inode | None]]:
        if not names_lost:
            for path, inode in self.now.items():
                yield path.relative_to(self.root), inode
            return
        for name, inode in self.durable.get(folder, {}).items():
            yield (folder / name).relative_to(self.root), inode
            if inode is None:
                yield from self._names(folder / name, names_lost)


ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE)
