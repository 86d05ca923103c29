import dataclasses
import fcntl
import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from aot.errors import ConfigError, CorruptArtifact
from aot.manifest import Manifest
from aot.store import MARKER, Store, default_store_root
from tests.support.stores import inputs_of, package_bytes
from tests.support.toy import LARGE, SMALL

PACKAGE = package_bytes()


@pytest.fixture
def package(tmp_path):
    path = tmp_path / "model.pt2"
    path.write_bytes(PACKAGE)
    return path


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def published(store, package) -> Manifest:
    return store.publish(package, inputs_of(), "0" * 64, {})


def frame(content: bytes, **options) -> bytes:
    return zstandard.ZstdCompressor(**{"write_checksum": True, **options}).compress(content)


def with_blob(store: Store, manifest: Manifest, blob: bytes) -> Manifest:
    """Put a blob of our own under a manifest that vouches for it, as an editor of an unsigned store could."""
    forged = dataclasses.replace(manifest, blob_digest=hashlib.sha256(blob).hexdigest(), blob_size=len(blob))
    store.blob_path(forged).write_bytes(blob)
    return forged


def test_what_is_published_is_what_is_read(store, published):
    assert store.read_package(published) == PACKAGE
    assert store.manifests() == store.manifests("toy_step", SMALL) == [published]
    assert store.find("toy_step", SMALL, published.key) == published
    assert store.find("toy_step", LARGE, published.key) is None
    assert store.manifests("toy_step", LARGE) == []


def test_a_store_that_is_not_there_is_empty_and_stays_unmade(store):
    assert store.manifests() == []
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["a.txt", "tmp/thesis/a.txt", "build/a.txt"])
def test_a_folder_of_other_things_is_never_made_a_store(store, package, name):
    """Fails without `check_ours` in `Store.locked`."""
    precious = store.root / name
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    for action in (store.require_writable, lambda: store.publish(package, inputs_of(), "0" * 64, {})):
        with pytest.raises(ConfigError, match="is no store"):
            action()
    assert [path for path in store.root.rglob("*") if path.is_file()] == [precious]


def test_a_store_without_a_mark_is_older_and_gets_one(store, published):
    """Fails when `check_ours` asks for the mark alone, or takes any content for one."""
    mark = store.root / MARKER
    mark.unlink()
    store.require_writable()
    assert mark.is_file()
    mark.write_text('{"schema": 2}')
    with pytest.raises(ConfigError, match="not the mark"):
        store.require_writable()


def test_a_store_that_another_process_begins_meanwhile_is_one(store, monkeypatch):
    """Fails when `check_ours` looks for the mark before it lists the folder: the mark comes first."""
    store.root.mkdir()
    read = Path.read_bytes

    def begun_meanwhile(path):
        if path.name == MARKER and not path.exists():
            monkeypatch.setattr(Path, "read_bytes", read)
            Store(store.root).require_writable()
            raise FileNotFoundError
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", begun_meanwhile)
    store.check_ours()
    assert (store.root / MARKER).exists()


def test_a_publisher_sweeps_only_what_a_publisher_made(store, package, published):
    """Fails when `left_behind` looks at the name, or at `held`, alone."""
    kept = [store.tmp / "thesis" / "held", store.tmp / ("a" * 32) / "a.txt", store.tmp / "note"]
    dead = [store.tmp / ("b" * 32) / "held", store.tmp / ("b" * 32) / "blob"]
    for path in (*kept, *dead):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (store.tmp / ("c" * 32)).mkdir()
    store.publish(package, inputs_of(LARGE), "0" * 64, {})
    assert sorted(path for path in store.tmp.rglob("*") if path.is_file()) == sorted(kept)
    assert not (store.tmp / ("c" * 32)).exists()


def test_the_default_store_is_the_variable_else_under_the_current_folder(monkeypatch):
    monkeypatch.delenv("DFLASH_AOT_STORE", raising=False)
    assert str(default_store_root()) == "artifacts/store"
    monkeypatch.setenv("DFLASH_AOT_STORE", "/somewhere")
    assert str(default_store_root()) == "/somewhere"


def test_the_first_artifact_of_a_key_wins(store, package, published):
    package.write_bytes(PACKAGE + b"another build")
    assert store.publish(package, inputs_of(), "1" * 64, {}) == published
    assert store.read_package(published) == PACKAGE


def test_a_damaged_artifact_is_replaced_by_the_next_publish(store, package, published):
    store.blob_path(published).write_bytes(b"rot")
    assert store.publish(package, inputs_of(), "0" * 64, {}) == published
    assert store.read_package(published) == PACKAGE
    path = store.manifest_path("toy_step", SMALL, published.key)
    path.write_bytes(path.read_bytes()[:-1])
    assert store.publish(package, inputs_of(), "0" * 64, {}) == published
    assert store.manifests() == [published]


