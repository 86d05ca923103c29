"""Files that survive a power cut: content is synced before it gets its name, and the name after.

Every step is one call of `os`, so that tests can fail, kill or replay each of them.
"""

import os
import uuid
from contextlib import suppress
from pathlib import Path

CHUNK = 1 << 20


def write_synced(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a new file; its content is on the disk when this returns, its name may not be."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest[:CHUNK]) :]
        os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise
    # Some file systems tell only here that the content did not arrive.
    os.close(descriptor)


def give_name(temporary: Path, target: Path) -> None:
    """Let a synced file appear under its name, durably; a name that is taken gets the new content."""
    make_folders(target.parent)
    try:
        os.link(temporary, target)
    except FileExistsError:
        os.replace(temporary, target)  # noqa: PTH105
    sync_folder(target.parent)


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write `content` to `path`, replacing what is there. Raises OSError, and then nothing has changed."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_synced(temporary, content, mode)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folders(folder: Path) -> None:
    """Make a folder and those above it, each durable and, whatever the umask, writable by its owner alone."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder, 0o755)  # noqa: PTH102
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
