"""Rows 17 and 18: what came from elsewhere runs on a trusted key's word alone, whatever the policy."""

from __future__ import annotations

import itertools
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from aot import console, runtime
from aot.cli import cli
from aot.errors import ConfigError, CorruptArtifact, UntrustedArtifact
from aot.lockfile import write_lock
from aot.policy import NAMES, Policy, check_trust, sign_artifact
from aot.signing import ORIGIN_SUFFIX, SIGNATURE_SUFFIX, Keyring, sign
from aot.store import Store
from tests.support.toy import LARGE, SMALL, ToyStep
from tests.support.vouched import (
    FINGERPRINT,
    beside,
    keyring,
    mark_as_remote,
    public_key,
    publish,
    write_signature,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aot.manifest import Manifest


@pytest.fixture
def vouched(tmp_path: Path) -> Store:
    return Store(tmp_path / "vouched")


@pytest.fixture
def made(vouched: Store, tmp_path: Path) -> Manifest:
    return publish(vouched, tmp_path)


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return keyring(tmp_path / "keys", "alice")


def policy(name: str, ring: Keyring, *allowed: str) -> Policy:
    return Policy(name, allowed, ring.folder)


def test_an_own_build_needs_no_signature_under_the_default_policy(
    vouched: Store, made: Manifest, ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_AOT_POLICY", raising=False)
    assert Policy.of().name == "local"
    assert check_trust(vouched, made, policy("local", ring)) == "built here"
    with pytest.raises(UntrustedArtifact, match=f"{made.key[:12]}.*: it is not signed") as caught:
        check_trust(vouched, made, policy("signed", ring))
    assert caught.value.hint == f"if you vouch for it: `dflash-aot sign {made.key[:12]}`"


def unsigned(store: Store, manifest: Manifest, ring: Keyring) -> None:
    pass


def by_a_stranger(store: Store, manifest: Manifest, ring: Keyring) -> None:
    write_signature(store, manifest, keyring(ring.folder.parent / "strange", "mallory"))


def by_an_expired_key(store: Store, manifest: Manifest, ring: Keyring) -> None:
    write_signature(store, manifest, keyring(ring.folder, "old", expires="2020-01-01"), "old")


def by_a_revoked_key(store: Store, manifest: Manifest, ring: Keyring) -> None:
    write_signature(store, manifest, ring)
    ring.revoke("alice")


def over_another_artifact(store: Store, manifest: Manifest, ring: Keyring) -> None:
    other = publish(store, store.root.parent, LARGE)
    shutil.copy(write_signature(store, other, ring), beside(store, manifest, SIGNATURE_SUFFIX))


def over_an_older_package_of_the_key(store: Store, manifest: Manifest, ring: Keyring) -> None:
    elsewhere = Store(store.root.parent / "elsewhere")
    older = publish(elsewhere, store.root.parent, content=b"older")
    assert older.key == manifest.key
    shutil.copy(write_signature(elsewhere, older, ring), beside(store, manifest, SIGNATURE_SUFFIX))


def cut_short(store: Store, manifest: Manifest, ring: Keyring) -> None:
    path = write_signature(store, manifest, ring)
    os.truncate(path, path.stat().st_size - 1)


def in_a_file_that_others_can_write(store: Store, manifest: Manifest, ring: Keyring) -> None:
    write_signature(store, manifest, ring).chmod(0o666)


def behind_a_link(store: Store, manifest: Manifest, ring: Keyring) -> None:
    path = write_signature(store, manifest, ring)
    path.symlink_to(path.rename(store.root / "real"))


BAD: dict[Callable[[Store, Manifest, Keyring], None], str] = {
    unsigned: "it is not signed",
    by_a_stranger: "is not among your trusted keys",
    by_an_expired_key: "expired on 2020-01-01",
    by_a_revoked_key: "is revoked",
    over_another_artifact: "is over other bytes",
    over_an_older_package_of_the_key: "is over other bytes",
    cut_short: "cannot be read",
    in_a_file_that_others_can_write: "may be written by",
    behind_a_link: "symbolic link",
}


@pytest.mark.parametrize("origin", ["built here", "from a remote"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", BAD, ids=lambda fault: fault.__name__)
def test_without_a_good_signature_only_an_own_build_under_the_local_policy_is_trusted(
    vouched: Store,
    made: Manifest,
    ring: Keyring,
    fault: Callable[[Store, Manifest, Keyring], None],
    name: str,
    origin: str,
) -> None:
    """Fails, for what came from a remote under `local`, without the origin mark; for all, without
    `check_signature`; the fault of each id passes without the check that its message names.
    """
    fault(vouched, made, ring)
    if origin == "from a remote":
        mark_as_remote(vouched, made)
    elif name == "local":
        assert check_trust(vouched, made, policy(name, ring)) == "built here"
        return
    with pytest.raises(UntrustedArtifact, match=BAD[fault]) as caught:
        check_trust(vouched, made, policy(name, ring))
    assert caught.value.hint


@pytest.mark.parametrize("name", NAMES)
def test_a_good_signature_is_enough_for_both(
    vouched: Store, made: Manifest, ring: Keyring, name: str
) -> None:
    write_signature(vouched, made, ring)
    mark_as_remote(vouched, made)
    assert check_trust(vouched, made, policy(name, ring)).startswith("signed by alice (")


def test_the_override_is_of_one_key_is_told_each_time_and_never_for_a_remote(
    vouched: Store, made: Manifest, ring: Keyring, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the override comes before the question of the origin."""
    allowing = policy("signed", ring, made.key[:8])
    assert check_trust(vouched, made, allowing) == "allowed without a signature"
    assert f"warning: {made}: it is not signed; used all the same" in capsys.readouterr().err
    with pytest.raises(UntrustedArtifact):
        check_trust(vouched, made, policy("signed", ring, "0" * 8))
    mark = mark_as_remote(vouched, made)
    for name in NAMES:
        with pytest.raises(UntrustedArtifact, match="came from s3://bucket: it is not signed"):
            check_trust(vouched, made, policy(name, ring, made.key))
    # A mark that cannot be read is a mark.
    for content in (b"", b"{}"):
        mark.write_bytes(content)
        with pytest.raises(UntrustedArtifact, match="origin mark") as caught:
            check_trust(vouched, made, policy("local", ring, made.key))
        # Which artifact, which file, and what to do.
        assert str(made) in caught.value.message
        assert str(mark) in caught.value.message
        assert "then `dflash-aot build RUN`" in (caught.value.hint or "")


def test_no_environment_or_flag_weakens_silently(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an unknown policy falls back to the default one."""
    for bad in ("Signed", "none", "off", "0", "signed "):
        monkeypatch.setenv("DFLASH_AOT_POLICY", bad)
        with pytest.raises(ConfigError, match="unknown policy"):
            Policy.of()
    for prefix in ("", "*", "abc", "g" * 8):
        with pytest.raises(ConfigError, match="is not the beginning of a key"):
            Policy("signed", (prefix,))
    monkeypatch.setenv("DFLASH_AOT_POLICY", "signed")
    assert Policy.of().name == "signed"


@pytest.mark.parametrize(
    "variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "DFLASH_AOT_OFFLINE", "no_proxy"]
)
def test_offline_changes_nothing(
    vouched: Store, made: Manifest, ring: Keyring, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_as_remote(vouched, made)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UntrustedArtifact, match="it is not signed"):
        check_trust(vouched, made, policy("local", ring))


def test_a_run_is_prepared_only_from_what_is_trusted(
    vouched: Store, made: Manifest, ring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails without the call in `prepare`: checks that only `verify` makes protect nobody."""
    tried: list[str] = []
    monkeypatch.setattr(runtime, "try_packages", lambda trials, **_: tried.extend(t.name for t in trials))
    monkeypatch.setattr(runtime, "Fingerprints", lambda: lambda device_type: FINGERPRINT)
    mark_as_remote(vouched, made)

    def prepare() -> None:
        runtime.prepare(
            vouched, [(ToyStep(), SMALL)], folder=tmp_path / "private", policy=policy("local", ring)
        )

    with pytest.raises(UntrustedArtifact, match="it is not signed"):
        prepare()
    assert tried == []
    assert not list(tmp_path.glob("private/**/*.pt2"))
    write_signature(vouched, made, ring)
    prepare()
    assert tried == [str(made)]


def test_every_pair_of_swapped_signatures_is_refused(vouched: Store, ring: Keyring, tmp_path: Path) -> None:
    """Row 18, the wrong artifact: fails if a signature is checked over less than the manifest's own bytes."""
    made = [
        publish(vouched, tmp_path, bucket, inner=inner, content=str((bucket, inner)).encode())
        for bucket in (SMALL, LARGE)
        for inner in (16, 24, 32, 40)
    ]
    documents = [sign(manifest.to_bytes(), ring.private_key()) for manifest in made]
    for (i, manifest), (j, document) in itertools.product(enumerate(made), enumerate(documents)):
        beside(vouched, manifest, SIGNATURE_SUFFIX).write_bytes(document)
        if i == j:
            assert check_trust(vouched, manifest, policy("signed", ring))
        else:
            with pytest.raises(UntrustedArtifact, match="is over other bytes"):
                check_trust(vouched, manifest, policy("signed", ring))


def test_signing_adds_to_what_is_there_and_refuses_damage_and_strangers(
    vouched: Store, made: Manifest, ring: Keyring, tmp_path: Path
) -> None:
    """Fails without the checks of `sign_artifact`: `sign --all` would vouch for whatever was pulled."""
    keyring(ring.folder, "bob")
    ring = Keyring.load(ring.folder)
    for name in ("alice", "bob"):
        sign_artifact(vouched, made, ring.private_key(name), ring)
    for name in ("alice", "bob"):
        assert check_trust(vouched, made, policy("signed", ring))
        Keyring.load(ring.folder).revoke(name)
    with pytest.raises(UntrustedArtifact, match=r"key '(alice|bob)' .* is revoked"):
        check_trust(vouched, made, policy("signed", ring))

    pulled = publish(vouched, tmp_path, LARGE)
    mark_as_remote(vouched, pulled)
    with pytest.raises(UntrustedArtifact, match="came from s3://bucket"):
        sign_artifact(vouched, pulled, ring.private_key("alice"), ring)
    beside(vouched, pulled, ORIGIN_SUFFIX).unlink()
    vouched.blob_path(pulled).write_bytes(b"")
    with pytest.raises(CorruptArtifact):
        sign_artifact(vouched, pulled, ring.private_key("alice"), ring)
    assert not beside(vouched, pulled, SIGNATURE_SUFFIX).exists()


def test_from_a_new_key_to_a_signed_store_and_to_revocation(
    vouched: Store,
    made: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The commands, as two users would type them."""

    def tool(user: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("DFLASH_AOT_KEYS", str(tmp_path / user))
        code = console.run(cli, "dflash-aot", words)
        return code, *capsys.readouterr()

    store = ("--store", str(vouched.root))
    verify = ("verify", *store, "--level", "trust", "--policy", "signed")
    code, out, err = tool("alice", "sign", "--all", *store)
    assert (code, err.split("hint: ")[1]) == (64, "`dflash-aot keys new NAME` makes one\n")
    code, out, _ = tool("alice", "keys", "new", "alice")
    public = out.strip()
    assert code == 0
    code, out, err = tool("bob", *verify)
    assert (code, "it is not signed" in out) == (2, True)
    assert f"hint: if you vouch for it: `dflash-aot sign {made.key[:12]}`" in err
    assert tool("alice", "sign", made.key[:12], *store)[:2] == (0, f"toy_step/128x8/{made.key}\n")
    assert tool("bob", *verify)[0] == 2
    assert tool("bob", "keys", "trust", public, "--name", "from-alice")[0] == 0
    code, out, _ = tool("bob", *verify)
    assert (code, "signed by from-alice" in out) == (0, True)
    digits = public_key(Keyring.load(tmp_path / "alice"), "alice").public_key
    assert tool("carol", "keys", "trust", digits)[0] == 64
    assert tool("carol", "keys", "trust", digits, "--name", "a", "--expires", "2020-01-01")[0] == 0
    code, out, _ = tool("carol", *verify)
    assert (code, "expired on 2020-01-01" in out) == (2, True)
    assert tool("bob", "keys", "revoke", "from-alice")[0] == 0
    code, out, _ = tool("bob", *verify, "--json")
    assert (code, "is revoked" in out) == (2, True)
    code, out, _ = tool("bob", "keys", "list")
    assert "no: key 'from-alice'" in out
    assert '"can_sign": true' in tool("alice", "keys", "list", "--json")[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", ["others can write the keyring", "a link to the keyring"])
def test_a_keyring_that_cannot_be_read_is_what_the_hint_mends(
    vouched: Store, made: Manifest, ring: Keyring, fault: str, name: str
) -> None:
    """Fails if the hint of the error below is thrown away: to trust the signer again would not help."""
    write_signature(vouched, made, ring)
    mark_as_remote(vouched, made)
    trusted = ring.folder / "trusted"
    if fault == "a link to the keyring":
        trusted.symlink_to(trusted.rename(ring.folder / "real"))
    else:
        trusted.chmod(0o770)
    with pytest.raises(UntrustedArtifact) as caught:
        check_trust(vouched, made, policy(name, ring))
    mended = "export DFLASH_AOT_KEYS=" if "link" in fault else f"`chmod go-w '{trusted}'`"
    assert mended in (caught.value.hint or "")
    assert "keys trust" not in (caught.value.hint or "")


def test_a_revoked_signer_is_not_to_be_trusted_again(vouched: Store, made: Manifest, ring: Keyring) -> None:
    """Fails with one hint for all bad signatures: `keys trust` refuses the file of a revoked key."""
    mark_as_remote(vouched, made)
    for fault, helps in ((by_a_stranger, True), (by_a_revoked_key, False)):
        fault(vouched, made, ring)
        with pytest.raises(UntrustedArtifact) as caught:
            check_trust(vouched, made, policy("local", ring))
        hint = caught.value.hint or ""
        assert ("keys trust" in hint, "dflash-aot build RUN" in hint) == (helps, True)


def test_a_key_whose_time_is_over_is_not_made_and_does_not_sign(
    vouched: Store,
    made: Manifest,
    ring: Keyring,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails without the checks in `keys new` and `sign`: both say that all is well, and `push` refuses."""
    keyring(ring.folder, "old", expires="2020-01-01")
    monkeypatch.setenv("DFLASH_AOT_KEYS", str(ring.folder))
    assert console.run(cli, "dflash-aot", ["keys", "new", "bob", "--expires", "2020-01-01"]) == 64
    assert "2020-01-01 is over" in capsys.readouterr().err
    assert "bob" not in Keyring.load(ring.folder).private
    assert (
        console.run(cli, "dflash-aot", ["sign", "--all", "--key", "old", "--store", str(vouched.root)]) == 1
    )
    out, err = capsys.readouterr()
    assert (out, "expired on 2020-01-01" in err, "hint: " in err) == ("", True, True)
    assert not beside(vouched, made, SIGNATURE_SUFFIX).exists()


def test_a_bad_public_file_is_named_with_a_way_out(
    ring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails without the path and the hint that `keys trust` adds."""
    monkeypatch.setenv("DFLASH_AOT_KEYS", str(ring.folder))
    bad = tmp_path / "alice.json"
    bad.write_text("hello")
    assert console.run(cli, "dflash-aot", ["keys", "trust", str(bad)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: '{bad}': public key: cannot be read")
    assert "hint: name the file" in err


def test_what_is_not_there_is_not_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if nothing to check counts as all good: a pipeline with a typo in it would pass."""
    lock = tmp_path / "artifacts.lock"
    write_lock(lock, {})
    for words in (["--all", "--store", str(tmp_path / "typo")], ["--lock", str(lock)]):
        assert console.run(cli, "dflash-aot", ["verify", *words]) == 64
        out, err = capsys.readouterr()
        assert (out, words[-1] in err, "hint: " in err) == ("", True, True)
    assert not (tmp_path / "typo").exists()
