"""What becomes of a .pt2 between the compiler and the store: no sources, no paths of the machine.

Paths tell who built a package, and where. Each is replaced by one of the same length, so that no offset in
a library moves; the compiled code uses the paths in it for messages, and only the last part of a kernel's.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Inductor's own sources repeat every compile command; the loader reads none of them.
SOURCES = (".cpp", ".h", ".kernel_metadata.json")
# But torch 2.11's makes the name of the metadata from this one's, so it stays, empty.
NAMESAKE = ".wrapper.cpp"
# What every machine has in these places tells nothing.
COMMON = ("/", "/usr", "/usr/local", "/opt", "/tmp", "/var/tmp", "/home")
EPOCH = (1980, 1, 1, 0, 0, 0)


def machine_paths(*more: Path) -> list[bytes]:
    """Folders whose names tell about this machine or its user, longest first, each as it is and resolved."""
    import torch

    torch_home = Path(torch.__file__).parents[1]
    folders = {Path.home(), Path.cwd(), Path(sys.prefix), Path(tempfile.gettempdir()), torch_home, *more}
    names = {os.fspath(folder.absolute()) for folder in folders} | {
        os.fspath(folder.resolve()) for folder in folders
    }
    return sorted(
        (name.encode() for name in names if name not in COMMON), key=lambda name: (-len(name), name)
    )


def canonical_package(package: bytes, paths: Iterable[bytes]) -> bytes:
    """Return a compiled package without sources, with `paths` blanked, members dated alike and in order.

    `paths` longest first: the blank of a shorter one must not hide a longer one.
    """
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(package)) as archive,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as canonical,
    ):
        for name in sorted(archive.namelist()):
            if name.endswith(SOURCES) and not name.endswith(NAMESAKE):
                continue
            member = zipfile.ZipInfo(name, EPOCH)
            member.create_system = 3
            member.external_attr = 0o100644 << 16
            content = b"" if name.endswith(NAMESAKE) else blanked(archive.read(name), paths)
            canonical.writestr(member, content)
    return buffer.getvalue()


def blanked(content: bytes, paths: Iterable[bytes]) -> bytes:
    """Replace each path by `/___` of its length."""
    for path in paths:
        content = content.replace(path, b"/" + b"_" * (len(path) - 1))
    return content


def differing_members(one: bytes, other: bytes) -> list[str]:
    """Name what differs between two packages: members by name, or the archive itself."""
    first, second = (_digests(package) for package in (one, other))
    found = [
        name if name in first and name in second else f"{name} (in one of them only)"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]
    return found or (["the archive around equal members"] if one != other else [])


def _digests(package: bytes) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
