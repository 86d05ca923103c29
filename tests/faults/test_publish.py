"""Publishing under kill -9, full disks, power cuts and rivals (rows 1-5 and 9 of the fault table)."""

import dataclasses
import errno
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from aot.canary import child_environment
from aot.collect import collect
from aot.errors import CorruptArtifact, TrialCrashed, UserError
from aot.store import Store, logger
from tests.support.faults import ERRORS, Disk, FailAt, full_run, intercepted, killed_at, scaled
from tests.support.stores import check_whole, inputs_of, package_bytes, publish
from tests.support.toy import LARGE, SMALL

Action = Callable[[], object]


def fresh(store: Store, package: Path) -> Action:
    return lambda: publish(store, package)


def beside_another(store: Store, package: Path) -> Action:
    publish(store, package, LARGE)
    return lambda: publish(store, package)


def large_package(store: Store, package: Path) -> Action:
    publish(store, package, LARGE)
    package.write_bytes(random.Random(1).randbytes(3 << 20))
    return lambda: publish(store, package)


def over_a_damaged_blob(store: Store, package: Path) -> Action:
    publish(store, package, LARGE)
    package.write_bytes(package_bytes(1))
    store.blob_path(publish(store, package)).write_bytes(b"rot")
    return lambda: publish(store, package)


def over_a_damaged_manifest(store: Store, package: Path) -> Action:
    publish(store, package, LARGE)
    published = publish(store, package)
    store.manifest_path("toy_step", SMALL, published.key).write_bytes(b"{}")
    return lambda: publish(store, package)


def with_a_trial_and_a_signature(store: Store, package: Path) -> Action:
    other = publish(store, package, LARGE)
    inputs = inputs_of(SMALL)
    manifest = dataclasses.replace(other, key_inputs=inputs, key=inputs.key())
    content, blob = package.read_bytes(), store.blob_path(other).read_bytes()
    return lambda: store._add(manifest, content, blob, lambda path: None, {".sig": b"signature"})


def over_a_damaged_remote_artifact(store: Store, package: Path) -> Action:
    publish(store, package, LARGE)
    package.write_bytes(package_bytes(1))
    manifest = publish(store, package)
    path, blob = store.manifest_path("toy_step", SMALL, manifest.key), store.blob_path(manifest)
    beside = {".origin": b"a remote", ".sig": b"signature"}
    for suffix, data in beside.items():
        path.with_suffix(suffix).write_bytes(data)
    content, good = package.read_bytes(), blob.read_bytes()
    blob.write_bytes(b"rot")
    return lambda: store._add(manifest, content, good, None, beside)


def gc(store: Store, package: Path) -> Action:
    kept = publish(store, package, LARGE)
    package.write_bytes(package_bytes(2))
    publish(store, package)
    publish(store, package, inner=32)
    return lambda: collect(store, {kept.key})


SCENARIOS = [
    fresh,
    beside_another,
    large_package,
    over_a_damaged_blob,
    over_a_damaged_manifest,
    with_a_trial_and_a_signature,
    over_a_damaged_remote_artifact,
    gc,
]
# What must lie beside an artifact of SMALL whenever it is visible.
MARKS = {with_a_trial_and_a_signature: ".sig", over_a_damaged_remote_artifact: ".origin"}


def visible(store: Store) -> dict[str, str]:
    """Every artifact that a reader sees, by key: "whole", or "damaged" if it is refused."""
    found = {}
    for path in store.manifest_paths():
        try:
            store.read_package(store.read_manifest(path))
            found[path.stem] = "whole"
        except CorruptArtifact:
            found[path.stem] = "damaged"
    return found


