"""Signatures and the keyring: what is accepted, and each way of not being it."""

from __future__ import annotations

import datetime
import json
import os
import random
import stat
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aot.errors import ConfigError, CorruptArtifact, UntrustedArtifact
from aot.manifest import canonical_json
from aot.signing import (
    DOMAIN,
    Keyring,
    PublicKey,
    check_signature,
    merge_signatures,
    origin_document,
    parse_origin,
    sign,
)
from tests.support.vouched import keyring, public_key

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = b'{"key":"1234"}'

#: The second key of RFC 8032, section 7.1: what it makes of MANIFEST is part of the format.
SEED = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
PUBLIC = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
KEY_ID = "39f713d0a644253f04529421b9f51b9b08979d08295959c4f3990ee617f5139f"


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return keyring(tmp_path / "keys", "alice")


def signed(ring: Keyring, data: bytes = MANIFEST, name: str | None = None) -> bytes:
    return sign(data, ring.private_key(name))


def test_a_fixed_key_makes_a_fixed_document() -> None:
    """The document is part of the format: it changes with a new schema only."""
    private = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(SEED))
    signature = private.sign(b"dflash-aot manifest 1\n" + MANIFEST).hex()
    entry = f'{{"algorithm":"ed25519","key_id":"{KEY_ID}","signature":"{signature}"}}'
    assert sign(MANIFEST, private) == f'{{"schema":1,"signatures":[{entry}]}}'.encode()
    assert PublicKey("x", PUBLIC).id == KEY_ID


def test_a_good_signature_of_a_trusted_key_gives_its_id(ring: Keyring) -> None:
    assert check_signature(MANIFEST, signed(ring), ring) == public_key(ring, "alice").id


def test_every_changed_bit_of_what_is_signed_or_of_the_signature_is_refused(ring: Keyring) -> None:
    """Fails without `public.verify`: all of the first kind pass."""
    document = signed(ring)
    for data, place in ((MANIFEST, 0), (document, 1)):
        for bit in range(8 * len(data)):
            mutant = bytearray(data)
            mutant[bit // 8] ^= 1 << bit % 8
            pair = [MANIFEST, document]
            pair[place] = bytes(mutant)
            with pytest.raises(UntrustedArtifact):
                check_signature(*pair, ring)


def test_a_signature_made_for_another_purpose_is_none(ring: Keyring) -> None:
    """Fails without the domain prefix."""
    document = json.loads(signed(ring))
    document["signatures"][0]["signature"] = ring.private_key().sign(MANIFEST).hex()
    with pytest.raises(UntrustedArtifact, match="over other bytes"):
        check_signature(MANIFEST, canonical_json(document), ring)
    assert len(DOMAIN) > 16


def test_unknown_expired_and_revoked_keys_are_refused_by_name(ring: Keyring, tmp_path: Path) -> None:
    """Fails without `Keyring.problem`: the mathematics of all three is good."""
    stranger = keyring(tmp_path / "other", "mallory")
    with pytest.raises(UntrustedArtifact, match="is not among your trusted keys"):
        check_signature(MANIFEST, signed(stranger), ring)
    old = keyring(tmp_path / "old", "bob", expires="2026-01-31")
    with pytest.raises(UntrustedArtifact, match=r"key 'bob' \(.*\) expired on 2026-01-31"):
        check_signature(MANIFEST, signed(old), old)
    document = signed(ring)
    ring.revoke("alice")
    with pytest.raises(UntrustedArtifact, match=r"key 'alice' .* is revoked"):
        check_signature(MANIFEST, document, Keyring.load(ring.folder))


def test_a_key_is_good_through_its_last_day(tmp_path: Path) -> None:
    ring = keyring(tmp_path / "keys", "bob", expires="2026-01-31")
    (signer,) = ring.trusted
    assert ring.problem(signer, datetime.date(2026, 1, 31)) is None
    assert ring.problem(signer, datetime.date(2026, 2, 1)) is not None


def test_a_revoked_key_cannot_be_trusted_again_by_accident(ring: Keyring) -> None:
    """Fails if revoking only removes the trusted file: its owner's file brings it back."""
    key = public_key(ring, "alice")
    assert ring.revoke(key.id[:8]) == key.id
    with pytest.raises(UntrustedArtifact, match="is revoked"):
        Keyring.load(ring.folder).trust(key)
    unseen = "ab" * 32
    assert Keyring.load(ring.folder).revoke(unseen) == unseen


def test_one_good_signature_among_several_is_enough_and_the_order_does_not_count(
    ring: Keyring, tmp_path: Path
) -> None:
    stranger = keyring(tmp_path / "other", "mallory")
    for first, second in ((stranger, ring), (ring, stranger)):
        both = merge_signatures(signed(first), signed(second))
        assert check_signature(MANIFEST, both, ring) == public_key(ring, "alice").id
    with pytest.raises(UntrustedArtifact, match="not among your trusted keys; the signature of key 'alice'"):
        check_signature(
            MANIFEST, _by_id(merge_signatures(signed(stranger), signed(ring, b"other")), stranger), ring
        )
    again = merge_signatures(signed(ring, b"other"), signed(ring))
    assert len(json.loads(again)["signatures"]) == 1
    assert check_signature(MANIFEST, again, ring)


def _by_id(document: bytes, first: Keyring) -> bytes:
    """The entries with those of `first` in front."""
    parsed = json.loads(document)
    parsed["signatures"].sort(key=lambda entry: entry["key_id"] not in first.trusted)
    return canonical_json(parsed)


MALFORMED = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "another schema": b'{"schema":2,"signatures":[]}',
    "a float": b'{"schema":1.0,"signatures":[]}',
    "spaces": b'{"schema": 1, "signatures": []}',
    "a field twice": b'{"schema":1,"schema":1,"signatures":[]}',
    "a field more": b'{"more":0,"schema":1,"signatures":[]}',
    "no signature": b'{"schema":1,"signatures":[]}',
    "an entry that is none": b'{"schema":1,"signatures":[1]}',
    "another algorithm": b'{"schema":1,"signatures":[{"algorithm":"none","key_id":"00","signature":"00"}]}',
    "short digits": b'{"schema":1,"signatures":[{"algorithm":"ed25519","key_id":"00","signature":"00"}]}',
    "a huge number": b'{"schema":' + b"9" * 5000 + b',"signatures":[]}',
    "deep": b"[" * 50_000,
    "large": b'{"schema":1,"signatures":"' + b"x" * (1 << 16) + b'"}',
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_signature_is_refused(kind: str, ring: Keyring) -> None:
    with pytest.raises(UntrustedArtifact):
        check_signature(MANIFEST, MALFORMED[kind], ring)


def test_an_origin_mark_is_read_strictly() -> None:
    assert parse_origin(origin_document("s3://bucket")) == "s3://bucket"
    for bad in (b"", b"{}", b'{"remote":1,"schema":1}', b'{"remote":"x","schema":1,"z":0}'):
        with pytest.raises(UntrustedArtifact, match="origin mark"):
            parse_origin(bad)


def test_no_keyring_is_an_empty_one_and_touches_nothing(tmp_path: Path) -> None:
    ring = Keyring.load(tmp_path / "none")
    assert (ring.trusted, ring.private) == ({}, ())
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="no private key") as caught:
        ring.private_key()
    assert caught.value.hint == "`dflash-aot keys new NAME` makes one"


