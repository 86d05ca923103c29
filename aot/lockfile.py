"""The lock file of a run: exactly which artifact serves each program and bucket.

`build` writes it, `train` requires it and copies it into every checkpoint, a resumed run must have the same.
It holds each artifact's key and digests, and the inputs behind the key, so that two locks can be compared
field by field when neither artifact is there any more. It is JSON in one spelling, short records on a line.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aot.buckets import Bucket
from aot.durable import replace_file
from aot.errors import ConfigError, CorruptArtifact, UserError
from aot.manifest import DIGEST, Difference, KeyInputs

if TYPE_CHECKING:
    from pathlib import Path

    from aot.manifest import Manifest

SCHEMA = 1
FILE_NAME = "artifacts.lock"
VARIABLE = "DFLASH_AOT_LOCK"
MAX_BYTES = 1 << 26
LINE_WIDTH = 110
Place = tuple[str, Bucket]


class LockMismatch(UserError):
    """The lock file does not name the artifact that is there."""


@dataclass(frozen=True)
class LockedArtifact:
    """One entry: the artifact of one program at one bucket."""

    key: str
    package_digest: str
    graph_hash: str
    inputs: KeyInputs

    @classmethod
    def of(cls, manifest: Manifest) -> LockedArtifact:
        return cls(manifest.key, manifest.package_digest, manifest.graph_hash, manifest.key_inputs)

    @property
    def place(self) -> Place:
        return self.inputs.program, self.inputs.bucket

    def differences(self, found: LockedArtifact) -> list[Difference]:
        """Where another artifact of the same place differs from this one: its inputs, else what was built."""
        if self == found:
            return []
        inputs = self.inputs.differences(found.inputs, at_load=False)
        if inputs:
            return inputs
        names = ("key", "graph_hash", "package_digest")
        pairs = [(name, getattr(self, name), getattr(found, name)) for name in names]
        return [Difference(name, ours[:12], theirs[:12]) for name, ours, theirs in pairs if ours != theirs]


Lock = Mapping[Place, LockedArtifact]


def lock_of(manifests: Iterable[Manifest]) -> dict[Place, LockedArtifact]:
    """The lock that names these artifacts, in order of program and bucket."""
    entries = [LockedArtifact.of(manifest) for manifest in manifests]
    return {entry.place: entry for entry in sorted(entries, key=lambda entry: entry.place)}


def lock_text(lock: Lock) -> str:
    """One spelling per lock, for a file that people compare."""
    records = [
        {
            "program": program,
            "bucket": str(bucket),
            "key": entry.key,
            "package_digest": entry.package_digest,
            "graph_hash": entry.graph_hash,
            "inputs": entry.inputs.as_json(),
        }
        for (program, bucket), entry in sorted(lock.items(), key=lambda pair: pair[0])
    ]
    return _pretty({"schema": SCHEMA, "artifacts": records}, "") + "\n"


def read_lock(path: Path) -> dict[Place, LockedArtifact]:
    """Read a lock file. Raises ConfigError if there is none, CorruptArtifact naming what is wrong in it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (
            "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        )
        raise ConfigError(
            f"the lock file '{path}' {reason}",
            "`dflash-aot build RUN` writes it; name another one with `--lock PATH`",
        ) from None
    try:
        return _parse(data)
    except CorruptArtifact as error:
        raise CorruptArtifact(
            f"{path}: {error.message}", "`dflash-aot build RUN` (without `--buckets`) writes it anew"
        ) from None


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file; nothing is touched if it says the same already. Raises OSError."""
    content = lock_text(lock).encode()
    if not (path.is_file() and path.read_bytes() == content):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)


def check_place(path: Path) -> None:
    """Find out before long work whether a lock file can be written after it. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"no lock file can be written to '{path}': {error.strerror}",
            "name another one with `--lock PATH`",
        ) from None
    if path.is_dir():
        raise ConfigError(f"'{path}' is a folder, not a lock file", f"e.g. `--lock {path / FILE_NAME}`")


def update_lock(path: Path, manifests: Iterable[Manifest], whole: bool) -> None:
    """Name newly built artifacts. `whole`: they are all of the run, other entries go; else those are kept.

    Two builds that write at once keep each other's entries. Raises CorruptArtifact or ConfigError when
    entries of a file that cannot be read would have to be kept.
    """
    check_place(path)
    with _alone_in(path.parent):
        try:
            kept = {} if whole or not path.exists() else read_lock(path)
        except CorruptArtifact as error:
            hint = (
                "`dflash-aot build RUN` without `--buckets` writes it anew: it names all artifacts of the run"
            )
            raise CorruptArtifact(error.message, hint) from None
        write_lock(path, {**kept, **lock_of(manifests)})


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep others who ask from the lock files in a folder: the file itself is replaced when it is written."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems lock no folders: there the last of two writers wins.
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        yield
    finally:
        os.close(descriptor)


def lock_differences(then: Lock, now: Lock) -> list[tuple[Place, list[Difference]]]:
    """What differs between two locks, by place; a place that only one of them names is no difference."""
    pairs = [(place, then[place].differences(now[place])) for place in sorted(set(then) & set(now))]
    return [(place, differences) for place, differences in pairs if differences]


def _parse(data: bytes) -> dict[Place, LockedArtifact]:
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptArtifact(f"not a lock file: {error}") from None
    if type(document) is not dict or document.get("schema") != SCHEMA:
        raise CorruptArtifact(f"not a lock file of schema {SCHEMA}")
    records = document.get("artifacts")
    if type(records) is not list or set(document) != {"schema", "artifacts"}:
        raise CorruptArtifact("not of the form {schema, artifacts}")
    lock: dict[Place, LockedArtifact] = {}
    for record in records:
        entry = _parse_record(record)
        if entry.place in lock:
            raise CorruptArtifact(f"{entry.place[0]} {entry.place[1]} is named twice")
        lock[entry.place] = entry
    return lock


def _parse_record(record: Any) -> LockedArtifact:
    fields = {"program", "bucket", "key", "package_digest", "graph_hash", "inputs"}
    if type(record) is not dict or set(record) != fields:
        raise CorruptArtifact(f"an artifact is not of the form {{{', '.join(sorted(fields))}}}")
    for name in ("key", "package_digest", "graph_hash"):
        if type(record[name]) is not str or DIGEST.fullmatch(record[name]) is None:
            raise CorruptArtifact(f"'{name}' is not a digest")
    inputs = KeyInputs.from_json(record["inputs"])
    if (record["program"], record["bucket"]) != (inputs.program, str(inputs.bucket)):
        raise CorruptArtifact(f"an artifact of {inputs.program} {inputs.bucket} is filed under another place")
    if inputs.key() != record["key"]:
        raise CorruptArtifact(f"the key of {inputs.program} {inputs.bucket} is not that of its inputs")
    return LockedArtifact(record["key"], record["package_digest"], record["graph_hash"], inputs)


def _pretty(value: Any, indent: str) -> str:
    """JSON that a diff shows well: what fits on a line stands on one, other fields one below the other."""
    line = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if not isinstance(value, (dict, list)) or len(indent) + len(line) <= LINE_WIDTH:
        return line
    inner = indent + " "
    if isinstance(value, list):
        items = [_pretty(item, inner) for item in value]
    else:
        items = [f"{json.dumps(key)}: {_pretty(value[key], inner)}" for key in sorted(value)]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"
