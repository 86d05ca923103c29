"""Keys, and signatures over manifests: who vouches for an artifact.

A signature is a file beside the manifest, so that manifests never change:

    manifests/<program>/<bucket>/<key>.sig      {schema, signatures: [{algorithm, key_id, signature}, ...]}
    manifests/<program>/<bucket>/<key>.origin   {schema, remote}: it was not built here

What is signed is the manifest's canonical bytes after a prefix of our own: the key, every build input,
digests and sizes. One good signature of a trusted key is enough. The keyring is a folder that only its owner
writes:

    private/<name>.pem     ed25519, mode 0600
    trusted/<key id>.json  {schema, name, algorithm, public_key, expires?}: the file to hand to others
    revoked/<key id>       its signatures are refused for good

A key id is the SHA-256 of the raw public key. Nothing here asks a network, and nothing imports torch.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aot.durable import replace_file
from aot.errors import ConfigError, CorruptArtifact, UntrustedArtifact, UserError
from aot.manifest import canonical_json
from aot.trust import check_trusted_folder, open_trusted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SCHEMA = 1
ALGORITHM = "ed25519"
#: No signature made for another purpose is one over a manifest.
DOMAIN = b"dflash-aot manifest 1\n"
KEYS_VARIABLE = "DFLASH_AOT_KEYS"
SIGNATURE_SUFFIX, ORIGIN_SUFFIX = ".sig", ".origin"
MAX_DOCUMENT_BYTES = 1 << 16
SHOWN_ID = 16

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = {size: re.compile(rf"[0-9a-f]{{{2 * size}}}") for size in (32, 64)}


def sign(manifest_bytes: bytes, private_key: Ed25519PrivateKey) -> bytes:
    """Return a signature document with one signature over a manifest's bytes."""
    signature = private_key.sign(DOMAIN + manifest_bytes).hex()
    return _signatures_document([_entry(public_bytes(private_key), signature)])


def merge_signatures(earlier: bytes, later: bytes) -> bytes:
    """Return one document with the signatures of both; of one key the later one stands."""
    entries = {entry["key_id"]: entry for entry in (*_signatures(earlier), *_signatures(later))}
    return _signatures_document([entries[key_id] for key_id in sorted(entries)])


def check_signature(manifest_bytes: bytes, signature_bytes: bytes, keyring: Keyring) -> str:
    """Return the id of a trusted key that signed exactly these bytes.

    Raises UntrustedArtifact saying what is wrong with every signature there is; the hint is None unless it
    would help to trust a signer.
    """
    problems, hint = [], None
    for entry in _signatures(signature_bytes):
        signer = entry["key_id"]
        problem = keyring.problem(signer)
        if problem and signer not in keyring.revoked:
            hint = "if you trust its signer: `dflash-aot keys trust FILE`, their public key"
        problem = problem or _mismatch(manifest_bytes, entry, keyring)
        if problem is None:
            return signer
        problems.append(problem)
    raise UntrustedArtifact("; ".join(problems) or "it carries no signature", hint)


def origin_document(remote: str) -> bytes:
    """Return the mark of an artifact that came from `remote`."""
    return canonical_json({"schema": SCHEMA, "remote": remote})


def parse_origin(data: bytes) -> str:
    """Return the remote that a mark names. Raises UntrustedArtifact for anything else."""
    document = _document(data, "origin mark")
    if set(document) != {"schema", "remote"} or type(document["remote"]) is not str:
        raise UntrustedArtifact("origin mark: not of the form {schema, remote}")
    return document["remote"]


def _entry(public: bytes, signature: str) -> dict[str, str]:
    return {"algorithm": ALGORITHM, "key_id": key_id(public), "signature": signature}


def _signatures_document(entries: list[dict[str, str]]) -> bytes:
    return canonical_json({"schema": SCHEMA, "signatures": entries})


def _signatures(data: bytes) -> list[dict[str, str]]:
    document = _document(data, "signature")
    entries = document.get("signatures")
    if set(document) != {"schema", "signatures"} or type(entries) is not list:
        raise UntrustedArtifact("signature: not of the form {schema, signatures}")
    for entry in entries:
        if type(entry) is not dict or set(entry) != {"algorithm", "key_id", "signature"}:
            raise UntrustedArtifact("signature: an entry is not of the form {algorithm, key_id, signature}")
        if entry["algorithm"] != ALGORITHM:
            raise UntrustedArtifact(f"signature: algorithm {entry['algorithm']!r} is not '{ALGORITHM}'")
        if not (_is_hex(entry["key_id"], 32) and _is_hex(entry["signature"], 64)):
            raise UntrustedArtifact("signature: a key id or signature is not hexadecimal of its length")
    return entries


