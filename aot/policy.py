"""Which artifacts may be executed here, and on whose word.

    local    what was built in this store, which nobody but you and root can write: the default
    signed   what a trusted key signed

What came from a remote needs a trusted key's signature under every policy, online and offline alike. An own
build can be let through the policy `signed` by the start of its key; that is told every time it is used.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from aot.archive import check_archive
from aot.console import warn
from aot.durable import replace_file
from aot.errors import ConfigError, UntrustedArtifact
from aot.signing import (
    MAX_DOCUMENT_BYTES,
    ORIGIN_SUFFIX,
    SHOWN_ID,
    SIGNATURE_SUFFIX,
    Keyring,
    check_signature,
    merge_signatures,
    parse_origin,
    sign,
)
from aot.trust import open_trusted

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from aot.manifest import Manifest
    from aot.store import Store

VARIABLE = "DFLASH_AOT_POLICY"
NAMES = ("local", "signed")
_KEY_PREFIX = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True)
class Policy:
    """What is asked of an artifact. `allow_unsigned` holds beginnings of the keys of own builds."""

    name: str = "local"
    allow_unsigned: tuple[str, ...] = ()
    keys: Path | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"unknown policy '{self.name}'", f"policies: {', '.join(NAMES)}")
        for prefix in self.allow_unsigned:
            if _KEY_PREFIX.fullmatch(prefix) is None:
                raise ConfigError(
                    f"'{prefix}' is not the beginning of a key",
                    "give 8 to 64 hex digits, from `dflash-aot ls`",
                )

    @classmethod
    def of(cls, name: str | None = None, allow_unsigned: tuple[str, ...] = ()) -> Policy:
        """The named policy, else $DFLASH_AOT_POLICY, else `local`. Raises ConfigError for an unknown one."""
        return cls(name or os.environ.get(VARIABLE) or "local", tuple(allow_unsigned))

    @cached_property
    def keyring(self) -> Keyring:
        return Keyring.load(self.keys)


def check_trust(store: Store, manifest: Manifest, policy: Policy) -> str:
    """Return on whose word an artifact may be executed. Call it on what `store` read, before any use.

    Raises UntrustedArtifact naming the artifact, what is wrong with its signatures, and what mends it.
    """
    path = store.manifest_path(manifest.program, manifest.bucket, manifest.key)
    rebuild = f"build it here: `rm '{path}'`, then `dflash-aot build RUN`"
    origin = path.with_suffix(ORIGIN_SUFFIX)
    mark = _read(origin)
    try:
        remote = None if mark is None else parse_origin(mark)
    except UntrustedArtifact as error:
        raise UntrustedArtifact(f"{manifest}: '{origin}': {error.message}", rebuild) from None
    if remote is None and policy.name == "local":
        return "built here"
    signatures = _read(path.with_suffix(SIGNATURE_SUFFIX))
    try:
        if signatures is None:
            raise UntrustedArtifact("it is not signed")
        # `store` parses one spelling only: these are the bytes of the file.
        signer = check_signature(manifest.to_bytes(), signatures, policy.keyring)
    except UntrustedArtifact as error:
        if remote is not None:
            raise UntrustedArtifact(
                f"{manifest} came from {remote}: {error.message}",
                f"{error.hint}, or {rebuild}" if error.hint else rebuild,
            ) from None
        if any(manifest.key.startswith(prefix) for prefix in policy.allow_unsigned):
            warn(f"{manifest}: {error.message}; used all the same, as `--allow-unsigned` says")
            return "allowed without a signature"
        raise UntrustedArtifact(
            f"{manifest}: {error.message}, and the policy is 'signed'",
            error.hint or f"if you vouch for it: `dflash-aot sign {manifest.key[:12]}`",
        ) from None
    return f"signed by {policy.keyring.trusted[signer].name} ({signer[:SHOWN_ID]})"


def _read(path: Path) -> bytes | None:
    if not os.path.lexists(path):
        return None
    with open_trusted(path) as file:
        return file.read(MAX_DOCUMENT_BYTES + 1)


def sign_artifact(store: Store, manifest: Manifest, private_key: Ed25519PrivateKey, keyring: Keyring) -> None:
    """Add a signature to an artifact whose bytes are good, beside those of other keys.

    Raises UntrustedArtifact for one from a remote that no trusted key has signed: to sign it would be to
    trust it. Raises CorruptArtifact for damaged bytes.
    """
    check_trust(store, manifest, Policy(keys=keyring.folder))
    check_archive(store.read_package(manifest), str(manifest))
    path = store.manifest_path(manifest.program, manifest.bucket, manifest.key).with_suffix(SIGNATURE_SUFFIX)
    document, earlier = sign(manifest.to_bytes(), private_key), _read(path)
    if earlier is not None:
        document = merge_signatures(earlier, document)
    replace_file(path, document)
