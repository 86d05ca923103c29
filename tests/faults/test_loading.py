"""Loading in hostile surroundings (rows 6, 8, 22-29 of the fault table)."""

import dataclasses
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aot import runtime
from aot.canary import child_environment
from aot.collect import collect
from aot.compile import build
from aot.errors import MissingArtifact, StaleArtifact, TrialCrashed, UserError
from aot.fingerprint import Fingerprint
from aot.runtime import Fingerprints, PreparedArtifact, prepare, resolve
from aot.store import Store
from tests.support.faults import scaled
from tests.support.stores import package_bytes, publish
from tests.support.toy import LARGE, SMALL, ToyStep, requests, toy_step

CPU = torch.device("cpu")
NEED = [(ToyStep(), SMALL)]
TENSORS = ToyStep().example_inputs(SMALL, 0, CPU)
INPUTS = dict(zip(ToyStep().call_spec(SMALL).input_names, TENSORS, strict=True))


def prepared(store: Store, folder: Path) -> PreparedArtifact:
    return prepare(store, NEED, folder=folder)["toy_step", SMALL]


def answers_right(outputs: dict[str, torch.Tensor]) -> bool:
    expected = toy_step(*TENSORS)
    return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(outputs.values(), expected, strict=True))


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "try_packages", lambda trials, **_: None)


def mounted_read_only(store: Store, code: str, *arguments: object) -> str:
    """Run Python in a name space of its own where the store is mounted read-only; return its output."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    root = f"'{store.root}'"
    mount = f"mount --bind {root} {root} && mount -o remount,ro,bind {root}"
    words = " ".join(f"'{argument}'" for argument in arguments)
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && '{sys.executable}' -c \"$0\" {root} {words}", code],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


ON_A_READ_ONLY_STORE = """
import sys
from pathlib import Path
import torch
from aot.compile import build
from aot.errors import UserError
from aot.runtime import prepare
from aot.store import Store
from tests.support.toy import SMALL, ToyStep, requests
store = Store(sys.argv[1])
artifact = prepare(store, [(ToyStep(), SMALL)], folder=Path(sys.argv[2]))["toy_step", SMALL]
artifact.load(torch.device("cpu"))
print("loaded", build(requests(SMALL), store)[0].cached)
try:
    build(requests(SMALL, overrides=["inner=24"]), store)
except UserError as error:
    print(error.message, error.hint, sep="\\n")
print(store.quarantine(artifact.manifest, "a crash"))
"""


def test_a_read_only_store_can_be_loaded_from_and_a_build_says_why_not(
    own_store: Store, tmp_path: Path
) -> None:
    """Row 6. Fails when a reader writes (a lock of its own), or without `require_writable`: then the worker
    fails on its folder."""
    (tmp_path / "private").mkdir()
    output = mounted_read_only(own_store, ON_A_READ_ONLY_STORE, tmp_path / "private").splitlines()
    assert output[0] == "loaded True"
    assert output[1] == f"nothing can be published in '{own_store.root}': read-only file system"
    assert output[2].startswith("name a store you can write")
    assert output[3] == "None"


def test_removing_an_artifact_disturbs_nobody_who_runs_it(
    own_store: Store, tmp_path: Path, no_trial: None
) -> None:
    """Row 8. Fails when gc truncates files before it unlinks them and the loaded code is the store's file."""
    loaded = prepared(own_store, tmp_path / "private").load(CPU)
    assert answers_right(loaded(INPUTS))
    collect(own_store, set())
    assert own_store.manifests() == []
    assert all(answers_right(loaded(INPUTS)) for _ in range(scaled(1000, 20)))
    with pytest.raises(MissingArtifact):
        prepared(own_store, tmp_path / "private")


