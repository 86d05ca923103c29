"""The lock file: what it holds, how it is read, and what it says of another artifact."""

from __future__ import annotations

import difflib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from aot import lockfile
from aot.errors import ConfigError, CorruptArtifact, StaleArtifact
from aot.lockfile import (
    LockedArtifact,
    LockMismatch,
    check_place,
    lock_differences,
    lock_of,
    lock_text,
    read_lock,
    update_lock,
    write_lock,
)
from aot.manifest import Manifest
from aot.runtime import resolve, resolve_all
from aot.store import Store
from aot.trace import key_inputs
from tests.support.toy import LARGE, SMALL, ToyStep
from tests.support.vouched import FINGERPRINT, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aot.lockfile import Lock

PROGRAM = ToyStep()
OTHER_COMPILER = replace(FINGERPRINT, compiler="g++ 99")


def made_up(fingerprint=FINGERPRINT, bucket=SMALL, package: str = "1" * 64, **program) -> Manifest:
    inputs = key_inputs(ToyStep(**program), bucket, fingerprint)
    return Manifest(inputs, inputs.key(), "a" * 64, package, 10, "2" * 64, 10, {})


def test_what_is_written_is_what_is_read_whatever_the_order(tmp_path: Path) -> None:
    small, large = made_up(), made_up(bucket=LARGE)
    path = tmp_path / "runs" / "artifacts.lock"
    write_lock(path, lock_of([large, small]))
    assert list(read_lock(path)) == [("toy_step", SMALL), ("toy_step", LARGE)]
    assert read_lock(path) == lock_of([small, large])
    assert path.read_text() == lock_text(lock_of([small, large]))
    before = path.stat()
    write_lock(path, lock_of([small, large]))
    assert path.stat().st_ino == before.st_ino


def test_the_spelling_does_not_count_when_it_is_read(tmp_path: Path) -> None:
    """Other tools may lay out JSON anew; the fields are what is compared."""
    path = tmp_path / "artifacts.lock"
    path.write_text(json.dumps(json.loads(lock_text(lock_of([made_up()])))))
    assert read_lock(path) == lock_of([made_up()])


def test_a_diff_of_two_lock_files_shows_the_field_that_differs() -> None:
    """Fails if the inputs stand on one line, or are left out."""
    texts = [lock_text(lock_of([made_up(there)])).splitlines() for there in (FINGERPRINT, OTHER_COMPILER)]
    changed = [line.strip() for line in difflib.unified_diff(*texts, n=0, lineterm="") if line[0] in "+-"][2:]
    assert len(changed) == 4
    assert sum("compiler" in line and "g++ 99" in line for line in changed) == 1
    assert sum('"key": ' in line for line in changed) == 2
    assert max(map(len, texts[0])) <= 130


def test_an_absent_lock_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        read_lock(tmp_path / "artifacts.lock")
    assert "`dflash-aot build RUN` writes it" in (caught.value.hint or "")


def _set(name: str, value: Any) -> Callable[[dict], None]:
    return lambda document: document["artifacts"][0].update({name: value})


