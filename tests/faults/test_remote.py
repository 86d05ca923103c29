"""Remotes: what is refused, and that nothing is there by halves (rows 17, 18 and 21 of the fault table)."""

import dataclasses
import errno
import itertools
import os
import signal
import uuid

import pytest
import zstandard

from aot import store as store_module
from aot import transport as transport_module
from aot.errors import ConfigError, CorruptArtifact, UntrustedArtifact, UserError
from aot.manifest import MAX_MANIFEST_BYTES, Manifest
from aot.remote import MANIFEST_SUFFIX, Place, Remote
from aot.signing import ORIGIN_SUFFIX, SIGNATURE_SUFFIX, Keyring, check_signature, parse_origin, sign
from aot.store import Store
from aot.transport import OversizedRead, RemoteFault, open_transport
from tests.support.remotes import fake_package, fetch, files_of, new_keyring, publish, sign_in
from tests.support.toy import LARGE, SMALL


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    return f"memory://{uuid.uuid4().hex}/a" if request.param == "memory" else f"file://{tmp_path}/shared/a"


@pytest.fixture
def keyring(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_AOT_KEYS", str(tmp_path / "keys"))
    return new_keyring(tmp_path / "keys", "me")


@pytest.fixture
def tried(monkeypatch):
    """The keys of the packages that a child process was to try."""
    keys = []
    monkeypatch.setattr(store_module, "_try_package", lambda path, manifest: keys.append(manifest.key))
    return keys


@pytest.fixture
def theirs(tmp_path):
    return Store(tmp_path / "theirs")


@pytest.fixture
def mine(tmp_path):
    return Store(tmp_path / "mine")


@pytest.fixture
def pushed(url, keyring, theirs) -> Manifest:
    """An artifact that is at the remote, signed by me."""
    manifest = publish(theirs)
    sign_in(theirs, manifest, keyring)
    assert Remote(url, keyring).push(manifest, theirs) == "pushed"
    return manifest


class Spy(Remote):
    """Records the names that are read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.names, read = [], self.transport.read

        def recorded(name, *rest):
            self.names.append(name)
            return read(name, *rest)

        self.transport.read = recorded


def put(url: str, name: str, content: bytes | None) -> None:
    """Replace or remove an object behind everybody's back."""
    remote = open_transport(url)
    if isinstance(remote, transport_module._Folder):
        path = remote._root / name
        path.unlink(missing_ok=True)
    else:
        path = f"{url}/{name}"
        if remote._files.exists(path):
            remote._files.rm(path)
    if content is not None:
        assert remote.create(name, content)


def test_what_is_pushed_is_what_is_fetched(url, keyring, pushed, theirs, mine, tried):
    remote = Remote(url, keyring)
    assert remote.places() == [Place.of(pushed)]
    assert fetch(remote, Place.of(pushed), mine) == pushed
    assert mine.read_package(pushed) == fake_package()
    assert tried == [pushed.key]
    path = mine.manifest_path(pushed.program, pushed.bucket, pushed.key)
    assert parse_origin(path.with_suffix(ORIGIN_SUFFIX).read_bytes()) == url
    assert check_signature(path.read_bytes(), path.with_suffix(SIGNATURE_SUFFIX).read_bytes(), keyring)
    assert not list((mine.root / "incoming").iterdir())
    assert remote.push(pushed, theirs) == "present"


def test_a_miss_is_none_and_is_not_remembered(url, keyring, theirs, mine, tried):
    manifest = publish(theirs)
    remote, place = Remote(url, keyring), Place.of(manifest)
    assert remote.places() == []
    assert remote.find(place) is None
    sign_in(theirs, manifest, keyring)
    Remote(url, keyring).push(manifest, theirs)
    assert fetch(remote, place, mine) == manifest


@pytest.mark.parametrize(
    "doubt", ["unsigned", "unknown", "expired", "revoked", "over another artifact", "garbled", "huge"]
)
def test_a_doubtful_signature_is_refused_before_the_blob_is_asked_for(
    url, keyring, pushed, theirs, mine, tried, tmp_path, doubt
):
    """Without `Remote._check_signature` in `find`, all but `unsigned` and `huge` are installed; with the
    download before it, the blob is among the names that were read.
    """
    place = Place.of(pushed)
    name, data = place.name(SIGNATURE_SUFFIX), pushed.to_bytes()
    other = publish(theirs, bucket=LARGE)
    if doubt == "unknown":
        stranger = new_keyring(tmp_path / "strange", "them")
        put(url, name, sign(data, stranger.private_key()))
    elif doubt == "expired":
        keyring.create("old", "2020-01-01")
        put(url, name, sign(data, Keyring.load().private_key("old")))
    elif doubt == "revoked":
        keyring.revoke("me")
    else:
        contents = {
            "unsigned": None,
            "over another artifact": sign(other.to_bytes(), keyring.private_key()),
            "garbled": b"<html>",
            "huge": bytes(1 << 20),
        }
        put(url, name, contents[doubt])
    spy = Spy(url, Keyring.load())
    with pytest.raises((UntrustedArtifact, OversizedRead)) as caught:
        fetch(spy, place, mine)
    assert url in caught.value.message
    assert not any(read.startswith("blobs/") for read in spy.names)
    assert files_of(mine) == {}
    assert tried == []


def test_a_good_pair_under_another_name_is_refused(url, keyring, pushed, theirs, mine, tried):
    """Without the comparison of places in `find`, an artifact of SMALL is installed for LARGE."""
    other = Place.of(publish(theirs, bucket=LARGE))
    put(url, other.name(MANIFEST_SUFFIX), pushed.to_bytes())
    put(url, other.name(SIGNATURE_SUFFIX), sign(pushed.to_bytes(), keyring.private_key()))
    with pytest.raises(CorruptArtifact, match="filed under another name"):
        fetch(Remote(url, keyring), other, mine)
    assert files_of(mine) == {}


@pytest.mark.parametrize("damage", ["absent", "short", "long", "flipped"])
def test_a_blob_that_is_not_the_signed_one_is_refused(url, keyring, pushed, theirs, mine, tried, damage):
    """Several checks stand in a row here: the cap of `read`, length and digest in `_download`, and those in
    `Store.adopt`. Each has a test of its own that fails without it.
    """
    name = f"blobs/{pushed.blob_digest}.zst"
    blob = theirs.blob_path(pushed).read_bytes()
    contents = {
        "absent": None,
        "short": blob[:-1],
        "long": blob + b"x",
        "flipped": bytes([blob[0] ^ 1]) + blob[1:],
    }
    put(url, name, contents[damage])
    with pytest.raises((CorruptArtifact, RemoteFault), match="blobs"):
        fetch(Remote(url, keyring), Place.of(pushed), mine)
    assert files_of(mine) == {}
    assert tried == []
    put(url, name, blob)
    assert fetch(Remote(url, keyring), Place.of(pushed), mine) == pushed


def test_a_manifest_is_read_up_to_its_cap(url, keyring, pushed, mine):
    """Without the cap in `Transport.read`, the error is the parser's, after all of it was read."""
    put(url, Place.of(pushed).name(MANIFEST_SUFFIX), bytes(MAX_MANIFEST_BYTES + 1))
    with pytest.raises(OversizedRead):
        Remote(url, keyring).find(Place.of(pushed))


def test_a_package_that_does_not_run_is_not_installed(url, keyring, pushed, mine):
    """The library is noise: without `_try_package` in `Store.adopt`, it is installed and crashes its user."""
    with pytest.raises(CorruptArtifact, match="its trial run"):
        fetch(Remote(url, keyring), Place.of(pushed), mine)
    assert files_of(mine) == {}


def test_adopt_verifies_what_it_is_given(keyring, theirs, mine, tried):
    """Without its own digest check, `Store.adopt` files another frame of the same package under the name of
    this one, and nobody can read it.
    """
    manifest = publish(theirs)
    blob = theirs.blob_path(manifest).read_bytes()
    content = fake_package()
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj(size=len(content))
    other_frame = stream.compress(content[:1000]) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    other_frame += stream.compress(content[1000:]) + stream.flush()
    assert zstandard.decompress(other_frame) == content
    for bad in (blob[:-1], blob + b"x", blob[:-9] + bytes(9), other_frame):
        with pytest.raises(CorruptArtifact):
            mine.adopt(manifest.to_bytes(), bad, b"", "memory://x")
    assert files_of(mine) == {}
    assert tried == []


def test_an_own_build_of_the_key_stays(url, keyring, pushed, mine, tried):
    own = publish(mine, seed=1)
    assert fetch(Remote(url, keyring), Place.of(pushed), mine) == own
    assert not mine.manifest_path(own.program, own.bucket, own.key).with_suffix(ORIGIN_SUFFIX).exists()


def test_an_adoption_that_fails_anywhere_shows_nothing(url, keyring, pushed, mine, tried, monkeypatch):
    """With the manifest installed before its mark, the failure at the mark leaves an artifact that looks like
    an own build.
    """
    link = os.link
    for allowed in range(4):
        left = itertools.count(allowed, -1)

        def failing(*args, left=left):
            if next(left) == 0:
                raise OSError(28, "No space left on device")
            link(*args)

        monkeypatch.setattr(os, "link", failing)
        with pytest.raises(UserError, match="No space left"):
            fetch(Remote(url, keyring), Place.of(pushed), mine)
        assert mine.manifest_paths() == []
    monkeypatch.setattr(os, "link", link)
    assert fetch(Remote(url, keyring), Place.of(pushed), mine) == pushed


def test_a_build_over_a_damaged_adoption_is_an_own_build(url, keyring, pushed, mine, tried):
    """Without `publish` removing them, the mark and the signature of the replaced artifact would condemn the
    new one.
    """
    fetch(Remote(url, keyring), Place.of(pushed), mine)
    mine.blob_path(pushed).write_bytes(b"")
    own = publish(mine, seed=1)
    path = mine.manifest_path(own.program, own.bucket, own.key)
    assert mine.find(own.program, own.bucket, own.key) == own
    assert [path.with_suffix(s).exists() for s in (ORIGIN_SUFFIX, SIGNATURE_SUFFIX)] == [False, False]


def test_an_unsigned_artifact_is_not_pushed(url, keyring, theirs):
    """Without `_own_signature`, others would find an artifact that they must refuse."""
    manifest = publish(theirs)
    with pytest.raises(UntrustedArtifact, match="is not signed") as caught:
        Remote(url, keyring).push(manifest, theirs)
    assert caught.value.hint == f"`dflash-aot sign {manifest.key[:12]}`"
    sign_in(theirs, publish(theirs, bucket=LARGE), keyring)
    path = theirs.root / Place.of(manifest).name(SIGNATURE_SUFFIX)
    path.write_bytes(sign(b"another", keyring.private_key()))
    with pytest.raises(UntrustedArtifact, match="over other bytes"):
        Remote(url, keyring).push(manifest, theirs)
    assert open_transport(url).names("") == []


def test_a_push_that_ends_anywhere_shows_nothing_and_is_finished_by_the_next(
    url, keyring, theirs, mine, tried
):
    """With the manifest created first, the second failure leaves an artifact without its blob."""
    manifest = publish(theirs)
    sign_in(theirs, manifest, keyring)
    place = Place.of(manifest)
    for allowed in range(3):
        remote = Remote(url, keyring)
        create, left = remote.transport.create, itertools.count(allowed, -1)

        def failing(name, content, create=create, left=left):
            if next(left) == 0:
                raise RemoteFault("gone")
            return create(name, content)

        remote.transport.create = failing
        with pytest.raises(RemoteFault, match="gone"):
            remote.push(manifest, theirs)
        assert Remote(url, keyring).places() == []
        assert Remote(url, keyring).find(place) is None
    assert Remote(url, keyring).push(manifest, theirs) == "pushed"
    assert fetch(Remote(url, keyring), place, mine) == manifest


def test_the_first_artifact_of_a_key_stays_and_is_verified(url, keyring, pushed, theirs, mine, tried):
    """Without the verification of what is there, a push onto a damaged blob says `present`."""
    other = Store(mine.root.with_name("other"))
    second = publish(other, seed=1)
    sign_in(other, second, keyring)
    assert second.key == pushed.key
    assert Remote(url, keyring).push(second, other) == "kept"
    put(url, f"blobs/{pushed.blob_digest}.zst", b"x" * pushed.blob_size)
    with pytest.raises(CorruptArtifact, match="not those of its name"):
        Remote(url, keyring).push(pushed, theirs)
    for missing in (f"blobs/{pushed.blob_digest}.zst", Place.of(pushed).name(SIGNATURE_SUFFIX)):
        put(url, missing, None)
        assert Remote(url, keyring).push(pushed, theirs) == "present"
    assert fetch(Remote(url, keyring), Place.of(pushed), mine) == pushed


def test_the_claim_of_an_interrupted_push_is_named(url, keyring, pushed, mine, monkeypatch):
    monkeypatch.setattr("aot.remote.WINNER_WAIT_S", 0.1)
    put(url, Place.of(pushed).name(MANIFEST_SUFFIX), None)
    second = publish(mine, seed=1)
    sign_in(mine, second, keyring)
    with pytest.raises(RemoteFault, match="did not follow") as caught:
        Remote(url, keyring).push(second, mine)
    assert f"{url}/{Place.of(pushed).name(SIGNATURE_SUFFIX)}" in (caught.value.hint or "")


def test_a_kill_while_a_file_is_created_leaves_no_name(tmp_path):
    """With the file opened under its own name (`xb`), the kill leaves half of it there for good."""
    url = f"file://{tmp_path}/shared"
    for point in ("fsync", "link", "unlink"):
        child = os.fork()
        if child == 0:
            setattr(os, point, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
            transport_module.Path.unlink = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
            open_transport(url).create(f"blobs/{point}.zst", b"content")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        there = (tmp_path / "shared" / "blobs" / f"{point}.zst").exists()
        assert there == (point == "unlink")
        assert open_transport(url).create(f"blobs/{point}.zst", b"content") != there
        assert (tmp_path / "shared" / "blobs" / f"{point}.zst").read_bytes() == b"content"


def test_names_that_are_no_artifacts_are_left_alone(url, keyring, pushed):
    """Without `Place.parse`, a listing could name paths outside the store."""
    remote = open_transport(url)
    key = pushed.key
    for name in (
        f"manifests/toy_step/128x8/{key[:-1]}.json",
        f"manifests/toy_step/128x08/{key}.json",
        f"manifests/toy_step/0x0/{key}.json",
        f"manifests/Toy/128x8/{key}.json",
        f"manifests/toy_step/128x8/more/{key}.json",
        f"manifests/toy_step/128x8/{key}.json.bak",
        "manifests/readme",
    ):
        assert remote.create(name, b"{}")
    assert Remote(url, keyring).places() == [Place.of(pushed)]
    assert Place.parse(f"manifests/../128x8/{key}.json") is None


def test_a_fifo_at_a_file_remote_does_not_hold_anybody(tmp_path, keyring, theirs):
    """Without O_NONBLOCK and the check of its kind, the read waits for a writer for ever."""
    place = Place.of(publish(theirs))
    path = tmp_path / "shared" / place.name(MANIFEST_SUFFIX)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(RemoteFault, match="not a regular file"):
        Remote(f"file://{tmp_path}/shared", keyring).find(place)


@pytest.mark.parametrize(
    "url",
    ["/shared", "ftp://host/a", "file://", "s3://", "file://host/a", "s3://me:secret@bucket", "s3://b?x=1"],
)
def test_what_names_no_remote_is_a_usage_error(url):
    with pytest.raises(ConfigError, match="names"):
        open_transport(url)


def test_pull_takes_what_fits_this_machine(pushed):
    from aot.remote import misfit

    there = pushed.key_inputs.fingerprint
    here = dataclasses.replace(there, torch_version="2.14")
    assert misfit(pushed, lambda device: there) is None
    assert misfit(pushed, lambda device: here) == "torch_version is 2.13, here 2.14"


def test_the_bucket_of_a_place_is_written_one_way():
    assert Place.parse(f"manifests/toy_step/{SMALL}/{'0' * 64}.json") == Place("toy_step", SMALL, "0" * 64)


@pytest.mark.parametrize("damage", ["empty", "short", "long", "flipped"])
def test_a_damaged_blob_is_to_be_removed_at_the_remote(url, keyring, pushed, theirs, mine, tried, damage):
    """Fails if a blob that ends early counts as a transfer that broke off: "try again" would never help."""
    name = f"blobs/{pushed.blob_digest}.zst"
    blob = theirs.blob_path(pushed).read_bytes()
    flipped = bytes([blob[0] ^ 1]) + blob[1:]
    bad = {"empty": b"", "short": blob[:-1], "long": blob + b"x", "flipped": flipped}
    put(url, name, bad[damage])
    remote, removal = Remote(url, keyring), f"remove '{url}/{name}' and push it again"
    with pytest.raises(CorruptArtifact) as caught:
        remote.push(pushed, theirs)
    assert caught.value.hint == removal
    with pytest.raises((CorruptArtifact, OversizedRead)) as caught:
        fetch(remote, Place.of(pushed), mine)
    assert caught.value.hint == removal


@pytest.mark.parametrize(
    ("code", "hint"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "cannot be written"), (errno.EACCES, "your access")],
)
def test_the_hint_of_a_fault_follows_its_cause(tmp_path, monkeypatch, code, hint):
    """Fails if a full remote is blamed on its address."""

    def full(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RemoteFault) as caught:
        open_transport(f"file://{tmp_path}").create("a", b"x")
    assert hint in caught.value.hint
