"""Stores of made-up packages, and keys to sign them with: quick, and checked like real ones."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from typing import TYPE_CHECKING

from aot.fingerprint import Fingerprint
from aot.signing import ORIGIN_SUFFIX, SIGNATURE_SUFFIX, Keyring, PublicKey, origin_document, sign
from aot.trace import key_inputs
from tests.support.toy import SMALL, ToyStep

if TYPE_CHECKING:
    from pathlib import Path

    from aot.buckets import Bucket
    from aot.manifest import Manifest
    from aot.store import Store

FINGERPRINT = Fingerprint(**{field.name: "2.13" for field in dataclasses.fields(Fingerprint)})


def archive(content: bytes = b"\x7fELF") -> bytes:
    """What the allow-list takes for a package; it does not run."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("model/data/aotinductor/model/model.so", content)
        file.writestr("model/archive_format", b"pt2")
    return buffer.getvalue()


def publish(
    store: Store, folder: Path, bucket: Bucket = SMALL, content: bytes = b"\x7fELF", **program
) -> Manifest:
    path = folder / "made-up.pt2"
    path.write_bytes(archive(content))
    return store.publish(path, key_inputs(ToyStep(**program), bucket, FINGERPRINT), "0" * 64, {})


def beside(store: Store, manifest: Manifest, suffix: str) -> Path:
    return store.manifest_path(manifest.program, manifest.bucket, manifest.key).with_suffix(suffix)


def write_signature(store: Store, manifest: Manifest, ring: Keyring, name: str | None = None) -> Path:
    path = beside(store, manifest, SIGNATURE_SUFFIX)
    path.write_bytes(sign(manifest.to_bytes(), Keyring.load(ring.folder).private_key(name)))
    return path


def mark_as_remote(store: Store, manifest: Manifest, remote: str = "s3://bucket") -> Path:
    path = beside(store, manifest, ORIGIN_SUFFIX)
    path.write_bytes(origin_document(remote))
    return path


def keyring(folder: Path, *names: str, expires: str | None = None) -> Keyring:
    """A keyring with a key pair of each name, all trusted."""
    for name in names:
        Keyring.load(folder).create(name, expires)
    return Keyring.load(folder)


def public_key(ring: Keyring, name: str) -> PublicKey:
    return next(key for key in ring.trusted.values() if key.name == name)
