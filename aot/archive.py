"""What a .pt2 may contain. Torch's loader trusts its zip: it runs a compiler named in JSON and follows `..`.

So the members are checked against an allow-list before a package comes near it. Standard library only.
"""

from __future__ import annotations

import io
import re
import zipfile

from aot.errors import CorruptArtifact

MODEL_NAME = "model"

_MODEL_FILE = re.compile(
    rf"[A-Za-z0-9_]+/data/aotinductor/{MODEL_NAME}/[A-Za-z0-9_]+[A-Za-z0-9_.]*\.(so|cpp|cubin|json)"
)
_HEADER_FILE = re.compile(
    r"[A-Za-z0-9_]+/(archive_format|archive_version|byteorder|version|\.format_version"
    r"|\.data/(version|serialization_id))"
)


def check_archive(package: bytes, name: str) -> None:
    """Raise CorruptArtifact, naming the member, unless `package` is a compiled .pt2 and nothing else.

    Refused: anything but stored regular files of known names under one folder; `..`, absolute, NUL,
    duplicate or case-colliding names; compile flags (they make the loader run a compiler); any number of
    libraries but one.
    """
    try:
        members = zipfile.ZipFile(io.BytesIO(package)).infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CorruptArtifact(f"{name}: not a package: {error}") from None
    seen: set[str] = set()
    for member in members:
        problem = _problem(member, seen)
        if problem:
            raise CorruptArtifact(f"{name}: member {member.orig_filename!r} of the package {problem}")
        seen.add(member.filename.lower())
    if len({member.filename.split("/")[0] for member in members}) != 1:
        raise CorruptArtifact(f"{name}: the package holds several folders")
    libraries = sum(member.filename.endswith(".so") for member in members)
    if libraries != 1:
        raise CorruptArtifact(f"{name}: the package holds {libraries} compiled libraries, not one")


def _problem(member: zipfile.ZipInfo, seen: set[str]) -> str | None:
    path = member.orig_filename
    if not (_MODEL_FILE.fullmatch(path) or _HEADER_FILE.fullmatch(path)) or ".." in path:
        return "is not on the allow-list"
    if path.endswith("_compile_flags.json"):
        return "would make the loader run a compiler"
    if path.lower() in seen:
        return "is there twice"
    kind = member.external_attr >> 16 & 0o170000
    if kind not in (0, 0o100000):
        return "is not a regular file"
    if member.compress_type != zipfile.ZIP_STORED:
        return "is compressed"
    return None
