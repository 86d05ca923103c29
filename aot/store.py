"""Where artifacts live: content-addressed blobs, and manifests that name them.

    blobs/<sha256 of the blob>.zst          the package, one zstd frame
    manifests/<program>/<bucket>/<key>.json
    manifests/<program>/<bucket>/<key>.sig, .origin     beside it: who vouches, and which remote it came from
    tmp/                                    of the one publisher that holds `lock`
    incoming/<sha256 of the blob>           a download that is under way, or that a later one continues

A publisher writes aside, syncs, links the blob under its digest, and the manifest last: an artifact is there
whole or not at all. Readers take no lock and write nothing. What a killed publisher left in tmp/ goes with
the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard

from aot.archive import check_archive
from aot.errors import CorruptArtifact, UserError
from aot.manifest import MAX_MANIFEST_BYTES, KeyInputs, Manifest
from aot.signing import ORIGIN_SUFFIX, SIGNATURE_SUFFIX, origin_document
from aot.trust import check_trusted_folder, open_trusted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aot.buckets import Bucket

STORE_VARIABLE = "DFLASH_AOT_STORE"
DEFAULT_STORE = Path("artifacts/store")
COMPRESSION_LEVEL = 3
REBUILD_HINT = "`dflash-aot build RUN` builds it again"


def default_store_root() -> Path:
    """Return $DFLASH_AOT_STORE, else artifacts/store under the current folder."""
    return Path(os.environ.get(STORE_VARIABLE) or DEFAULT_STORE)


class Store:
    """A folder of artifacts. Making one touches nothing on disk."""

    def __init__(self, root: Path | str):
        self.root = Path(root).absolute()
        self.blobs = self.root / "blobs"
        self.manifest_root = self.root / "manifests"

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

    def read_package(self, manifest: Manifest) -> bytes:
        """Return the package's bytes, every size and digest checked.

        Raises UntrustedArtifact or CorruptArtifact naming the file; nothing unverified is returned.
        """
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
        package = _decompress(blob, manifest.package_size, path)
        if hashlib.sha256(package).hexdigest() != manifest.package_digest:
            raise CorruptArtifact(f"{path}: the package inside is not the one published", REBUILD_HINT)
        return package

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
        self, package: Path, key_inputs: KeyInputs, graph_hash: str, environment: Mapping[str, str]
    ) -> Manifest:
        """Add a package under the key of its inputs and return its manifest.

        If the key is there already and intact, that artifact wins and is returned; a damaged one is replaced.
        Raises UserError if the store cannot be written, UntrustedArtifact if others can write it.
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
        try:
            with self._publishing() as private:
                winner = self.intact(manifest.program, manifest.bucket, manifest.key)
                if winner is not None:
                    return winner
                _install(private / "blob", blob, self.blob_path(manifest))
                target = self.manifest_path(manifest.program, manifest.bucket, manifest.key)
                # Of a damaged artifact that this one replaces: they say nothing about what was built here.
                for suffix in (ORIGIN_SUFFIX, SIGNATURE_SUFFIX):
                    target.with_suffix(suffix).unlink(missing_ok=True)
                _install(private / "manifest", manifest.to_bytes(), target)
        except OSError as error:
            raise UserError(
                f"cannot publish {manifest} in {self.root}: {error.strerror or error}",
                f"free space there, or name a store you can write: `--store DIR` or ${STORE_VARIABLE}",
            ) from error
        return manifest

    def incoming_path(self, manifest: Manifest) -> Path:
        """Where the download of a blob lies until it is installed, in a folder that only its owner writes."""
        folder = self.root / "incoming"
        _make_folders(folder)
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
        package = _decompress(blob, manifest.package_size, place)
        if hashlib.sha256(package).hexdigest() != manifest.package_digest:
            raise CorruptArtifact(f"{place}: the package inside is not the one published")
        check_archive(package, str(manifest))
        target = self.manifest_path(manifest.program, manifest.bucket, manifest.key)
        try:
            with tempfile.TemporaryDirectory(prefix="dflash-aot-adopt-") as folder:
                path = Path(folder, f"{manifest.package_digest}.pt2")
                path.write_bytes(package)
                _try_package(path, manifest)
            with self._publishing() as private:
                winner = self.intact(manifest.program, manifest.bucket, manifest.key)
                if winner is not None:
                    return winner
                _install(private / "blob", blob, self.blob_path(manifest))
                _install(private / "origin", origin_document(origin), target.with_suffix(ORIGIN_SUFFIX))
                _install(private / "signature", signature, target.with_suffix(SIGNATURE_SUFFIX))
                _install(private / "manifest", manifest_bytes, target)
        except OSError as error:
            raise UserError(
                f"cannot add {manifest} to {self.root}: {error.strerror or error}",
                f"free space there, or name a store you can write: `--store DIR` or ${STORE_VARIABLE}",
            ) from error
        return manifest

    @contextmanager
    def _publishing(self) -> Iterator[Path]:
        """Hold the publishers' lock and give an empty private folder on the store's own file system."""
        _make_folders(self.root)
        check_trusted_folder(self.root)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.root / "lock", flags, 0o600)
        try:
            # The kernel releases the lock of a killed holder; the file itself means nothing.
            fcntl.flock(lock, fcntl.LOCK_EX)
            private = self.root / "tmp"
            shutil.rmtree(private, ignore_errors=True)
            private.mkdir(mode=0o700)
            try:
                yield private
            finally:
                shutil.rmtree(private, ignore_errors=True)
        finally:
            os.close(lock)


def _try_package(path: Path, manifest: Manifest) -> None:
    """Have a child process load and run a private copy of a package."""
    from aot.canary import Trial, try_packages

    spec = manifest.key_inputs.call_spec
    try_packages([Trial(str(manifest), str(path), spec, spec.device_type)])


def _decompress(blob: bytes, size: int, path: Path) -> bytes:
    """Expand exactly one checksummed frame that states exactly `size` bytes.

    zstd allocates what the frame states, so the statement is compared first; a frame that holds more than it
    states, a second frame or trailing bytes are errors.
    """
    try:
        frame = zstandard.get_frame_parameters(blob)
        if frame.content_size != size or not frame.has_checksum:
            raise CorruptArtifact(
                f"{path}: the compressed frame does not state the package's size", REBUILD_HINT
            )
        return zstandard.ZstdDecompressor().decompress(blob, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptArtifact(f"{path}: {error}", REBUILD_HINT) from None


def _install(temporary: Path, content: bytes, target: Path) -> None:
    """Write aside, make durable, then give the file its name; a name that is taken gets the new content."""
    _make_folders(target.parent)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, target)
    except FileExistsError:
        temporary.replace(target)
    _sync_folder(target.parent)


def _make_folders(folder: Path) -> None:
    """Make a folder and those above it, each durable and, whatever the umask, writable by its owner alone."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(mode=0o755, exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
