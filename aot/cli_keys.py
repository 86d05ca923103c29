"""`dflash-aot keys` and `dflash-aot sign`: who may vouch for artifacts, and vouching for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aot import console
from aot.cli_store import readable
from aot.console import CONTEXT, emit, emit_json, examples, json_option, store_option
from aot.errors import EXIT_OK, ConfigError, UntrustedArtifact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aot.manifest import Manifest
    from aot.signing import PublicKey
    from aot.store import Store

SCHEMA = 1
DATE = "YEAR-MONTH-DAY"
PUBLIC_FILE = "name the file whose path `dflash-aot keys new` printed"
expires_option = click.option("--expires", metavar=DATE, help="Last day on which its signatures count (UTC).")


@click.group(context_settings=CONTEXT, epilog=examples("dflash-aot keys new alice", "dflash-aot keys list"))
def keys() -> None:
    """Keys that vouch for artifacts: yours, and those you trust.

    They lie in $DFLASH_AOT_KEYS, by default ~/.config/dflash-aot/keys.
    """


@keys.command(epilog=examples("dflash-aot keys new alice", "dflash-aot keys new ci --expires 2027-12-31"))
@click.argument("name")
@expires_option
def new(name: str, expires: str | None) -> None:
    """Make a key pair and trust it; prints the path of the file to hand to those who shall trust it too."""
    from aot.signing import Keyring, check_date, today

    # Dates of one spelling sort as text.
    if (day := check_date(expires)) is not None and day < today().isoformat():
        raise ConfigError(f"{day} is over: nothing that the key signs would count", "give a day to come")
    ring = Keyring.load()
    key = ring.create(name, expires)
    emit(str(ring.public_path(key)))
    console.note(f"made {key}; others trust it with `dflash-aot keys trust FILE`")


@keys.command(name="list", epilog=examples("dflash-aot keys list", "dflash-aot keys list --json"))
@json_option
def list_keys(as_json: bool) -> int:
    """List the trusted keys."""
    from aot.signing import SHOWN_ID, Keyring, key_id, public_bytes

    ring = Keyring.load()
    own = {key_id(public_bytes(ring.private_key(name))) for name in ring.private}
    rows = [
        {
            "name": key.name,
            "id": key.id,
            "public_key": key.public_key,
            "expires": key.expires,
            "can_sign": key.id in own,
            "trusted": ring.problem(key.id) is None,
            "problem": ring.problem(key.id),
        }
        for key in sorted(ring.trusted.values(), key=lambda key: (key.name, key.id))
    ]
    if as_json:
        emit_json({"schema": SCHEMA, "folder": str(ring.folder), "keys": rows})
        return EXIT_OK
    if not rows:
        console.note(f"'{ring.folder}' holds no keys: `dflash-aot keys new NAME` makes one")
        return EXIT_OK
    cells = [
        (
            row["name"],
            row["id"][:SHOWN_ID],
            row["expires"] or "never",
            "yes" if row["can_sign"] else "no",
            "yes" if row["trusted"] else "no: " + row["problem"],
        )
        for row in rows
    ]
    emit(console.table(("name", "id", "expires", "signs here", "trusted"), cells))
    return EXIT_OK


@keys.command(
    epilog=examples("dflash-aot keys trust alice.json", "dflash-aot keys trust 3b6a27bc... --name ci")
)
@click.argument("key", metavar="FILE|HEX")
@click.option("--name", help="What to call it; needed for HEX.")
@expires_option
def trust(key: str, name: str | None, expires: str | None) -> None:
    """Trust a key: whoever holds it can run code as you.

    A FILE is the one whose path `keys new` printed, HEX the 64 digits of a public key. Ask its owner for the
    id on another way than the file came.
    """
    from aot.signing import Keyring

    ring = Keyring.load()
    trusted = ring.trust(_read(key, name, expires))
    emit(trusted.id)
    console.note(f"trusted {trusted}")


def _read(text: str, name: str | None, expires: str | None) -> PublicKey:
    from dataclasses import replace

    from aot.signing import MAX_DOCUMENT_BYTES, PublicKey, check_date, check_name

    if re.fullmatch(r"[0-9a-f]{64}", text):
        if name is None:
            raise ConfigError("a key given as digits has no name", "add `--name NAME`")
        return PublicKey(check_name(name), text, check_date(expires))
    try:
        with Path(text).open("rb") as file:
            key = PublicKey.parse(file.read(MAX_DOCUMENT_BYTES + 1))
    except OSError as error:
        raise ConfigError(f"cannot read '{text}': {error.strerror}", PUBLIC_FILE) from None
    except UntrustedArtifact as error:
        raise UntrustedArtifact(f"'{text}': {error.message}", PUBLIC_FILE) from None
    changes = {"name": check_name(name) if name else None, "expires": check_date(expires)}
    return replace(key, **{field: value for field, value in changes.items() if value})


@keys.command(epilog=examples("dflash-aot keys revoke alice", "dflash-aot keys revoke 89b8578b38d2"))
@click.argument("key", metavar="NAME|ID")
def revoke(key: str) -> None:
    """Refuse a key's signatures for good, those made before as well."""
    from aot.signing import Keyring

    signer = Keyring.load().revoke(key)
    emit(signer)
    console.note("revoked: artifacts that came from a remote on its word alone are refused from now on")


@click.command(epilog=examples("dflash-aot sign 1a2b3c", "dflash-aot sign --all --key ci"))
@click.argument("artifacts", metavar="[ARTIFACT]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every artifact of the store.")
@click.option("--key", "name", help="Which of your keys; not needed when there is one.")
@store_option
def sign(artifacts: tuple[str, ...], everything: bool, name: str | None, store_root: Path) -> int:
    """Vouch for artifacts of a store. ARTIFACT is the beginning of a key, or program/bucket.

    Each is verified first. What came from a remote is signed only if a trusted key signed it already.
    """
    if everything == bool(artifacts):
        raise ConfigError("name the artifacts to sign, or `--all`", "`dflash-aot ls` lists them")
    from aot.policy import sign_artifact
    from aot.signing import Keyring, key_id, public_bytes
    from aot.store import Store

    store, ring = Store(store_root), Keyring.load()
    private = ring.private_key(name)
    if problem := ring.problem(key_id(public_bytes(private))):
        raise UntrustedArtifact(
            f"{problem}: nobody would believe its signatures",
            "`dflash-aot keys new NAME` makes a key, `--key NAME` chooses one",
        )
    chosen = _chosen(store, artifacts)
    for manifest in chosen:
        sign_artifact(store, manifest, private, ring)
        emit(f"{manifest.program}/{manifest.bucket}/{manifest.key}")
    console.note(f"signed {len(chosen)} artifacts")
    return EXIT_OK


def _chosen(store: Store, artifacts: Sequence[str]) -> list[Manifest]:
    """The named manifests, all when none is named. Raises ConfigError for a name without an artifact."""
    manifests = readable(store)
    if not artifacts:
        return manifests
    chosen: dict[str, Manifest] = {}
    for text in artifacts:
        found = {m.key: m for m in manifests if m.key.startswith(text) or f"{m.program}/{m.bucket}" == text}
        if not found:
            raise ConfigError(f"no artifact '{text}' in '{store.root}'", "`dflash-aot ls` lists them")
        chosen |= found
    return list(chosen.values())