def test_what_is_loaded_are_the_bytes_that_were_verified(
    own_store: Store, tmp_path: Path, no_trial: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 22: the blob is swapped right after its verification. Fails when the private copy is made by
    reading the store a second time."""
    (manifest,) = own_store.manifests("toy_step", SMALL)
    check = runtime.check_archive

    def swapping(package: bytes, name: str) -> None:
        check(package, name)
        own_store.blob_path(manifest).write_bytes(b"swapped")

    monkeypatch.setattr(runtime, "check_archive", swapping)
    artifact = prepared(own_store, tmp_path / "private")
    assert hashlib.sha256(artifact.path.read_bytes()).hexdigest() == manifest.package_digest
    assert answers_right(artifact.load(CPU)(INPUTS))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Fingerprint)])
def test_an_artifact_of_another_machine_is_refused_by_the_field_that_differs(
    toy_store: Store, field: str
) -> None:
    """Row 23. Fails for each field that `Fingerprint.differences` leaves out without a reason."""
    here = Fingerprints()("cpu")
    other = dataclasses.replace(here, **{field: "9.9 another"})
    if field in Fingerprint.EXCLUDED_FROM_KEY or field in Fingerprint.BUILD_ONLY:
        assert resolve(toy_store, *NEED[0], other)
        return
    with pytest.raises(StaleArtifact, match=f"fingerprint.{field}: expected "):
        resolve(toy_store, *NEED[0], other)


def test_without_any_program_on_the_path_artifacts_load_and_a_build_says_what_to_install(
    toy_store: Store, tmp_path: Path
) -> None:
    """Row 25. Fails when a compiler is looked for while loading, or when `compiler_version` shrugs."""
    code = (
        "import sys, time; from pathlib import Path; import torch\n"
        "from aot.compile import build; from aot.errors import EnvironmentFault\n"
        "from aot.runtime import prepare; from aot.store import Store\n"
        "from tests.support.toy import SMALL, ToyStep, requests\n"
        "store = Store(sys.argv[1])\n"
        "prepare(store, [(ToyStep(), SMALL)], folder=Path(sys.argv[2]))['toy_step', SMALL]"
        ".load(torch.device('cpu'))\n"
        "print('loaded'); started = time.monotonic()\n"
        "try: build(requests(SMALL, overrides=['inner=24']), store)\n"
        "except EnvironmentFault as error: print(error.message, error.hint, time.monotonic() - started < 1)\n"
    )
    environment = {**child_environment(), "PATH": "/nonexistent"}
    environment.pop("CXX", None)
    result = subprocess.run(
        [sys.executable, "-c", code, str(toy_store.root), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded, told = result.stdout.splitlines()
    assert loaded == "loaded"
    assert "no working C++ compiler" in told
    assert "apt-get install g++" in told
    assert told.endswith("True")


LOAD_IN_TMPDIR = """
import sys
from pathlib import Path
import torch
from aot.errors import UserError
from aot.runtime import prepare
from aot.store import Store
from tests.support.toy import SMALL, ToyStep
try:
    artifact = prepare(Store(sys.argv[1]), [(ToyStep(), SMALL)], folder=Path(sys.argv[2]))["toy_step", SMALL]
    artifact.load(torch.device("cpu"))
    print("loaded")
except UserError as error:
    print("error:", error.message, error.hint)
except OSError as error:
    print("error:", error.strerror, error.filename)
"""


@pytest.mark.parametrize(
    ("options", "needed"),
    [("noexec", ("failed to map segment", "noexec", "dlopen")), ("size=64k", ("space", "write", "extract"))],
)
def test_a_temporary_folder_that_is_no_good_is_told(
    toy_store: Store, tmp_path: Path, options: str, needed: tuple[str, ...]
) -> None:
    """Row 26: the loader unpacks into the private folder, by default in TMPDIR. A double-free of torch, or a
    silence, would fail this."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    folder, private = tmp_path / "tmp", tmp_path / "private"
    folder.mkdir()
    private.mkdir(mode=0o700)
    run = f"'{sys.executable}' -c \"$0\" '{toy_store.root}' '{private}'"
    mount = f"mount -t tmpfs -o {options},mode=0700 tmpfs '{private}'"
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {run}", LOAD_IN_TMPDIR],
        env={**child_environment(), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("error: ")
    assert any(word in result.stdout.lower() for word in needed), result.stdout


def with_broken_library(store: Store, tmp_path: Path, breaks: Callable[[bytes], bytes]) -> None:
    """Replace the artifact of SMALL by one with a broken library that the store vouches for."""
    (manifest,) = store.manifests("toy_step", SMALL)
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(store.read_package(manifest))) as old,
        zipfile.ZipFile(buffer, "w") as new,
    ):
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info, breaks(content) if info.filename.endswith(".so") else content)
    store.manifest_path("toy_step", SMALL, manifest.key).unlink()
    package = tmp_path / "broken.pt2"
    package.write_bytes(buffer.getvalue())
    store.publish(package, manifest.key_inputs, manifest.graph_hash, {})


