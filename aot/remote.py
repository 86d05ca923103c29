"""Artifacts at a remote: looked up, verified before anything is installed, and pushed for others.

A remote mirrors a store and is written once: the blob, the signature, the manifest last, each under a name
that nobody may overwrite.

    blobs/<sha256 of the blob>.zst
    manifests/<program>/<bucket>/<key>.sig      claims the key for one manifest
    manifests/<program>/<bucket>/<key>.json     makes the artifact visible

A remote is trusted with nothing. Sizes and digests are those of a manifest that a trusted key has signed, so
a blob is asked for only after that; what is not there, or not good, is known for one look-up and no longer.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Literal

from aot.buckets import Bucket
from aot.errors import ConfigError, CorruptArtifact, EnvironmentFault, UntrustedArtifact, UserError
from aot.manifest import MAX_MANIFEST_BYTES, Manifest
from aot.signing import MAX_DOCUMENT_BYTES, SIGNATURE_SUFFIX, Keyring, check_signature
from aot.transport import OversizedRead, Patience, RemoteFault, open_transport
from aot.trust import open_trusted

if TYPE_CHECKING:
    from pathlib import Path

    from aot.manifest import KeyInputs
    from aot.runtime import Fingerprints
    from aot.store import Store

REMOTE_VARIABLE = "DFLASH_AOT_REMOTE"
MANIFEST_SUFFIX = ".json"
DOWNLOAD_ATTEMPTS = 4
WINNER_WAIT_S = 10.0
_PLACE = re.compile(r"manifests/([a-z][a-z0-9_]{0,63})/([0-9]{1,9}x[0-9]{1,9})/([0-9a-f]{64})\.json")

#: Called with the bytes that are there so far.
Report = Callable[[int], None]


@dataclass(frozen=True, order=True)
class Place:
    """Where an artifact is filed."""

    program: str
    bucket: Bucket
    key: str

    @classmethod
    def of(cls, artifact: Manifest) -> Place:
        return cls(artifact.program, artifact.bucket, artifact.key)

    @classmethod
    def parse(cls, name: str) -> Place | None:
        """Read the name of a manifest; None for anything else that may lie at a remote."""
        match = _PLACE.fullmatch(name)
        try:
            place = match and cls(match[1], Bucket.parse(match[2]), match[3])
        except ConfigError:
            return None
        return place if place and place.name(MANIFEST_SUFFIX) == name else None

    def name(self, suffix: str) -> str:
        return f"manifests/{self.program}/{self.bucket}/{self.key}{suffix}"

    def __str__(self) -> str:
        return f"{self.program} {self.bucket} ({self.key[:12]})"


@dataclass(frozen=True)
class Signed:
    """A manifest and a signature of a trusted key over exactly its bytes."""

    manifest: Manifest
    data: bytes
    signature: bytes


class Remote:
    """A shared folder of artifacts, as one user's keyring sees it."""

    def __init__(self, url: str, keyring: Keyring, patience: Patience | None = None):
        self.transport = open_transport(url, patience)
        self.url, self.keyring = self.transport.url, keyring

    def places(self) -> list[Place]:
        """List what is there by name, unread and unchecked. Raises RemoteFault."""
        return sorted(filter(None, map(Place.parse, self.transport.names("manifests"))))

    def find(self, place: Place) -> Signed | None:
        """Fetch a manifest and check its signature; None if there is none now.

        Raises CorruptArtifact, UntrustedArtifact or RemoteFault.
        """
        where = f"{self.url}/{place.name(MANIFEST_SUFFIX)}"
        data = self._read(place.name(MANIFEST_SUFFIX), MAX_MANIFEST_BYTES)
        if data is None:
            return None
        try:
            manifest = Manifest.parse(data)
        except CorruptArtifact as error:
            raise CorruptArtifact(f"{where}: {error.message}", _removal(where)) from None
        if Place.of(manifest) != place:
            raise CorruptArtifact(
                f"{where}: filed under another name, it describes {manifest}", _removal(where)
            )
        signature = self._read(place.name(SIGNATURE_SUFFIX), MAX_DOCUMENT_BYTES)
        if signature is None:
            raise UntrustedArtifact(
                f"{where} is not signed", "`dflash-aot sign` and `dflash-aot push` where it was built"
            )
        self._check_signature(data, signature, where)
        return Signed(manifest, data, signature)

    def fetch(self, found: Signed, store: Store, report: Report | None = None) -> Manifest:
        """Download what `find` returned and add it to the store.

        A download that breaks off is continued, by this call or by a later one. Raises CorruptArtifact,
        RemoteFault, or as `Store.adopt` does; then the store is as it was.
        """
        path = store.incoming_path(found.manifest)
        with _alone(path) as file:
            self._download(found.manifest, file, report or (lambda size: None))
            try:
                file.seek(0)
                return store.adopt(found.data, file.read(), found.signature, self.url)
            finally:
                path.unlink(missing_ok=True)

    def push(self, manifest: Manifest, store: Store) -> Literal["pushed", "present", "kept"]:
        """Add a signed artifact of the store; `kept` if the remote has another good one of the same key.

        Whatever is there already is fetched and verified, and what is missing of it is added. Raises
        UntrustedArtifact without a good signature, here or there, CorruptArtifact or RemoteFault.
        """
        place, data = Place.of(manifest), manifest.to_bytes()
        signature = self._own_signature(place, data, store)
        blob = store.read_blob(manifest)
        present = self._read(place.name(MANIFEST_SUFFIX), MAX_MANIFEST_BYTES)
        if present not in (None, data) and self.find(place) is not None:
            return "kept"
        if not self.transport.create(_blob_name(manifest), blob):
            self._check_blob(manifest)
        if not self.transport.create(place.name(SIGNATURE_SUFFIX), signature):
            claim = self._read(place.name(SIGNATURE_SUFFIX), MAX_DOCUMENT_BYTES) or b""
            try:
                check_signature(data, claim, self.keyring)
            except UntrustedArtifact:
                # Somebody else's manifest of this key: theirs to finish.
                return self._wait_for_winner(place, data)
        if self.transport.create(place.name(MANIFEST_SUFFIX), data):
            return "pushed"
        return self._wait_for_winner(place, data)

    def _wait_for_winner(self, place: Place, data: bytes) -> Literal["present", "kept"]:
        end = time.monotonic() + WINNER_WAIT_S
        while (winner := self.find(place)) is None:
            if time.monotonic() > end:
                where = f"{self.url}/{place.name(SIGNATURE_SUFFIX)}"
                raise RemoteFault(
                    f"{where}: signs a manifest that did not follow, as an interrupted push leaves it",
                    f"push again from the store that it came from, or remove '{where}'",
                )
            time.sleep(WINNER_WAIT_S / 50)
        return "present" if winner.data == data else "kept"

    def _own_signature(self, place: Place, data: bytes, store: Store) -> bytes:
        path = store.root / place.name(SIGNATURE_SUFFIX)
        if not os.path.lexists(path):
            raise UntrustedArtifact(
                f"{place} is not signed: a remote takes signed artifacts alone",
                f"`dflash-aot sign {place.key[:12]}`",
            )
        with open_trusted(path) as file:
            signature = file.read(MAX_DOCUMENT_BYTES + 1)
        self._check_signature(data, signature, str(path))
        return signature

    def _check_signature(self, data: bytes, signature: bytes, where: str) -> None:
        try:
            check_signature(data, signature, self.keyring)
        except UntrustedArtifact as error:
            hint = (
                error.hint
                or f"remove '{where}', then `dflash-aot sign` and `dflash-aot push` where it was built"
            )
            raise UntrustedArtifact(f"{where}: {error.message}", hint) from None

    def _check_blob(self, manifest: Manifest) -> None:
        """Hash the blob that lies at the remote, keeping none of it."""
        name, digest = _blob_name(manifest), hashlib.sha256()
        where = f"{self.url}/{name}"
        try:
            for chunk in self.transport.read(name, manifest.blob_size):
                digest.update(chunk)
        except FileNotFoundError:
            raise RemoteFault(f"{where} was there and is gone", "push again") from None
        except OversizedRead as error:
            raise CorruptArtifact(error.message, _removal(where)) from None
        if digest.hexdigest() != manifest.blob_digest:
            raise CorruptArtifact(f"{where}: its bytes are not those of its name", _removal(where))

    def _read(self, name: str, limit: int) -> bytes | None:
        try:
            return b"".join(self.transport.read(name, limit))
        except FileNotFoundError:
            return None

    def _download(self, manifest: Manifest, file: BinaryIO, report: Report) -> None:
        """Complete a partial file and verify it; what turns out bad is emptied and never continued."""
        where = f"{self.url}/{_blob_name(manifest)}"
        for attempt in range(DOWNLOAD_ATTEMPTS):
            start = file.seek(0, os.SEEK_END)
            if start > manifest.blob_size:
                start = file.truncate(0)
                file.seek(0)
            try:
                self._continue(manifest, file, start, report)
            except OversizedRead as error:
                # Or a remote that sends the whole when asked for the rest.
                file.truncate(0)
                if start == 0:
                    raise OversizedRead(error.message, _removal(where)) from None
            except RemoteFault:
                if attempt == DOWNLOAD_ATTEMPTS - 1 or file.tell() == start:
                    raise
            except FileNotFoundError:
                hint = "`dflash-aot push` again from the store that it came from"
                raise CorruptArtifact(f"{where} is not there, its manifest is", hint) from None
            else:
                file.seek(0)
                if hashlib.file_digest(file, "sha256").hexdigest() == manifest.blob_digest:
                    return
                file.truncate(0)
                if start == 0:
                    raise CorruptArtifact(
                        f"{where}: its bytes are not those that were published", _removal(where)
                    )
        raise RemoteFault(f"{where}: {DOWNLOAD_ATTEMPTS} attempts did not complete it", "try again later")

    def _continue(self, manifest: Manifest, file: BinaryIO, start: int, report: Report) -> None:
        if start == manifest.blob_size:
            return
        for chunk in self.transport.read(_blob_name(manifest), manifest.blob_size, start):
            file.write(chunk)
            report(file.tell())
        if file.tell() < manifest.blob_size:
            where = f"{self.url}/{_blob_name(manifest)}"
            message = f"{where}: ended after {file.tell()} of {manifest.blob_size} bytes"
            if file.tell() == start:
                # Asked for what follows, it has nothing: this is no transfer that broke off.
                raise CorruptArtifact(message, _removal(where))
            raise RemoteFault(message, "try again: what came is kept")