def check_after(store: Store, before: dict[str, str], scenario: Callable) -> None:
    """Nothing new is damaged, nothing whole is lost (but to gc), a mark is there whenever its artifact is."""
    after = visible(store)
    for key, state in after.items():
        assert state == "whole" or before.get(key) == "damaged", "half an artifact is visible"
    lost = {key for key, state in before.items() if state == "whole"} - after.keys()
    kept = inputs_of(LARGE).key()
    assert kept not in lost, "an older artifact was lost"
    assert not lost or scenario is gc
    for path in store.manifest_paths("toy_step", SMALL) if scenario in MARKS else ():
        assert path.with_suffix(MARKS[scenario]).exists(), "what came from a remote reads as built here"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_killed_at_any_operation_nothing_is_half_there_and_nothing_old_is_lost(
    scenario, tmp_path, package, total
):
    """Row 1. Fails when the manifest is linked before the blob, when the blob is written in place (an open
    of its final name in `give_name`), when the marks of a damaged artifact go before its manifest, and, for
    gc, when blobs go before manifests."""
    points = 0
    # Each point of a long run, every third (from a start that moves with the scenario) of a short one.
    step = 1 if full_run() or scenario is over_a_damaged_remote_artifact else 4
    for index in range(SCENARIOS.index(scenario) % step, 400, step):
        store = Store(tmp_path / f"store{index}")
        action = scenario(store, package)
        before = visible(store)
        killed = killed_at(index, action)
        check_after(store, before, scenario)
        action()
        check_whole(store)
        assert list(store.tmp.glob("*")) == [], "the next publisher leaves no dead one's files"
        if not killed:
            break
        points += 1
    else:
        pytest.fail("the action never ran to its end")
    assert points >= 15 / step, "the kill points were not reached"
    total("kill -9 points in publish and gc", points)


def test_a_store_lives_through_a_life_of_kills(tmp_path, package, total):
    """Row 1, kill and reopen: one store, and everything published in it stays. Fails as the one above."""
    store, generator = Store(tmp_path / "store"), random.Random(0)
    rounds = scaled(800, 12)
    published: set[str] = set()
    points = 0
    for number in range(rounds):
        inner = 16 + number % 40
        package.write_bytes(package_bytes(inner))
        points += killed_at(generator.randrange(60), lambda inner=inner: publish(store, package, inner=inner))
        found = visible(store)
        assert set(found.values()) <= {"whole"}
        assert published <= found.keys(), "an older artifact was lost"
        published |= found.keys()
    assert points > rounds / 4
    total("kill -9 points in publish and gc", points)


@pytest.mark.parametrize("code", ERRORS, ids=os.strerror)
@pytest.mark.parametrize("scenario", SCENARIOS[:-1], ids=lambda scenario: scenario.__name__)
def test_an_error_at_any_operation_is_told_and_publishes_nothing(scenario, code, tmp_path, package, total):
    """Row 5. Fails when the unlink in `Store._name` is removed (the folder's fsync fails, the artifact is
    visible) and when `publish` lets the OSError out."""
    failures = 0
    for index in range(0, 400, 1 if full_run() else 3):
        store = Store(tmp_path / f"store{index}")
        action = scenario(store, package)
        before = visible(store)
        fault = FailAt(index, code)
        try:
            with intercepted(fault):
                action()
            told = False
        except UserError:
            told = True
        if fault.failed is None:
            break
        failures += 1
        check_after(store, before, scenario)
        new = {key for key, state in visible(store).items() if state == "whole"} - before.keys()
        assert not (told and new), f"{fault.failed} failed and was told, the artifact is there"
        assert told or inputs_of().key() in visible(store), f"{fault.failed} failed, nobody was told"
        assert list(store.tmp.glob("*/package.pt2")) == [] or fault.failed in ("unlink", "rmdir", "open")
        action()
        check_whole(store)
    assert failures > 8
    total("errors (ENOSPC, EIO, EMFILE) in publish", failures)


def on_tmpfs(folder: Path, options: str) -> str:
    """A shell line that mounts a tmpfs in a name space of its own; skips where that is not allowed."""
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("mounting needs root")
    folder.mkdir(exist_ok=True)
    return f"mount -t tmpfs -o {options} tmpfs '{folder}'"