def trapped(library: bytes) -> bytes:
    """Replace the code of the library by traps: dlopen's constructors run into them."""
    machine_code = b"\x0f\x0b" * (len(library) // 4)
    start = len(library) // 4
    return library[:start] + machine_code + library[start + len(machine_code) :]


def test_an_artifact_that_crashes_is_refused_and_put_into_quarantine(
    own_store: Store, tmp_path: Path
) -> None:
    """Row 27. Fails without the child (this process dies), and without `_quarantined`: then a build finds the
    artifact intact, and nothing ever mends it."""
    with_broken_library(own_store, tmp_path, trapped)
    with pytest.raises(TrialCrashed, match="killed by SIG") as caught:
        prepared(own_store, tmp_path / "private")
    (aside,) = own_store.quarantine_root.glob("*.json")
    assert str(aside) in caught.value.message
    assert "killed by SIG" in aside.with_suffix(".reason").read_text()
    assert own_store.manifests("toy_step", SMALL) == []
    with pytest.raises(MissingArtifact):
        prepared(own_store, tmp_path / "private")


def test_a_new_artifact_under_an_old_name_is_new_code_in_a_live_process(
    own_store: Store, tmp_path: Path, no_trial: None
) -> None:
    """Row 28: dlopen keeps one library per path for ever. Fails when the private copy is named by the key."""
    private = tmp_path / "private"
    old = prepared(own_store, private)
    loaded = old.load(CPU)
    before = loaded(INPUTS)["loss"].item()
    (manifest,) = own_store.manifests("toy_step", SMALL)
    (other,) = own_store.manifests("toy_step", LARGE)
    package = tmp_path / "other.pt2"
    package.write_bytes(own_store.read_package(other))
    own_store.manifest_path("toy_step", SMALL, manifest.key).unlink()
    own_store.publish(package, manifest.key_inputs, manifest.graph_hash, {})
    new = prepared(own_store, private)
    assert new.path != old.path
    # The package of the other bucket refuses this bucket's shapes: it is the new code that runs.
    with pytest.raises(RuntimeError):
        new.load(CPU)(INPUTS)
    assert loaded(INPUTS)["loss"].item() == before


@pytest.mark.parametrize("year", [1970, 2100])
def test_no_time_stamp_decides_anything(store: Store, package: Path, year: int) -> None:
    """Row 29: clocks are wrong. Fails when publishing, reading, sweeping or gc looks at an age."""
    manifest = publish(store, package)
    kept = publish(store, package, LARGE)
    stale = store.tmp / ("f" * 32)
    stale.mkdir(parents=True)
    seconds = (year - 1970) * 365.25 * 86_400
    for path in [store.root, *store.root.rglob("*")]:
        os.utime(path, (seconds, seconds))
    assert store.read_package(manifest) == package_bytes()
    assert publish(store, package) == manifest
    assert list(store.tmp.glob("*")) == []
    collect(store, {kept.key})
    assert store.manifests() == [kept]


def test_a_build_of_a_store_that_cannot_be_written_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 6 without a mount: fails without `require_writable` in `build`."""
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a worker was started"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="nothing can be published"):
        build(requests(SMALL), Store(tmp_path / "file" / "store"))


@pytest.mark.parametrize("length", [0, 1, 1000, 100_000])
def test_a_truncated_library_that_the_store_vouches_for_ends_the_child_alone(
    own_store: Store, tmp_path: Path, length: int
) -> None:
    """Rows 10 and 27 with every check of bytes passed. Fails when a package is loaded here untried."""
    with_broken_library(own_store, tmp_path, lambda library: library[:length])
    with pytest.raises(UserError, match="toy_step 128x8"):
        prepared(own_store, tmp_path / "private")