def lookup(
    remote: Remote, store: Store, warn: Callable[[str], None]
) -> Callable[[KeyInputs], Manifest | None]:
    """Return what `build` asks before it compiles: the artifact of a key, now in the store, or None.

    A remote is a short cut: whatever goes wrong is a warning, and the build goes on. After it has failed to
    answer once, this one build leaves it alone.
    """
    silent = False

    def find(inputs: KeyInputs) -> Manifest | None:
        nonlocal silent
        if silent:
            return None
        try:
            found = remote.find(Place(inputs.program, inputs.bucket, inputs.key()))
            return found and remote.fetch(found, store)
        except (UserError, OSError) as error:
            silent = isinstance(error, RemoteFault)
            warn(f"{error}; building here instead")
            return None

    return find


def misfit(manifest: Manifest, fingerprints: Fingerprints) -> str | None:
    """Say why an artifact cannot run on this machine, or None."""
    inputs = manifest.key_inputs
    try:
        here = fingerprints(inputs.call_spec.device_type)
    except EnvironmentFault as fault:
        return fault.message
    differences = here.differences(inputs.fingerprint, at_load=True)
    return "; ".join(f"{name} is {there}, here {mine}" for name, (mine, there) in differences.items()) or None


@contextmanager
def _alone(path: Path) -> Iterator[BinaryIO]:
    """Open a download's file, with what an earlier attempt has left in it, while nobody else has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _blob_name(manifest: Manifest) -> str:
    return f"blobs/{manifest.blob_digest}.zst"


def _removal(where: str) -> str:
    return f"remove '{where}' and push it again"