DAMAGE: dict[str, tuple[Callable[[dict], object], str]] = {
    "another schema": (lambda d: d.update(schema=2), "schema 1"),
    "a field more": (lambda d: d.update(more=1), "not of the form"),
    "no list": (lambda d: d.update(artifacts={}), "not of the form"),
    "an artifact that is none": (lambda d: d["artifacts"].append(1), "not of the form"),
    "an artifact twice": (lambda d: d["artifacts"].append(d["artifacts"][0]), "named twice"),
    "a field of an artifact less": (lambda d: d["artifacts"][0].pop("key"), "not of the form"),
    "a digest that is none": (_set("package_digest", "xyz"), "'package_digest' is not a digest"),
    "another key": (_set("key", "0" * 64), "is not that of its inputs"),
    "another place": (_set("bucket", "256x16"), "filed under another place"),
    "an edited input": (
        lambda d: d["artifacts"][0]["inputs"]["compile_options"].update(x=1),
        "is not that of its inputs",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_lock_file_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    inflict, message = DAMAGE[damage]
    document = json.loads(lock_text(lock_of([made_up()])))
    inflict(document)
    path = tmp_path / "artifacts.lock"
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptArtifact, match=message) as caught:
        read_lock(path)
    assert str(path) in caught.value.message
    for content in (b"", b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(CorruptArtifact, match="not a lock file"):
            read_lock(path)


def test_part_of_a_run_keeps_the_other_entries_the_whole_run_does_not(tmp_path: Path) -> None:
    path = tmp_path / "artifacts.lock"
    small, large, new = made_up(), made_up(bucket=LARGE), made_up(inner=32)
    update_lock(path, [small], whole=False)
    update_lock(path, [large], whole=False)
    assert read_lock(path) == lock_of([small, large])
    update_lock(path, [new], whole=False)
    assert read_lock(path) == lock_of([new, large])
    update_lock(path, [small], whole=True)
    assert read_lock(path) == lock_of([small])
    path.write_text("{}")
    with pytest.raises(CorruptArtifact):
        update_lock(path, [small], whole=False)
    update_lock(path, [small], whole=True)
    assert read_lock(path) == lock_of([small])


def test_two_locks_differ_by_field_and_by_bytes() -> None:
    """Fails if only keys are compared (other bytes of one key), or fields as a load compares them."""
    then, package = lock_of([made_up(), made_up(bucket=LARGE)]), made_up(package="3" * 64)
    assert lock_differences(then, then) == []
    ((place, found),) = lock_differences(then, lock_of([made_up(OTHER_COMPILER)]))
    assert place == ("toy_step", SMALL)
    assert list(map(str, found)) == ["fingerprint.compiler: expected 2.13, found g++ 99"]
    ((_, found),) = lock_differences(then, lock_of([package]))
    assert list(map(str, found)) == ["package_digest: expected 111111111111, found 333333333333"]


def test_a_run_takes_the_locked_one_among_artifacts_that_fit(tmp_path: Path) -> None:
    """Fails without `_locked`: of two artifacts that fit this machine, the one of the lower key would run."""
    store = Store(tmp_path / "store")
    both = []
    for fingerprint in (FINGERPRINT, OTHER_COMPILER):
        package = tmp_path / "package"
        package.write_bytes(fingerprint.compiler.encode())
        both.append(store.publish(package, key_inputs(PROGRAM, SMALL, fingerprint), "0" * 64, {}))
    for manifest in both:
        assert resolve(store, PROGRAM, SMALL, FINGERPRINT, lock=lock_of([manifest])) == manifest
    third = made_up(replace(FINGERPRINT, compiler="clang 1"))
    with pytest.raises(LockMismatch, match=r"fingerprint\.compiler: expected clang 1, found") as caught:
        resolve(store, PROGRAM, SMALL, FINGERPRINT, "run.toml", lock_of([third]))
    assert "dflash-aot build run.toml --buckets 128x8" in (caught.value.hint or "")


def test_a_run_refuses_what_its_lock_does_not_name_or_names_otherwise(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    small, large = publish(store, tmp_path), publish(store, tmp_path, LARGE)
    needs = [(PROGRAM, SMALL), (PROGRAM, LARGE)]

    def run(lock: dict) -> None:
        resolve_all(store, needs, lambda device_type: FINGERPRINT, "run.toml", lock)

    run(lock_of([small, large]))
    with pytest.raises(LockMismatch, match="toy_step 256x16: the lock file does not name it"):
        run(lock_of([small]))
    with pytest.raises(LockMismatch, match="2 of 2 artifacts cannot be used") as caught:
        run({})
    assert "--buckets 128x8,256x16" in (caught.value.hint or "")
    rebuilt = LockedArtifact.of(replace(small, package_digest="0" * 64))
    with pytest.raises(LockMismatch, match="package_digest: expected 000000000000"):
        run({**lock_of([large]), rebuilt.place: rebuilt})
    with pytest.raises(StaleArtifact, match="identity"):
        resolve(store, ToyStep(inner=32), SMALL, FINGERPRINT, lock=lock_of([small]))


def test_builds_that_write_at_once_keep_each_others_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails without `_alone_in`: both read before one has written, and the last drops the other's entry."""
    path = tmp_path / "runs" / "artifacts.lock"
    write = lockfile.write_lock

    def slowly(path: Path, lock: Lock) -> None:
        time.sleep(0.2)
        write(path, lock)

    monkeypatch.setattr(lockfile, "write_lock", slowly)
    small, large = made_up(), made_up(bucket=LARGE)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda manifest: update_lock(path, [manifest], whole=False), [small, large]))
    assert read_lock(path) == lock_of([small, large])
    assert [entry.name for entry in path.parent.iterdir()] == ["artifacts.lock"]


def test_an_edited_graph_hash_is_a_difference() -> None:
    """Fails if `differences` compares key and package digest alone."""
    (entry,) = lock_of([made_up()]).values()
    (difference,) = replace(entry, graph_hash="b" * 64).differences(entry)
    assert str(difference) == "graph_hash: expected bbbbbbbbbbbb, found aaaaaaaaaaaa"


def test_a_damaged_lock_file_that_part_of_a_run_cannot_change_names_what_can(tmp_path: Path) -> None:
    """Fails with the hint of `read_lock`: repeated with `--buckets`, that command meets the same file."""
    path = tmp_path / "artifacts.lock"
    path.write_text("hello")
    with pytest.raises(CorruptArtifact) as caught:
        update_lock(path, [made_up()], whole=False)
    assert "`dflash-aot build RUN` without `--buckets`" in (caught.value.hint or "")


@pytest.mark.parametrize("place", ["file/artifacts.lock", "folder"])
def test_a_place_where_no_lock_file_can_be_is_told_before_any_work(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=str(tmp_path / place)) as raised:
        check_place(tmp_path / place)
    assert "--lock" in raised.value.hint
