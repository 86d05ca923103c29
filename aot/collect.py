"""What a store holds that nothing names any more, and its removal.

An artifact is kept if a lock file names its key: the ones given, and every `artifacts.lock` below the folders
given (checkpoints carry a copy). Removal is by unlinking alone, so code that is mapped into a running process
lives on, and it starts with the manifest: an artifact that is going is never half there. No age is looked at.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aot.durable import sync_folder
from aot.errors import ConfigError, CorruptArtifact, UntrustedArtifact, UserError
from aot.manifest import DIGEST
from aot.store import STORE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from aot.store import Store

LOCK_NAME = "artifacts.lock"


@dataclass(frozen=True)
class Garbage:
    """What may go: manifests, what lies beside them or was left behind there, blobs, and in `aside` the
    quarantine and the folders of failed builds.
    """

    manifests: tuple[Path, ...]
    beside: tuple[Path, ...]
    blobs: tuple[Path, ...]
    aside: tuple[Path, ...]
    size: int


@dataclass(frozen=True)
class Usage:
    """Bytes on disk. `unnamed`: blobs that no manifest names."""

    programs: dict[str, tuple[int, int]]
    manifests: int
    unnamed: int
    quarantine: int
    scratch: int


def named_keys(paths: Iterable[Path]) -> set[str]:
    """Return every key that the lock files at or below `paths` name.

    Raises ConfigError for a folder without a lock file (it is mistyped more often than it is empty), and for
    a lock file that cannot be read: then nothing may be called unnamed.
    """
    keys: set[str] = set()
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob(LOCK_NAME))
        if not files:
            raise ConfigError(
                f"'{path}' is no lock file and holds none", f"name a folder with an '{LOCK_NAME}' in it"
            )
        for file in files:
            keys |= _keys_of(file)
    return keys


def _keys_of(file: Path) -> set[str]:
    try:
        keys = {entry["key"] for entry in json.loads(file.read_bytes())["artifacts"]}
        if all(DIGEST.fullmatch(key) for key in keys):
            return keys
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"'{file}' is no lock file", "`dflash-aot build` writes one")


def garbage(store: Store, keep: set[str]) -> Garbage:
    """Return what nothing needs when the artifacts of `keep` are. The caller holds the store's lock if it
    wants to act on it.
    """
    unwanted = [path for path in store.manifest_paths() if path.stem not in keep]
    wanted = [path for path in store.manifest_paths() if path.stem in keep]
    blobs = _blobs_but_of(store, wanted)
    builds = [lock.with_suffix("") for lock in sorted((store.root / "build").glob("*.lock"))]
    aside = [path for path in (store.quarantine_root, *builds) if path.is_dir()]
    beside = [
        path
        for path in sorted(store.manifest_root.glob("*/*/*"))
        if path.suffix != ".json" and path.stem not in keep
    ]
    size = sum(map(_size, (*unwanted, *beside, *blobs, *aside)))
    return Garbage(tuple(unwanted), tuple(beside), tuple(blobs), tuple(aside), size)


def _blobs_but_of(store: Store, manifests: Sequence[Path]) -> list[Path]:
    """All blobs that those manifests do not name; none if one of them cannot be read."""
    named = set()
    for path in manifests:
        try:
            named.add(store.blob_path(store.read_manifest(path)))
        except (CorruptArtifact, UntrustedArtifact):
            return []
    return sorted(path for path in store.blobs.glob("*.zst") if path not in named)


def collect(store: Store, keep: set[str]) -> Garbage:
    """Remove what `garbage` lists, and what dead publishers left; return it.

    Raises UserError if the store cannot be written.
    """
    try:
        with store.locked():
            store.sweep()
            found = garbage(store, keep)
            for manifest in found.manifests:
                manifest.unlink()
                sync_folder(manifest.parent)
            for path in (*found.beside, *found.blobs):
                path.unlink()
            for folder in found.aside:
                _remove_folder(folder)
    except OSError as error:
        raise UserError(
            f"cannot remove from '{store.root}': {(error.strerror or str(error)).lower()}",
            f"name a store you can write: `--store DIR` or ${STORE_VARIABLE}",
        ) from error
    return found


def _remove_folder(folder: Path) -> None:
    """Remove the quarantine, or a build's folder unless that build is still at work (it holds its lock)."""
    try:
        lock = os.open(f"{folder}.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        shutil.rmtree(folder)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def usage(store: Store) -> Usage:
    """Measure a store. Manifests that cannot be read count as no program's."""
    programs: dict[str, tuple[int, int]] = {}
    counted = set()
    for path in store.manifest_paths():
        try:
            blob = store.blob_path(store.read_manifest(path))
        except (CorruptArtifact, UntrustedArtifact):
            continue
        number, size = programs.get(path.parents[1].name, (0, 0))
        # A blob that two artifacts share lies there once.
        programs[path.parents[1].name] = (number + 1, size + (0 if blob in counted else _size(blob)))
        counted.add(blob)
    return Usage(
        programs,
        manifests=_size(store.manifest_root),
        unnamed=sum(_size(path) for path in store.blobs.glob("*.zst") if path not in counted),
        quarantine=_size(store.quarantine_root),
        scratch=sum(_size(store.root / name) for name in ("tmp", "build", "incoming")),
    )


def _size(path: Path) -> int:
    """Bytes of a file or of all files below a folder; what vanishes meanwhile counts nothing."""
    try:
        if path.is_dir():
            return sum(_size(below) for below in path.iterdir())
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