def test_short_writes_are_continued(store, package):
    """Row 5: a write may take fewer bytes than it was given. Fails when `write_synced` ignores the number."""

    def act(name: str, original: Callable, args: tuple, kwargs: dict) -> object:
        if name == "write":
            return original(args[0], args[1][: max(1, len(args[1]) // 2)])
        return original(*args, **kwargs)

    with intercepted(act):
        manifest = publish(store, package)
    assert store.read_package(manifest) == package_bytes()


PUBLISH = """
import sys
from pathlib import Path
from aot.errors import UserError
from aot.store import Store
from tests.support.stores import check_whole, publish
from tests.support.toy import LARGE
store, small, large = Store(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
publish(store, small, LARGE)
try:
    publish(store, large)
    print("published")
except UserError as error:
    print(f"error: {error.message}")
assert len(check_whole(store)) == 1
assert not list(store.tmp.glob("*"))
publish(store, small)
print(len(check_whole(store)))
"""


def test_a_disk_that_is_really_full_is_told_and_leaves_room(tmp_path, package):
    """Row 5 without a double: a tmpfs of 1 MiB. Fails when `_private_folder` leaves its folder: then there is
    no room for the smaller package."""
    large = tmp_path / "large"
    large.write_bytes(random.Random(0).randbytes(2 << 20))
    mount = on_tmpfs(tmp_path / "disk", "size=1m")
    command = f"{mount} && '{sys.executable}' -c \"$0\" '{tmp_path}/disk/store' '{package}' '{large}'"
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, PUBLISH],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    told, number = result.stdout.splitlines()
    assert told.startswith("error: cannot publish toy_step 128x8")
    assert told.endswith("No space left on device")
    assert number == "2"


def test_a_rival_that_meets_an_error_sweeps_nobody_away(store, package, total):
    """Row 5, while another publisher is at its trial. Fails when `_is_held` takes an error (no descriptor is
    left) for a dead publisher, or does not try the lock."""
    failures = 0

    def trial(path: Path) -> None:
        nonlocal failures
        for index in range(100):
            fault = FailAt(index, errno.EMFILE)
            with suppress(UserError), intercepted(fault):
                publish(store, package, inner=99)
            assert path.exists(), f"a rival's failed {fault.failed} removed the folder of a living publisher"
            if fault.failed is None:
                break
            failures += 1

    publish(store, package, trial=trial)
    assert len(check_whole(store)) == 2
    assert failures > 15
    total("errors (ENOSPC, EIO, EMFILE) in publish", failures)


@pytest.mark.parametrize("scenario", SCENARIOS[1:-1], ids=lambda scenario: scenario.__name__)
def test_after_a_power_cut_at_any_operation_what_is_visible_is_whole(scenario, tmp_path, package, total):
    """Row 2. Unsynced content is lost or zero, unsynced names are there or not. Fails when the fsync of
    `write_synced` is removed, and (the last assertion) when that of `give_name` or `make_folders` is."""
    store = Store(tmp_path / "store")
    action = scenario(store, package)
    disk = Disk(store.root)
    disk.load()
    before = visible(store)
    cuts = 0

    def cut() -> None:
        nonlocal cuts
        for names_lost, zeroed in ((False, False), (False, True), (True, False)):
            left = Store(tmp_path / f"cut{cuts}")
            disk.after_power_cut(left.root, names_lost, zeroed)
            check_after(left, before, scenario)
            cuts += 1

    disk.on_change = cut
    with intercepted(disk):
        action()
    last = Store(tmp_path / f"cut{cuts - 1}")
    assert visible(last)[inputs_of().key()] == "whole", "what was reported as published did not last"
    assert cuts > 40
    total("power cuts in publish", cuts)


def publish_at_barrier(root: Path, folder: Path, rounds: int, number: int, barrier) -> None:
    package = folder / f"{number}.pt2"
    for index in range(rounds):
        # Each builder's package is another: the first wins.
        package.write_bytes(package_bytes(number))
        barrier.wait(120)
        winner = publish(Store(root), package, inner=16 + index)
        Store(root).read_package(winner)


def test_racing_publishers_leave_one_artifact_per_key(tmp_path, total):
    """Row 3: 16 processes publish 50 keys, each another package. Fails without the flock of `Store.locked`
    (several winners of one key: a manifest over another's), and a reader during it never sees a half (row 9).
    """
    processes, rounds = (16, 50) if full_run() else (6, 6)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes)
    arguments = (tmp_path / "store", tmp_path, rounds)
    workers = [
        context.Process(target=publish_at_barrier, args=(*arguments, number, barrier))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    store = Store(tmp_path / "store")
    first: dict[str, object] = {}
    while any(worker.is_alive() for worker in workers):
        for manifest in check_whole(store):
            assert first.setdefault(manifest.key, manifest) == manifest, "a winner was replaced"
    assert [worker.exitcode for worker in workers] == [0] * processes
    assert len(check_whole(store)) == rounds
    assert list(store.tmp.glob("*")) == []
    total("racing publishes", processes * rounds)


def test_another_build_of_a_key_that_is_there_is_logged(store, package, monkeypatch):
    """Row 3: fails when the warning in `Store._name` is removed."""
    messages: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: messages.append(text % args))
    publish(store, package)
    assert messages == []
    package.write_bytes(package_bytes(7))
    publish(store, package)
    assert messages == [f"{store.manifests()[0]} is there already; this build of it has other bytes"]


def test_a_new_artifact_inherits_no_origin_and_no_signature(store, package):
    """Fails without the unlinking in `Store._name` and `Store.quarantine`: a build of one's own would count
    as one that came from elsewhere."""
    manifest = publish(store, package)
    path = store.manifest_path("toy_step", SMALL, manifest.key)
    path.with_suffix(".origin").write_bytes(b"elsewhere")
    store.quarantine(manifest, "crashed")
    assert list(path.parent.iterdir()) == []
    path.with_suffix(".origin").write_bytes(b"left by a killed gc")
    publish(store, package)
    assert list(path.parent.iterdir()) == [path]


def test_the_same_process_id_on_two_hosts_is_no_collision(store, package, monkeypatch):
    """Row 9: two publishers of one process id work at once. Fails when the private folder is named by it
    (the second finds the name taken)."""
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    inside = threading.Barrier(2, timeout=30)
    errors: list[BaseException] = []

    def work(inner: int) -> None:
        try:
            publish(store, package, inner=inner, trial=lambda path: (inside.wait(), None)[1])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(inner,)) for inner in (16, 32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(check_whole(store)) == 2


def test_a_lister_ignores_what_is_not_an_artifact(store, package):
    """Row 9: fails when `manifest_paths` globs more than `*.json`."""
    published = publish(store, package)
    folder = store.manifest_path("toy_step", SMALL, published.key).parent
    for name in ("tmpabc", f"{published.key}.sig", f"{published.key}.origin", ".nfs0001"):
        (folder / name).write_bytes(b"x")
    assert store.manifests() == [published]


def crashing(path: Path) -> None:
    raise TrialCrashed("toy_step 128x8: its trial run in a child process was killed by SIGSEGV", None, "toy")


def failing(path: Path) -> None:
    raise CorruptArtifact("no")


def test_what_is_tried_is_what_is_published(store, package):
    """Row 22 at build time: the file is swapped during the trial, and the tried bytes are published. Fails
    when `publish` reads the package again after its trial."""
    content = package.read_bytes()
    tried = []

    def trial(path: Path) -> None:
        tried.append(path.read_bytes())
        assert store.manifests() == [], "nothing is visible before its trial"
        assert path.parent.stat().st_mode & 0o777 == 0o700
        package.write_bytes(b"swapped")

    manifest = publish(store, package, trial=trial)
    assert tried == [content] == [store.read_package(manifest)]


@pytest.mark.parametrize(("trial", "aside"), [(crashing, 1), (failing, 0)])
def test_a_package_that_fails_its_trial_is_not_published_and_one_that_crashes_is_put_aside(
    store, package, trial, aside
):
    """Row 27 at build time: fails without `_put_aside` in `Store._try`, or when any failure is a crash."""
    with pytest.raises(CorruptArtifact):
        publish(store, package, trial=trial)
    assert store.manifests() == []
    kept = list(store.quarantine_root.glob("*.pt2"))
    assert [path.read_bytes() for path in kept] == [package_bytes()] * aside
    assert all("SIGSEGV" in path.with_suffix(".reason").read_text() for path in kept)
    assert list(store.tmp.glob("*")) == []
    # A failure is never remembered as a fact.
    publish(store, package)
    assert len(check_whole(store)) == 1