def test_every_flipped_byte_and_every_truncation_is_refused(store, published):
    path = store.blob_path(published)
    blob = path.read_bytes()
    generator = random.Random(1)
    for position in generator.sample(range(len(blob)), 300):
        damaged = bytearray(blob)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CorruptArtifact, match="not those that were published"):
            store.read_package(published)
    for length in generator.sample(range(len(blob)), 100):
        path.write_bytes(blob[:length])
        with pytest.raises(CorruptArtifact, match=f"{length} bytes, published with {len(blob)}"):
            store.read_package(published)
    path.write_bytes(blob)
    assert store.read_package(published) == PACKAGE


def lying_frame(stated: int, content: bytes) -> bytes:
    """A frame whose header states another size than it holds (4-byte content size field)."""
    blob = bytearray(frame(content))
    assert blob[4] >> 6 == 1, "this content's size takes the 2-byte field"
    blob[5:7] = (stated - 256).to_bytes(2, "little")
    return bytes(blob)


STATES, EXTRA = "does not state the package's size", "is followed by"


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        pytest.param(frame(PACKAGE) + frame(b"more"), EXTRA, id="two frames"),
        pytest.param(frame(PACKAGE) + b"x", EXTRA, id="trailing byte"),
        pytest.param(frame(PACKAGE, write_checksum=False), STATES, id="no checksum"),
        pytest.param(frame(PACKAGE, write_content_size=False), STATES, id="no stated size"),
        pytest.param(frame(PACKAGE)[:-20], "is cut short", id="cut frame"),
        pytest.param(frame(PACKAGE + b"x"), STATES, id="larger package"),
        pytest.param(frame(PACKAGE[:-1] + b"x"), "not the one published", id="another package"),
        pytest.param(b"not zstd", "Unknown frame descriptor", id="not zstd"),
        pytest.param(b"", "not enough data", id="empty"),
    ],
)
def test_a_frame_that_is_not_exactly_the_package_is_refused(store, published, blob, message):
    with pytest.raises(CorruptArtifact, match=message) as caught:
        store.read_package(with_blob(store, published, blob))
    assert ".zst: " in caught.value.message


@pytest.mark.parametrize("stated", [2_000, 30_000])
def test_a_frame_that_lies_about_its_size_is_refused(store, published, stated):
    content = bytes(20_000)
    lie = dataclasses.replace(
        published, package_size=stated, package_digest=hashlib.sha256(content[:stated]).hexdigest()
    )
    with pytest.raises(CorruptArtifact, match=r"\.zst"):
        store.read_package(with_blob(store, lie, lying_frame(stated, content)))


def test_a_missing_blob_is_corrupt_and_named(store, published):
    store.blob_path(published).unlink()
    with pytest.raises(CorruptArtifact, match=published.blob_digest):
        store.read_package(published)
    assert store.intact("toy_step", SMALL, published.key) is None


def test_a_manifest_filed_under_another_bucket_is_refused(store, published):
    path = store.manifest_path("toy_step", SMALL, published.key)
    stray = store.manifest_path("toy_step", LARGE, published.key)
    stray.parent.mkdir(parents=True)
    stray.write_bytes(path.read_bytes())
    with pytest.raises(CorruptArtifact, match="filed under another name"):
        store.manifests("toy_step", LARGE)


def test_a_reader_writes_nothing(store, published):
    def state():
        return [(path, path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(store.root.rglob("*"))]

    before = state()
    store.read_package(store.manifests()[0])
    assert state() == before


def test_a_killed_lock_holder_holds_nobody_up(store, package, published):
    """Row 4 of the fault table. Fails when the existence of the file is the lock."""
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True)"
    command = [sys.executable, "-c", f"{hold}; import time; time.sleep(60)", str(store.root / "lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    holder.stdout.readline()
    with (store.root / "lock").open("r+") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder.kill()
    holder.wait()
    started = time.monotonic()
    store.publish(package, inputs_of(LARGE), "0" * 64, {})
    assert time.monotonic() - started < 5


def test_new_folders_and_files_are_writable_by_the_owner_alone_under_any_umask(store, package):
    previous = os.umask(0)
    try:
        manifest = store.publish(package, inputs_of(), "0" * 64, {})
    finally:
        os.umask(previous)
    assert store.read_package(manifest) == PACKAGE
    for path in store.root.rglob("*"):
        assert not path.stat().st_mode & 0o022, path
