"""Remotes behind a network that fails (row 20), and publishers that race (row 21); moto's S3, over real HTTP.

`FAULTS_SCALE=1` runs all rounds.
"""

import os
import threading
import time
import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from aot import compile as compile_module
from aot import store as store_module
from aot.compile import build
from aot.errors import CorruptArtifact, EnvironmentFault, UserError
from aot.remote import Place, Remote, lookup
from aot.signing import ORIGIN_SUFFIX
from aot.store import Store
from aot.transport import RemoteFault, open_transport
from tests.support.remotes import (
    BUCKET,
    IMPATIENT,
    Faults,
    MisbehavingServer,
    fetch,
    files_of,
    new_keyring,
    publish,
    s3_server,
    sign_in,
)
from tests.support.toy import SMALL, requests

URL = f"s3://{BUCKET}/team/store"
ROUNDS = max(2, round(20 * float(os.environ.get("FAULTS_SCALE", "0.1"))))
#: An answer, its one retry by botocore with its pause, and a loaded machine.
AT_MOST_S = 8.0


@pytest.fixture
def server(monkeypatch):
    pytest.importorskip("s3fs")
    with s3_server(monkeypatch) as running:
        yield running


@pytest.fixture
def keyring(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_AOT_KEYS", str(tmp_path / "keys"))
    return new_keyring(tmp_path / "keys", "me")


@pytest.fixture(autouse=True)
def tried(monkeypatch):
    keys = []
    monkeypatch.setattr(store_module, "_try_package", lambda path, manifest: keys.append(manifest.key))
    return keys


@pytest.fixture
def mine(tmp_path):
    return Store(tmp_path / "mine")


@pytest.fixture
def pushed(server, keyring, tmp_path):
    store = Store(tmp_path / "theirs")
    manifest = publish(store)
    sign_in(store, manifest, keyring)
    assert Remote(URL, keyring).push(manifest, store) == "pushed"
    return manifest


@pytest.fixture
def remote(keyring):
    return Remote(URL, keyring)


@pytest.fixture
def hurried(keyring):
    """For answers that do not come; on a busy machine, those that do may take a second too."""
    return Remote(URL, keyring, IMPATIENT)


def test_s3_holds_a_mirror_of_the_store(server, remote, pushed, mine):
    key = f"manifests/toy_step/{SMALL}/{pushed.key}"
    assert open_transport(URL).names("manifests") == [f"{key}.json", f"{key}.sig"]
    assert remote.places() == [Place.of(pushed)]
    assert fetch(remote, Place.of(pushed), mine) == pushed


MODES = ("endless", "slow", "silent", "short", "cut", "html", "http500", "http503", "reset")


@pytest.mark.parametrize("mode", MODES)
def test_a_remote_that_misbehaves_costs_little_and_is_asked_again(
    server: MisbehavingServer, remote, hurried, pushed, mine, mode
):
    """Seen to fail: `endless` without the cap in `Transport.read`, `slow` if `_Deadline.left` never ends,
    `cut` without the comparison of lengths and digests.
    """
    for suffix in (".json", ".sig", ".zst"):
        server.faults = Faults(mode, suffix)
        started = time.monotonic()
        with pytest.raises(UserError, match="s3://"):
            fetch(hurried, Place.of(pushed), mine)
        assert time.monotonic() - started < AT_MOST_S, suffix
        assert server.faults.sent < 16 << 20, suffix
        assert files_of(mine) == {}, suffix
    server.faults = Faults()
    assert fetch(remote, Place.of(pushed), mine) == pushed


def test_a_listing_that_drips_is_given_up(server: MisbehavingServer, hurried, pushed):
    """Without the timeout of `_S3._call`, it takes as long as it takes: each byte is in time for botocore."""
    server.faults = Faults("slow", f"/{BUCKET}")
    started = time.monotonic()
    with pytest.raises(RemoteFault):
        hurried.places()
    assert time.monotonic() - started < AT_MOST_S


@pytest.mark.parametrize("mode", ["reset", "http503"])
def test_build_looks_at_the_remote_and_builds_here_when_it_fails(
    server: MisbehavingServer, remote, pushed, mine, mode, monkeypatch
):
    """Without the handler in `lookup`, a build fails with its remote. Nor is the failure taken for a lasting
    miss: the next build asks again, this one does not.
    """
    warnings, started = [], []
    (request,) = requests(SMALL)
    inputs = pushed.key_inputs
    monkeypatch.setattr(compile_module, "_inputs", lambda request: inputs)

    def start(worker):
        started.append(worker.request)
        raise InterruptedError

    monkeypatch.setattr(compile_module._Worker, "start", start)
    monkeypatch.setattr(compile_module._Worker, "kill", lambda worker: None)
    server.faults = Faults(mode, ".json")
    ask = lookup(remote, mine, warnings.append)
    with pytest.raises(InterruptedError):
        build([request], mine, lookup=ask)
    assert started == [request]
    assert len(warnings) == 1
    assert "building here instead" in warnings[0]
    server.faults = Faults()
    assert ask(inputs) is None
    assert server.faults.seen == []
    [result] = build([request], mine, lookup=lookup(remote, mine, warnings.append))
    assert result.cached
    assert result.manifest == pushed
    assert len(warnings) == 1
    assert len(started) == 1


def test_a_refused_artifact_is_a_warning_of_build(server, pushed, mine, tmp_path):
    warnings = []
    stranger = Remote(URL, new_keyring(tmp_path / "strange", "them"))
    assert lookup(stranger, mine, warnings.append)(pushed.key_inputs) is None
    assert "not among your trusted keys" in warnings[0]
    assert files_of(mine) == {}


def blob_requests(server: MisbehavingServer) -> list[str]:
    return [
        range_ for method, path, range_ in server.faults.seen if path.endswith(".zst") and method == "GET"
    ]


@pytest.mark.parametrize("mode", ["short", "cut"])
def test_a_broken_download_goes_on_where_it_broke(server: MisbehavingServer, remote, pushed, mine, mode):
    """Without the file in `incoming`, each attempt starts at 0 and such a network never delivers."""
    cut = pushed.blob_size // 3
    server.faults = Faults(mode, ".zst", times=1, cut=cut)
    assert fetch(remote, Place.of(pushed), mine) == pushed
    assert blob_requests(server) == ["", f"bytes={cut}-"]


def test_a_later_call_continues_a_download(server: MisbehavingServer, remote, pushed, mine):
    cut = pushed.blob_size // 2
    found = remote.find(Place.of(pushed))
    path = mine.incoming_path(pushed)
    blob = b"".join(remote.transport.read(f"blobs/{pushed.blob_digest}.zst", pushed.blob_size))
    path.write_bytes(blob[:cut])
    server.faults = Faults()
    assert remote.fetch(found, mine) == pushed
    assert blob_requests(server) == [f"bytes={cut}-"]


@pytest.mark.parametrize("left", ["flipped", "longer", "whole", "whole, flipped"])
def test_what_an_earlier_download_left_is_not_believed(server: MisbehavingServer, remote, pushed, mine, left):
    """Without the emptying of the file, one bad byte in it refuses the artifact for ever."""
    found = remote.find(Place.of(pushed))
    blob = b"".join(remote.transport.read(f"blobs/{pushed.blob_digest}.zst", pushed.blob_size))
    flipped = bytes([blob[0] ^ 1]) + blob[1:]
    contents = {
        "flipped": flipped[:1000],
        "longer": blob + b"x",
        "whole": blob,
        "whole, flipped": flipped,
    }
    mine.incoming_path(pushed).write_bytes(contents[left])
    server.faults = Faults()
    assert remote.fetch(found, mine) == pushed
    assert blob_requests(server) == {"flipped": ["bytes=1000-", ""], "whole": []}.get(left, [""])


def test_a_server_that_ignores_ranges_still_delivers(server: MisbehavingServer, remote, pushed, mine):
    """Without the new start after an oversized answer, a partial file could never be completed."""
    found = remote.find(Place.of(pushed))
    mine.incoming_path(pushed).write_bytes(bytes(1000))
    server.faults = Faults("whole", ".zst")
    assert remote.fetch(found, mine) == pushed


def test_a_missing_bucket_is_a_fault_and_not_a_miss(server, keyring):
    """Without the look at the code, a typo in the URL reads as `nothing there`."""
    elsewhere = Remote("s3://no-such-bucket/a", keyring)
    for ask in (
        lambda: elsewhere.find(Place("toy_step", SMALL, "0" * 64)),
        elsewhere.places,
        lambda: elsewhere.transport.create("blobs/a", b"content"),
    ):
        with pytest.raises(RemoteFault, match="no such bucket"):
            ask()


def test_nobody_listens(monkeypatch, server, keyring, mine, pushed):
    server.close()
    with pytest.raises(RemoteFault):
        Remote(URL, keyring, IMPATIENT).find(Place.of(pushed))


def test_s3_without_s3fs_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(EnvironmentFault) as caught:
        open_transport(URL)
    assert caught.value.hint == "`pip install 'dflash-aot[s3]'`"


def test_a_name_is_written_once(server):
    """Without `IfNoneMatch`, the second write wins."""
    transport = open_transport(URL)
    assert transport.create("blobs/a", b"first")
    assert not transport.create("blobs/a", b"second")
    assert b"".join(transport.read("blobs/a", 10)) == b"first"


def test_a_conflict_is_tried_again(server: MisbehavingServer):
    """S3 answers 409 while another write is under way; taken for `it is there`, nobody might write it."""
    transport = open_transport(URL)
    server.faults = Faults("conflict", "/a", "PUT", times=2)
    assert transport.create("blobs/a", b"first")
    assert b"".join(transport.read("blobs/a", 10)) == b"first"
    server.faults = Faults("conflict", "/b", "PUT")
    with pytest.raises(RemoteFault):
        transport.create("blobs/b", b"first")


@pytest.mark.parametrize("kind", ["s3", "file", "memory"])
def test_of_racing_publishers_one_wins_and_the_others_verify_it(
    server, keyring, tmp_path, mine, kind, monkeypatch
):
    """Without create-only writes, manifest, signature and blob of different publishers end up together. Seen
    without `IfNoneMatch`, with a rename for the link, and without the lock of `memory://`.
    """
    exists = MemoryFileSystem.exists

    def slowly(*args, **kwargs):
        there = exists(*args, **kwargs)
        time.sleep(0.01)
        return there

    monkeypatch.setattr(MemoryFileSystem, "exists", slowly)
    publishers = []
    for number in range(4):
        store = Store(tmp_path / f"publisher-{number}")
        manifest = publish(store, seed=number // 2, who=str(number))
        sign_in(store, manifest, keyring)
        publishers.append((store, manifest))
    for turn in range(ROUNDS):
        url = {
            "s3": f"{URL}/{turn}",
            "file": f"file://{tmp_path}/shared-{turn}",
            "memory": f"memory://{uuid.uuid4().hex}",
        }[kind]
        outcomes, barrier = [], threading.Barrier(len(publishers))

        def race(store, manifest, url=url, outcomes=outcomes, barrier=barrier):
            remote = Remote(url, keyring)
            barrier.wait()
            try:
                outcomes.append((remote.push(manifest, store), manifest))
            except UserError as error:
                outcomes.append((str(error), manifest))

        threads = [threading.Thread(target=race, args=publisher) for publisher in publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(word for word, _ in outcomes) == ["kept"] * 3 + ["pushed"]
        (winner,) = [manifest for word, manifest in outcomes if word == "pushed"]
        found = Remote(url, keyring).find(Place.of(winner))
        assert found.manifest == winner
        reader = Store(mine.root / str(turn))
        assert Remote(url, keyring).fetch(found, reader) == winner


def test_two_pulls_of_one_artifact_share_a_store(server, remote, keyring, pushed, mine):
    failures = []

    def pull():
        try:
            fetch(Remote(URL, keyring), Place.of(pushed), mine)
        except UserError as error:
            failures.append(error)

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert mine.intact("toy_step", SMALL, pushed.key) == pushed
    assert mine.manifest_path("toy_step", SMALL, pushed.key).with_suffix(ORIGIN_SUFFIX).exists()


def test_a_blob_that_ends_early_in_s3_is_to_be_removed(server: MisbehavingServer, remote, pushed, mine):
    """Fails if the answer 416, nothing from there on, counts as a fault of the network."""
    import boto3

    bucket, _, prefix = URL.removeprefix("s3://").partition("/")
    name = f"blobs/{pushed.blob_digest}.zst"
    blob = b"".join(remote.transport.read(name, pushed.blob_size))
    boto3.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/{name}".lstrip("/"), Body=blob[:-1])
    with pytest.raises(CorruptArtifact, match="ended after") as caught:
        fetch(remote, Place.of(pushed), mine)
    assert caught.value.hint == f"remove '{URL}/{name}' and push it again"
