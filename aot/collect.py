"""What a store holds that nothing names any more, and its removal.

An artifact is kept if a lock file names its key: the ones given, and every `artifacts.lock` below the folders
given (checkpoints carry a copy), links followed. Only what has a name that a store gives is listed. Removal
is by unlinking alone, so code that is mapped into a running process lives on, and it starts with the
manifest: an artifact that is going is never half there. No age is looked at.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aot.durable import sync_folder
from aot.errors import ConfigError, CorruptArtifact, UntrustedArtifact, UserError
from aot.lockfile import FILE_NAME
from aot.manifest import DIGEST
from aot.store import STORE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aot.store import Store

# A signature or an origin; with a dot and a random end, one that was being written.
BESIDE = re.compile(r"(\.)?([0-9a-f]{64})\.(?:sig|origin)(?(1)\.[0-9a-f]{32})")


@dataclass(frozen=True)
class Garbage:
    """What may go: manifests, what lies beside them or was left behind there, blobs, and in `aside` the files
    of the quarantine and the folders of failed builds. `left`: folders of dead publishers.
    """

    manifests: tuple[Path, ...]
    beside: tuple[Path, ...]
    blobs: tuple[Path, ...]
    aside: tuple[Path, ...]
    left: tuple[Path, ...]
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
    a lock file or folder that cannot be read: then nothing may be called unnamed.
    """
    keys: set[str] = set()
    for path in paths:
        files = _lock_files(path) if path.is_dir() else [path]
        if not files:
            raise ConfigError(
                f"'{path}' is no lock file and holds none", f"name a folder with an '{FILE_NAME}' in it"
            )
        for file in files:
            keys |= _keys_of(file)
    return keys


def _lock_files(root: Path) -> list[Path]:
    """All lock files below a folder, through links too; each folder once, for links may form a ring."""
    found, seen = [], set()

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"'{error.filename}' cannot be read: {(error.strerror or str(error)).lower()}",
            "a lock file in it may name artifacts: make it readable, or remove it",
        ) from error

    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        place = os.path.realpath(folder)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        if FILE_NAME in (*files, *folders):
            found.append(Path(folder, FILE_NAME))
    return sorted(found)


def _keys_of(file: Path) -> set[str]:
    try:
        keys = {entry["key"] for entry in json.loads(file.read_bytes())["artifacts"]}
        if all(DIGEST.fullmatch(key) for key in keys):
            return keys
    except OSError as error:
        raise ConfigError(
            f"'{file}' cannot be read as a lock file: {(error.strerror or str(error)).lower()}",
            "what it names is not known: mend or remove it",
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(f"'{file}' is no lock file", "`dflash-aot build` writes one")


def garbage(store: Store, keep: set[str]) -> Garbage:
    """Return what nothing needs when the artifacts of `keep` are. The caller holds the store's lock if it
    wants to act on it.
    """
    unwanted = [
        path for path in store.manifest_paths() if path.stem not in keep and DIGEST.fullmatch(path.stem)
    ]
    wanted = [path for path in store.manifest_paths() if path.stem in keep]
    blobs = _blobs_but_of(store, wanted)
    locks = [lock for lock in sorted((store.root / "build").glob("*.lock")) if DIGEST.fullmatch(lock.stem)]
    builds = [folder for lock in locks if (folder := lock.with_suffix("")).is_dir()]
    quarantine = [
        path
        for path in sorted(store.quarantine_root.glob("*"))
        if DIGEST.fullmatch(path.stem) and path.suffix in (".json", ".pt2", ".reason") and path.is_file()
    ]
    beside = [
        path
        for path in sorted(store.manifest_root.glob("*/*/*"))
        if (match := BESIDE.fullmatch(path.name)) and match[2] not in keep
    ]
    parts = (unwanted, beside, blobs, [*quarantine, *builds], store.left_behind())
    return Garbage(*map(tuple, parts), size=sum(_size(path) for part in parts for path in part))


def _blobs_but_of(store: Store, manifests: Sequence[Path]) -> list[Path]:
    """All blobs that those manifests do not name; none if one of them cannot be read."""
    named = set()
    for path in manifests:
        try:
            named.add(store.blob_path(store.read_manifest(path)))
        except (CorruptArtifact, UntrustedArtifact):
            return []
    return sorted(
        path for path in store.blobs.glob("*.zst") if path not in named and DIGEST.fullmatch(path.stem)
    )


def collect(store: Store, keep: set[str]) -> Garbage:
    """Remove what `garbage` lists, and what dead publishers left; return it.

    Raises UserError if the store cannot be written.
    """
    try:
        with store.locked():
            found = garbage(store, keep)
            store.sweep()
            for manifest in found.manifests:
                manifest.unlink()
                sync_folder(manifest.parent)
            for path in (*found.beside, *found.blobs):
                path.unlink()
            for path in found.aside:
                if path.is_dir():
                    _remove_build(path)
                else:
                    path.unlink()
    except OSError as error:
        raise UserError(
            f"cannot remove from '{store.root}': {(error.strerror or str(error)).lower()}",
            f"name a store you can write: `--store DIR` or ${STORE_VARIABLE}",
        ) from error
    return found


def _remove_build(folder: Path) -> None:
    """Remove a build's folder unless that build is still at work (it holds its lock)."""
    lock = os.open(f"{folder}.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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
