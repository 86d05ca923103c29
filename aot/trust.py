"""Who could have written this file: paths are opened without following links, checked on the way.

A path is trusted when the file and every folder above it belong to this user or to root and nobody else may
write there. A world-writable folder with the sticky bit, such as /tmp, is fine above: others cannot replace
our entries.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from aot.errors import CorruptArtifact, UntrustedArtifact

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_trusted(path: Path) -> BinaryIO:
    """Open a regular file for reading after checking it and every folder above it.

    Raises UntrustedArtifact naming the path and what to change; CorruptArtifact if there is no such file.
    """
    path = path.absolute()
    folder = _open_folder(path.parent)
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = _open_entry(path, folder, os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.close(folder)
    status = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedArtifact(f"{path} is not a regular file", f"remove it: `rm '{path}'`")
        _check_owner_and_mode(path, status, sticky_is_fine=False)
    except UntrustedArtifact:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_trusted_folder(path: Path) -> None:
    """Check that nobody else may write into a folder or swap one above it. Raises as `open_trusted` does."""
    path = path.absolute()
    descriptor = _open_folder(path)
    try:
        _check_owner_and_mode(path, os.fstat(descriptor), sticky_is_fine=False)
    finally:
        os.close(descriptor)


def _open_folder(path: Path) -> int:
    """Walk from the root, each step relative to the folder checked before: nothing is swapped in between."""
    current = Path("/")
    descriptor = os.open(current, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_owner_and_mode(current, os.fstat(descriptor), sticky_is_fine=True)
        for part in path.parts[1:]:
            current = current / part
            above, descriptor = descriptor, _open_entry(current, descriptor, os.O_RDONLY | os.O_DIRECTORY)
            os.close(above)
            _check_owner_and_mode(current, os.fstat(descriptor), sticky_is_fine=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_entry(path: Path, folder: int, flags: int) -> int:
    try:
        return os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise CorruptArtifact(
            f"{path} does not exist", "`dflash-aot build RUN` builds what is missing"
        ) from None
    except OSError as error:
        if stat.S_ISLNK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise UntrustedArtifact(
                f"{path} is a symbolic link: whoever owns it decides what is loaded",
                f"if you named it, name '{(real := os.path.realpath(path))}' in its place; inside a store or "
                f"keyring: `rm '{path}' && mv '{real}' '{path}'`",
            ) from None
        raise UntrustedArtifact(f"{path} cannot be opened: {error.strerror}") from None


def _check_owner_and_mode(path: Path, status: os.stat_result, sticky_is_fine: bool) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedArtifact(
            f"{path} belongs to user {status.st_uid}, neither to you nor to root",
            "copy the store into a folder of your own and name it with `--store`",
        )
    sticky = status.st_mode & stat.S_ISVTX
    if status.st_mode & OTHERS_WRITE and not (sticky and sticky_is_fine):
        who = "everybody" if status.st_mode & stat.S_IWOTH else f"group {status.st_gid}"
        raise UntrustedArtifact(f"{path} may be written by {who}", f"`chmod go-w '{path}'`")