def test_the_keyring_is_private_whatever_the_umask(tmp_path: Path, umask_0: None) -> None:
    ring = keyring(tmp_path / "a" / "keys", "alice")
    assert stat.S_IMODE((ring.folder / "private" / "alice.pem").stat().st_mode) == 0o600
    for folder in (ring.folder, ring.folder / "private", ring.folder / "trusted"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert ring.private_key("alice")


@pytest.fixture
def umask_0():
    before = os.umask(0o000)
    yield
    os.umask(before)


@pytest.mark.parametrize("part", ["", "trusted", "trusted/{id}.json", "private"])
def test_a_keyring_that_others_can_write_is_refused(ring: Keyring, part: str) -> None:
    """Fails without the checks of `_entries` and `open_trusted`: whoever adds a key runs code."""
    path = ring.folder / part.format(id=public_key(ring, "alice").id)
    path.chmod(path.stat().st_mode | stat.S_IWGRP)
    with pytest.raises(UntrustedArtifact, match="may be written by"):
        Keyring.load(ring.folder)


def test_a_private_key_that_others_can_read_does_not_sign(ring: Keyring) -> None:
    (ring.folder / "private" / "alice.pem").chmod(0o640)
    with pytest.raises(UntrustedArtifact, match="may be read by others") as caught:
        ring.private_key()
    assert "chmod 600" in (caught.value.hint or "")


def test_a_key_under_the_id_of_another_is_refused(ring: Keyring) -> None:
    """Fails without the comparison in `Keyring.load`: a file's name would decide what it vouches for."""
    path = ring.public_path(public_key(ring, "alice"))
    path.rename(path.with_name("0" * 64 + ".json"))
    with pytest.raises(UntrustedArtifact, match="filed under another id"):
        Keyring.load(ring.folder)


def test_files_that_are_no_keys_are_refused(ring: Keyring) -> None:
    dice = random.Random(0)
    path = ring.public_path(public_key(ring, "alice"))
    whole = path.read_bytes()
    for _ in range(200):
        cut = bytearray(whole)
        cut[dice.randrange(len(cut) - 1)] ^= 1 << dice.randrange(8)
        path.write_bytes(cut)
        try:
            loaded = Keyring.load(ring.folder)
        except UntrustedArtifact:
            continue
        # A changed letter of the name is a name: it decides nothing.
        assert {key.public_key for key in loaded.trusted.values()} == {public_key(ring, "alice").public_key}
    (ring.folder / "private" / "alice.pem").write_bytes(b"no key")
    path.write_bytes(whole)
    with pytest.raises(CorruptArtifact, match="holds no ed25519 key"):
        Keyring.load(ring.folder).private_key()


def test_names_and_dates_are_checked(ring: Keyring) -> None:
    for name in ("", "../x", "a/b", ".hidden", "a" * 65):
        with pytest.raises(ConfigError, match="is no name for a key"):
            ring.create(name)
    for date in ("2027", "2027-13-01", "20270101", "tomorrow"):
        with pytest.raises(ConfigError, match="is no date"):
            ring.create("bob", date)
    with pytest.raises(ConfigError, match="there is a key 'alice' already"):
        ring.create("alice")
    ring.create("bob")
    with pytest.raises(ConfigError, match="several keys can sign: alice, bob"):
        Keyring.load(ring.folder).private_key()