def _mismatch(manifest_bytes: bytes, entry: Mapping[str, str], keyring: Keyring) -> str | None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = keyring.trusted[entry["key_id"]]
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.public_key))
        public.verify(bytes.fromhex(entry["signature"]), DOMAIN + manifest_bytes)
    except (InvalidSignature, ValueError):
        return f"the signature of {key} is over other bytes than this manifest's"
    return None


def _document(data: bytes, what: str) -> dict[str, Any]:
    """Read canonical JSON of this schema: one spelling, nothing twice, no floats, bounded."""
    try:
        if len(data) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"more than {MAX_DOCUMENT_BYTES} bytes")
        document = json.loads(data.decode("utf-8"))
        if canonical_json(document) != data:
            raise ValueError("not in canonical form")
    except (ValueError, RecursionError, ConfigError) as error:
        raise UntrustedArtifact(f"{what}: cannot be read: {error}") from None
    if type(document) is not dict or document.get("schema") != SCHEMA:
        raise UntrustedArtifact(f"{what}: not of schema {SCHEMA}")
    return document


def _is_hex(text: object, size: int) -> bool:
    return isinstance(text, str) and _HEX[size].fullmatch(text) is not None


def key_id(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()


def public_bytes(private_key: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


@dataclass(frozen=True)
class PublicKey:
    """A key that may vouch for artifacts; `expires` is its last good day (UTC), e.g. `2027-12-31`."""

    name: str
    public_key: str
    expires: str | None = None

    @property
    def id(self) -> str:
        return key_id(bytes.fromhex(self.public_key))

    def __str__(self) -> str:
        return f"key '{self.name}' ({self.id[:SHOWN_ID]})"

    def expired(self, today: datetime.date) -> bool:
        return self.expires is not None and datetime.date.fromisoformat(self.expires) < today

    def to_bytes(self) -> bytes:
        document = {"schema": SCHEMA, "name": self.name, "algorithm": ALGORITHM}
        document |= {"public_key": self.public_key}
        if self.expires is not None:
            document["expires"] = self.expires
        return canonical_json(document)

    @classmethod
    def parse(cls, data: bytes) -> PublicKey:
        """Read what `to_bytes` wrote. Raises UntrustedArtifact."""
        document = _document(data.rstrip(b"\n"), "public key")
        if not {"schema", "name", "algorithm", "public_key"} <= set(document) <= {
            "schema", "name", "algorithm", "public_key", "expires"
        }:  # fmt: skip
            raise UntrustedArtifact(
                "public key: not of the form {schema, name, algorithm, public_key, expires?}"
            )
        if document["algorithm"] != ALGORITHM or not _is_hex(document["public_key"], 32):
            raise UntrustedArtifact(f"public key: not an {ALGORITHM} key in hexadecimal")
        try:
            return cls(
                check_name(document["name"]), document["public_key"], check_date(document.get("expires"))
            )
        except ConfigError as error:
            raise UntrustedArtifact(f"public key: {error.message}") from None


def check_name(name: object) -> str:
    """Return a key's name; raises ConfigError unless it is fit for a file name."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is no name for a key", "use letters, digits, `.`, `_` and `-`")
    return name


def check_date(text: object) -> str | None:
    """Return an expiry date in its one spelling; raises ConfigError for what is no date."""
    if text is None:
        return None
    try:
        if isinstance(text, str) and datetime.date.fromisoformat(text).isoformat() == text:
            return text
    except ValueError:
        pass
    raise ConfigError(f"{text!r} is no date", "write it as YEAR-MONTH-DAY, e.g. `2027-12-31`")


def default_keys_folder() -> Path:
    """Return $DFLASH_AOT_KEYS, else ~/.config/dflash-aot/keys."""
    named = os.environ.get(KEYS_VARIABLE)
    return Path(named) if named else Path.home() / ".config" / "dflash-aot" / "keys"


def today() -> datetime.date:
    """The day by which keys expire (UTC)."""
    return datetime.datetime.now(datetime.UTC).date()


@dataclass(frozen=True)
class Keyring:
    """The keys of this user, as read at one moment."""

    folder: Path
    trusted: Mapping[str, PublicKey] = field(default_factory=dict)
    revoked: frozenset[str] = frozenset()
    private: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: Path | None = None) -> Keyring:
        """Read the keyring; a folder that is not there is an empty one.

        Raises UntrustedArtifact if anybody else may write into it, or for a file that is no key.
        """
        folder = (folder or default_keys_folder()).absolute()
        if not os.path.lexists(folder):
            return cls(folder)
        trusted = {}
        for path in _entries(folder, "trusted", ".json"):
            key = _read_public_key(path)
            if path.stem != key.id:
                raise UntrustedArtifact(f"{path}: filed under another id, it holds {key}", f"`rm '{path}'`")
            trusted[key.id] = key
        revoked = frozenset(path.name for path in _entries(folder, "revoked", ""))
        return cls(folder, trusted, revoked, tuple(p.stem for p in _entries(folder, "private", ".pem")))

    def problem(self, signer: str, day: datetime.date | None = None) -> str | None:
        """Say why signatures of a key do not count, or None."""
        key = self.trusted.get(signer)
        name = str(key) if key else f"key {signer[:SHOWN_ID]}"
        if signer in self.revoked:
            return f"{name} is revoked"
        if key is None:
            return f"{name} is not among your trusted keys"
        return f"{name} expired on {key.expires}" if key.expired(day or today()) else None

    def create(self, name: str, expires: str | None = None) -> PublicKey:
        """Make a key pair, trust it, return its public half. Raises ConfigError for a name that is taken."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        path = self.folder / "private" / f"{check_name(name)}.pem"
        expires = check_date(expires)
        _make_private_folder(path.parent)
        if os.path.lexists(path):
            raise ConfigError(f"there is a key '{name}' already", "choose another name")
        private = Ed25519PrivateKey.generate()
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        replace_file(path, pem, mode=0o600)
        return self.trust(PublicKey(name, public_bytes(private).hex(), expires))

    def trust(self, key: PublicKey) -> PublicKey:
        """Let a key vouch for artifacts from now on. Raises UntrustedArtifact if it is revoked."""
        if key.id in self.revoked:
            raise UntrustedArtifact(
                f"{key} is revoked", f"to undo that, remove '{self.folder / 'revoked' / key.id}'"
            )
        path = self.public_path(key)
        _make_private_folder(path.parent)
        replace_file(path, key.to_bytes() + b"\n")
        return key

    def revoke(self, prefix: str) -> str:
        """Refuse a key's signatures for good. `prefix` is a name, the start of a trusted id or a whole id.

        Returns the id. Raises ConfigError if it names no key, or several.
        """
        found = {key.id for key in self.trusted.values() if key.name == prefix or key.id.startswith(prefix)}
        if not found and _is_hex(prefix, 32):
            found = {prefix}
        if len(found) != 1:
            what = "names several keys" if found else "names no trusted key"
            raise ConfigError(f"'{prefix}' {what}", "`dflash-aot keys list` shows the ids")
        (signer,) = found
        _make_private_folder(self.folder / "revoked")
        replace_file(self.folder / "revoked" / signer, b"")
        return signer

    def public_path(self, key: PublicKey) -> Path:
        """The file of a trusted key, fit to be handed to others."""
        return self.folder / "trusted" / f"{key.id}.json"

    def private_key(self, name: str | None = None) -> Ed25519PrivateKey:
        """Return a private key, the only one if no name is given.

        Raises ConfigError if there is none or the choice is open, UntrustedArtifact if others may read it.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if name is None and len(self.private) > 1:
            raise ConfigError(f"several keys can sign: {', '.join(self.private)}", "choose one: `--key NAME`")
        if name not in self.private if name else not self.private:
            missing = f"no private key '{name}'" if name else "no private key"
            raise ConfigError(f"{missing} in '{self.folder}'", "`dflash-aot keys new NAME` makes one")
        path = self.folder / "private" / f"{name or self.private[0]}.pem"
        with open_trusted(path) as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise UntrustedArtifact(f"{path} may be read by others", f"`chmod 600 '{path}'`")
            data = file.read(MAX_DOCUMENT_BYTES)
        try:
            private = load_pem_private_key(data, None)
        except (ValueError, TypeError):
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise CorruptArtifact(f"{path} holds no {ALGORITHM} key", "`dflash-aot keys new NAME` makes one")
        return private


def _entries(folder: Path, kind: str, suffix: str) -> list[Path]:
    """The files of one kind, in a folder found to be this user's own; hidden ones are half written."""
    inner = folder / kind
    if not os.path.lexists(inner):
        return []
    try:
        check_trusted_folder(inner)
    except UserError as error:
        hint = (
            error.hint
            if "chmod" in (error.hint or "")
            else f"name a folder of your own: `export {KEYS_VARIABLE}=...`"
        )
        raise UntrustedArtifact(error.message, hint) from None
    return sorted(p for p in inner.iterdir() if p.name.endswith(suffix) and not p.name.startswith("."))


def _read_public_key(path: Path) -> PublicKey:
    with open_trusted(path) as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    try:
        return PublicKey.parse(data)
    except UntrustedArtifact as error:
        raise UntrustedArtifact(f"{path}: {error.message}", f"`rm '{path}'`") from None


def _make_private_folder(folder: Path) -> None:
    _make_folder(folder)
    check_trusted_folder(folder)


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, each closed to others whatever the umask."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
