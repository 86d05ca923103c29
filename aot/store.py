"""Where artifacts live: content-addressed blobs, and manifests that name them.

    blobs/<sha256 of the blob>.zst          the package, one zstd frame
    manifests/<program>/<bucket>/<key>.json
    manifests/<program>/<bucket>/<key>.sig, .origin     beside it: who vouches, and which remote it came from
    tmp/<uuid>/                             of one publisher, which holds the lock of its file `held`
    incoming/<sha256 of the blob>           a download that is under way, or that a later one continues
    quarantine/                             packages that crashed when tried, and manifests of such
    lock                                    held while names appear or vanish
    dflash-aot-store                        says that the folder is a store, and of which schema

A publisher works aside: it has the package tried, hashes what was tried, writes and syncs. Then, under the
lock, it links the blob under its digest, and the manifest last: an artifact is there whole or not at all.
Readers take no lock and write nothing. What a killed publisher left in tmp/ goes with the next one. Nothing
is decided by a time stamp. A folder with other things in it is never made a store, and what has none of the
names above is never removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import re
import shutil
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard

from aot.archive import check_archive
from aot.durable import CHUNK, give_name, make_folders, replace_file, sync_folder, write_synced
from aot.errors import ConfigError, CorruptArtifact, TrialCrashed, UserError
from aot.manifest import MAX_MANIFEST_BYTES, KeyInputs, Manifest
from aot.signing import ORIGIN_SUFFIX, SIGNATURE_SUFFIX, origin_document
from aot.trust import check_trusted_folder, open_trusted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aot.buckets import Bucket

STORE_VARIABLE = "DFLASH_AOT_STORE"
DEFAULT_STORE = Path("artifacts/store")
COMPRESSION_LEVEL = 3
# Level 3 needs a window of 2 MiB; a frame that asks for more than this is not ours.
MAX_WINDOW = 1 << 23
MARKER, MARK = "dflash-aot-store", b'{"schema": 1}\n'
HELD = "held"
PRIVATE_NAME = re.compile(r"[0-9a-f]{32}")
REBUILD_HINT = "`dflash-aot build RUN` builds it again"

logger = logging.getLogger(__name__)


def default_store_root() -> Path:
    """Return $DFLASH_AOT_STORE, else artifacts/store under the current folder."""
    return Path(os.environ.get(STORE_VARIABLE) or DEFAULT_STORE)


class Store:
    """A folder of artifacts. Making one touches nothing on disk."""

    def __init__(self, root: Path | str):
        self.root = Path(root).absolute()
        self.blobs = self.root / "blobs"
        self.manifest_root = self.root / "manifests"
        self.tmp = self.root / "tmp"
        self.quarantine_root = self.root / "quarantine"

    def manifest_path(self, program: str, bucket: Bucket, key: str) -> Path:
        return self.manifest_root / program / str(bucket) / f"{key}.json"

    def blob_path(self, manifest: Manifest) -> Path:
        return self.blobs / f"{manifest.blob_digest}.zst"

    def manifest_paths(self, program: str | None = None, bucket: Bucket | None = None) -> list[Path]:
        """Return the paths of all manifests (of one program, of one bucket), sorted; unread and unchecked."""
        return sorted(self.manifest_root.glob(f"{program or '*'}/{bucket or '*'}/*.json"))

    def manifests(self, program: str | None = None, bucket: Bucket | None = None) -> list[Manifest]:
        """Read those manifests. Raises CorruptArtifact or UntrustedArtifact on the first bad one."""
        return [self.read_manifest(path) for path in self.manifest_paths(program, bucket)]

    def readable_manifests(
        self, program: str | None = None, bucket: Bucket | None = None
    ) -> tuple[list[Manifest], dict[Path, CorruptArtifact]]:
        """Read those manifests; also return what is wrong with the damaged ones. Raises UntrustedArtifact."""
        good: list[Manifest] = []
        damaged: dict[Path, CorruptArtifact] = {}
        for path in self.manifest_paths(program, bucket):
            try:
                good.append(self.read_manifest(path))
            except CorruptArtifact as error:
                damaged[path] = error
        return good, damaged

    def read_manifest(self, path: Path) -> Manifest:
        """Read one manifest of this store; its place must be the one its own fields name."""
        with open_trusted(path) as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        try:
            manifest = Manifest.parse(data)
        except CorruptArtifact as error:
            raise CorruptArtifact(f"{path}: {error.message}", REBUILD_HINT) from None
        if self.manifest_path(manifest.program, manifest.bucket, manifest.key) != path:
            raise CorruptArtifact(f"{path}: filed under another name, it describes {manifest}", REBUILD_HINT)
        return manifest

    def find(self, program: str, bucket: Bucket, key: str) -> Manifest | None:
        """Return the manifest of one key, or None. Raises as `read_manifest` does."""
        path = self.manifest_path(program, bucket, key)
        return self.read_manifest(path) if os.path.lexists(path) else None

    def read_blob(self, manifest: Manifest) -> bytes:
        """Return the compressed package, its size and digest checked. Raises as `read_package` does."""
        path = self.blob_path(manifest)
        with open_trusted(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.blob_size:
                raise CorruptArtifact(
                    f"{path}: {size} bytes, published with {manifest.blob_size}", REBUILD_HINT
                )
            blob = file.read(manifest.blob_size + 1)
        if hashlib.sha256(blob).hexdigest() != manifest.blob_digest:
            raise CorruptArtifact(f"{path}: its bytes are not those that were published", REBUILD_HINT)
        return blob

    def read_package(self, manifest: Manifest) -> bytes:
        """Return the package's bytes, every size and digest checked.

        Raises UntrustedArtifact or CorruptArtifact naming the file; nothing unverified is returned.
        """
        return _unpacked(self.read_blob(manifest), manifest, self.blob_path(manifest))

    def intact(self, program: str, bucket: Bucket, key: str) -> Manifest | None:
        """Return the manifest of one key if all its bytes are good, else None: then a build replaces it."""
        try:
            manifest = self.find(program, bucket, key)
            if manifest is not None:
                self.read_package(manifest)
        except CorruptArtifact:
            return None
        return manifest

    def publish(
        self,
        package: Path,
        key_inputs: KeyInputs,
        graph_hash: str,
        environment: Mapping[str, str],
        trial: Callable[[Path], None] | None = None,
    ) -> Manifest:
        """Add a package under the key of its inputs and return its manifest.

        `trial` gets a private copy first and raises if it is no good; a copy that crashes (TrialCrashed) goes
        into quarantine. If the key is there already and intact, that artifact wins and is returned; a damaged
        one is replaced. Raises UserError if the store cannot be written, UntrustedArtifact if others can.
        """
        content = package.read_bytes()
        blob = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True).compress(content)
        manifest = Manifest(
            key_inputs=key_inputs,
            key=key_inputs.key(),
            graph_hash=graph_hash,
            package_digest=hashlib.sha256(content).hexdigest(),
            package_size=len(content),
            blob_digest=hashlib.sha256(blob).hexdigest(),
            blob_size=len(blob),
            environment=environment,
        )
        return self._add(manifest, content, blob, trial)

    def _add(
        self,
        manifest: Manifest,
        content: bytes,
        blob: bytes,
        trial: Callable[[Path], None] | None,
        beside: Mapping[str, bytes] | None = None,
    ) -> Manifest:
        """Try, write, link. `beside`: files to lie beside the manifest, by suffix; there before it is."""
        files = {"blob": blob, "manifest": manifest.to_bytes(), **(beside or {})}
        try:
            with self._private_folder() as private:
                if trial is not None:
                    self._try(private, content, manifest, trial)
                for name, data in files.items():
                    write_synced(private / name, data)
                with self.locked():
                    return self._name(private, manifest, tuple(beside or ()))
        except OSError as error:
            raise UserError(
                f"cannot publish {manifest} in {self.root}: {error.strerror or error}",
                f"free space there, or name a store you can write: `--store DIR` or ${STORE_VARIABLE}",
            ) from error

    def _try(self, private: Path, content: bytes, manifest: Manifest, trial: Callable[[Path], None]) -> None:
        package = private / "package.pt2"
        write_synced(package, content)
        try:
            trial(package)
        except TrialCrashed as crash:
            self._put_aside(package, f"{manifest.package_digest}.pt2", crash.message)
            raise
        package.unlink()

    def _name(self, private: Path, manifest: Manifest, beside: tuple[str, ...]) -> Manifest:
        """Give the written files their names, the manifest last. The caller holds the lock."""
        winner = self.intact(manifest.program, manifest.bucket, manifest.key)
        if winner is not None:
            if winner.package_digest != manifest.package_digest:
                logger.warning("%s is there already; this build of it has other bytes", winner)
            return winner
        target = self.manifest_path(manifest.program, manifest.bucket, manifest.key)
        # The origin of an artifact that is gone says nothing of this one. Its manifest goes first, durably:
        # without its mark, and with the blob restored, it would read as built here.
        if os.path.lexists(target):
            target.unlink()
            sync_folder(target.parent)
        _unlink_all(files_beside(target))
        give_name(private / "blob", self.blob_path(manifest))
        try:
            for suffix in beside:
                give_name(private / suffix, target.with_suffix(suffix))
            give_name(private / "manifest", target)
        except BaseException:
            # Visible, but perhaps not durable: what was reported as failed must not be there.
            with suppress(OSError):
                target.unlink()
            raise
        return manifest

    def quarantine(self, manifest: Manifest, reason: str) -> Path | None:
        """Stop offering an artifact that crashes, so that a build replaces it; say where its manifest went.

        None if this store cannot be written. The blob stays until `gc`.
        """
        path = self.manifest_path(manifest.program, manifest.bucket, manifest.key)
        try:
            with self.locked():
                aside = self._put_aside(path, f"{manifest.key}.json", reason)
                _unlink_all(files_beside(path))
                return aside
        except OSError:
            return None

    def _put_aside(self, path: Path, name: str, reason: str) -> Path:
        make_folders(self.quarantine_root)
        aside = self.quarantine_root / name
        aside.with_suffix(".reason").write_text(f"{reason}\n", "utf-8")
        return path.replace(aside)

    def require_writable(self) -> None:
        """Raise UserError saying why nothing can be published here, before somebody compiles for it."""
        try:
            with self._private_folder():
                pass
        except OSError as error:
            raise UserError(
                f"nothing can be published in '{self.root}': {(error.strerror or str(error)).lower()}",
                f"name a store you can write: `--store DIR` or ${STORE_VARIABLE}",
            ) from error

    def incoming_path(self, manifest: Manifest) -> Path:
        """Where the download of a blob lies until it is installed, in a folder that only its owner writes."""
        with self.locked():
            folder = self.root / "incoming"
        make_folders(folder)
        check_trusted_folder(folder)
        return folder / manifest.blob_digest

    def adopt(self, manifest_bytes: bytes, blob: bytes, signature: bytes, origin: str) -> Manifest:
        """Add an artifact from the remote `origin`, whose signature the caller has checked.

        Everything in it is verified and a child process tries it before it gets a name; its mark and its
        signature are there before its manifest is. An intact artifact of the key wins, as in `publish`.
        Raises CorruptArtifact, UserError if the store cannot be written, UntrustedArtifact if others can.
        """
        manifest = Manifest.parse(manifest_bytes)
        place = Path("blobs", f"{manifest.blob_digest}.zst")
        if len(blob) != manifest.blob_size or hashlib.sha256(blob).hexdigest() != manifest.blob_digest:
            raise CorruptArtifact(f"{place}: its bytes are not those that were published")
        package = _unpacked(blob, manifest, place)
        check_archive(package, str(manifest))
        beside = {ORIGIN_SUFFIX: origin_document(origin), SIGNATURE_SUFFIX: signature}
        return self._add(manifest, package, blob, lambda path: _try_package(path, manifest), beside)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock under which names appear and vanish, in a folder marked as a store.

        OSError if the store cannot be written, ConfigError if the folder is no store.
        """
        make_folders(self.root)
        check_trusted_folder(self.root)
        self.check_ours()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.root / "lock", flags, 0o600)
        try:
            # The kernel releases the lock of a killed holder; the file itself means nothing.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.lexists(self.root / MARKER):
                replace_file(self.root / MARKER, MARK)
            yield
        finally:
            with suppress(OSError):
                os.close(lock)

    def check_ours(self) -> None:
        """Raise ConfigError if the folder holds other things than a store (one without a mark is older)."""
        # Listed first: what another process makes in between comes after its mark.
        names = {path.name for path in self.root.iterdir()}
        try:
            mark = (self.root / MARKER).read_bytes()
        except FileNotFoundError:
            # A mark that a killed process began to write, the lock that it held: a store's beginning.
            begun = {name for name in names if name == "lock" or name.startswith(f".{MARKER}.")}
            if names != begun and not names & {"manifests", "blobs"}:
                raise ConfigError(
                    f"'{self.root}' holds files, and is no store of artifacts",
                    f"name a store, or a folder that is new or empty: `--store DIR` or ${STORE_VARIABLE}",
                ) from None
            return
        if mark != MARK:
            raise ConfigError(
                f"'{self.root / MARKER}' is not the mark of a store that this version writes",
                f"name another store: `--store DIR` or ${STORE_VARIABLE}",
            )

    @contextmanager
    def _private_folder(self) -> Iterator[Path]:
        """An empty folder on the store's file system that nobody else uses, and that goes at the end.

        Its name is no process id: hosts that share a store have the same ones.
        """
        private = self.tmp / uuid.uuid4().hex
        with self.locked():
            self.sweep()
            make_folders(self.tmp)
            os.mkdir(private, 0o700)  # noqa: PTH102
            held = os.open(private / HELD, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield private
        finally:
            _remove_private(private)
            with suppress(OSError):
                os.close(held)

    def sweep(self) -> None:
        """Remove what dead publishers left. The caller holds the lock: no folder is half made."""
        for folder in self.left_behind():
            _remove_private(folder)

    def left_behind(self) -> list[Path]:
        """The folders of dead publishers, as far as their names and `held` show that they are such."""
        return [folder for folder in sorted(self.tmp.glob("*")) if _is_left_behind(folder)]


def files_beside(manifest: Path) -> list[Path]:
    """Signature, origin: what shares a manifest's name."""
    return sorted(path for path in manifest.parent.glob(f"{manifest.stem}.*") if path != manifest)


def _unlink_all(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove_private(folder: Path) -> None:
    """Remove a publisher's folder as far as that goes: what stays is swept later, and fails no publisher.

    `held` goes last: by it a sweep knows the folder.
    """
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == HELD):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        folder.rmdir()


def _is_left_behind(folder: Path) -> bool:
    """Whether a dead publisher made a folder: its name is random, it holds `held` or nothing yet."""
    if not PRIVATE_NAME.fullmatch(folder.name) or folder.is_symlink() or _is_held(folder):
        return False
    try:
        return (folder / HELD).is_file() or not any(folder.iterdir())
    except OSError:
        # It has gone meanwhile, or is no folder.
        return False


def _is_held(folder: Path) -> bool:
    """Whether a living publisher works in a folder; when in doubt (no descriptors left), yes."""
    try:
        held = os.open(folder / HELD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(held)
    return False


def _try_package(path: Path, manifest: Manifest) -> None:
    """Have a child process load and run a private copy of a package."""
    from aot.canary import Trial, try_packages

    spec = manifest.key_inputs.call_spec
    try_packages([Trial(str(manifest), str(path), spec, spec.device_type)])


def _unpacked(blob: bytes, manifest: Manifest, path: Path) -> bytes:
    """Return the package in a blob whose digest has been checked."""
    package = _decompress(blob, manifest.package_size, path)
    if hashlib.sha256(package).hexdigest() != manifest.package_digest:
        raise CorruptArtifact(f"{path}: the package inside is not the one published", REBUILD_HINT)
    return package


def _decompress(blob: bytes, size: int, path: Path) -> bytes:
    """Expand exactly one checksummed frame that states exactly `size` bytes, and never hold more than those.

    The library would silently drop a second frame or trailing bytes, and hand out what was not checksummed.
    """
    try:
        frame = zstandard.get_frame_parameters(blob)
        if frame.content_size != size or not frame.has_checksum:
            raise CorruptArtifact(
                f"{path}: the compressed frame does not state the package's size", REBUILD_HINT
            )
        end = _frame_end(blob)
        if end != len(blob):
            what = "is cut short" if end > len(blob) else f"is followed by {len(blob) - end} bytes"
            raise CorruptArtifact(f"{path}: the compressed frame {what}", REBUILD_HINT)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        package = bytearray()
        with decompressor.stream_reader(io.BytesIO(blob)) as reader:
            while len(package) <= size and (chunk := reader.read(CHUNK)):
                package += chunk
    except zstandard.ZstdError as error:
        raise CorruptArtifact(f"{path}: {error}", REBUILD_HINT) from None
    if len(package) != size:
        raise CorruptArtifact(f"{path}: the compressed frame does not hold what it states", REBUILD_HINT)
    return bytes(package)


def _frame_end(blob: bytes) -> int:
    """Where a frame with a checksum ends, from the headers of its blocks (RFC 8878, 3.1.1.2); past the end of
    the bytes if they are cut short.
    """
    position = zstandard.frame_header_size(blob)
    while position + 3 <= len(blob):
        header = int.from_bytes(blob[position : position + 3], "little")
        last, repeated, size = header & 1, header >> 1 & 3 == 1, header >> 3
        position += 3 + (1 if repeated else size)
        if last:
            return position + 4
    return len(blob) + 1
