import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aot import compile as aot_compile
from aot.compile import BuildFailed, BuildRequest, build
from aot.errors import ConfigError, EnvironmentFault, UntrustedArtifact
from aot.fingerprint import Fingerprint, compiler_version
from aot.signing import ORIGIN_SUFFIX, origin_document
from aot.store import Store
from tests.support import broken
from tests.support.stores import inputs_of, publish
from tests.support.toy import FACTORY, LARGE, SMALL, ToyStep, requests, toy_step

# They build in one folder, at the path that the session's artifacts were built at.
pytestmark = pytest.mark.xdist_group("toy-build")


def broken_request(program: str) -> BuildRequest:
    return BuildRequest(broken.FACTORY, "toy", (), program, str(SMALL))


@pytest.fixture
def events():
    return []


@pytest.fixture
def started_processes(monkeypatch):
    processes, popen = [], subprocess.Popen

    def recording(*args, **kwargs):
        processes.append(popen(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(aot_compile.subprocess, "Popen", recording)
    return processes


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("bucket", [SMALL, LARGE], ids=str)
def test_a_built_package_computes_what_the_program_does(toy_store, tmp_path, bucket):
    (manifest,) = toy_store.manifests("toy_step", bucket)
    path = tmp_path / "model.pt2"
    path.write_bytes(toy_store.read_package(manifest))
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    for seed in range(3):
        inputs = ToyStep().example_inputs(bucket, seed, torch.device("cpu"))
        reference = ToyStep().reference(bucket, inputs)
        outputs = loader.run(list(inputs))
        for spec, output, eager, expected in zip(
            ToyStep().call_spec(bucket).outputs, outputs, toy_step(*inputs), reference, strict=True
        ):
            scale = expected.norm()
            assert scale > 0, spec.name
            limit = max(1e-5, 1.5 * ((eager.double() - expected).norm() / scale).item())
            assert ((output.double() - expected).norm() / scale).item() <= limit, spec.name


def test_a_second_build_starts_no_process_and_answers_at_once(toy_store, events, started_processes):
    started = time.monotonic()
    results = build(requests(SMALL, LARGE), toy_store, progress=events.append)
    assert time.monotonic() - started < 5
    assert [(event.kind, event.request.bucket) for event in events] == [
        ("cached", str(SMALL)),
        ("cached", str(LARGE)),
    ]
    assert all(result.cached for result in results)
    assert started_processes == []


def test_a_build_leaves_only_the_artifact_and_no_scratch(toy_store):
    assert [path.suffix for path in (toy_store.root / "build").iterdir()] == [".lock", ".lock"]


def test_a_damaged_artifact_is_built_again_to_the_same_bytes(toy_store, own_store, events, monkeypatch):
    """The first build ran beside another bucket; this one runs alone, in another environment."""
    (manifest,) = own_store.manifests("toy_step", SMALL)
    own_store.blob_path(manifest).write_bytes(b"rot")
    others = {"PYTHONHASHSEED": "3", "OMP_NUM_THREADS": "3", "ATEN_CPU_CAPABILITY": "default"}
    for name, value in {**others, "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0"}.items():
        monkeypatch.setenv(name, value)
    (result,) = build(requests(SMALL), own_store, build_root=toy_store.root / "build", progress=events.append)
    assert [event.kind for event in events] == ["started", "finished"]
    assert events[-1].seconds > 0
    assert result.manifest.package_digest == manifest.package_digest
    assert result.manifest.graph_hash == manifest.graph_hash
    assert len(own_store.read_package(result.manifest)) == manifest.package_size


def test_failed_builds_publish_nothing_and_say_why(tmp_path, events):
    store = Store(tmp_path / "store")
    with pytest.raises(BuildFailed) as caught:
        build(
            [broken_request("wrong_spec"), broken_request("crashes")],
            store,
            jobs=2,
            progress=events.append,
        )
    assert "output 'loss' is float32[] with strides [], declared float64[]" in caught.value.message
    assert "crashes 128x8: its trial run in a child process was killed by SIG" in caught.value.message
    assert sorted((event.kind, event.request.program) for event in events) == [
        ("failed", "crashes"),
        ("failed", "wrong_spec"),
        ("started", "crashes"),
        ("started", "wrong_spec"),
    ]
    assert store.manifests() == []
    log = Path(caught.value.hint.removeprefix("the whole log: "))
    assert "declared float64[]" in log.read_text() or "trial run" in log.read_text()


def test_two_processes_that_build_one_key_share_no_log(tmp_path):
    """Fails when the log is named by the key alone: the first to end takes the other's away."""
    request, *more = requests(SMALL)
    assert not more
    workers = [aot_compile._Worker(request, inputs_of(), Store(tmp_path), tmp_path) for _ in range(3)]
    for number, worker in enumerate(workers):
        worker.log.write_text(f"log {number}")
        worker.process = SimpleNamespace(returncode=number // 2)
    for worker in workers[:2]:
        worker.check_ended_well()
    with pytest.raises(BuildFailed, match="log 2") as caught:
        workers[2].check_ended_well()
    assert list(tmp_path.iterdir()) == [Path(caught.value.hint.removeprefix("the whole log: "))]


def test_build_refuses_what_is_there_from_a_remote_and_no_run_would_take(tmp_path, events, monkeypatch):
    """Fails without `check_trust` in `build`: it says that the artifact is there, and the lock names it."""
    store, package = Store(tmp_path / "store"), tmp_path / "model.pt2"
    package.write_bytes(b"package")
    manifest = publish(store, package)
    monkeypatch.setattr(aot_compile, "_inputs", lambda request: manifest.key_inputs)
    monkeypatch.setenv("DFLASH_AOT_POLICY", "signed")
    assert build(requests(SMALL), store)[0].cached, "what was built here can be signed later"
    path = store.manifest_path("toy_step", SMALL, manifest.key)
    path.with_suffix(ORIGIN_SUFFIX).write_bytes(origin_document("file:///remote"))
    with pytest.raises(UntrustedArtifact, match="file:///remote: it is not signed"):
        build(requests(SMALL), store, progress=events.append)
    assert events == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_exception_in_the_parent_kills_its_workers(tmp_path, started_processes, kind):
    def interrupt(event):
        raise kind

    with pytest.raises(kind):
        build([broken_request("sleeps")], Store(tmp_path / "store"), progress=interrupt)
    (worker,) = started_processes
    assert worker.returncode == -signal.SIGKILL


def test_a_worker_dies_with_its_killed_parent(tmp_path):
    code = (
        "import subprocess, sys, pathlib\n"
        "from aot.compile import BuildRequest, build\n"
        "from aot.store import Store\n"
        "popen = subprocess.Popen\n"
        "def recording(*args, **kwargs):\n"
        "    process = popen(*args, **kwargs)\n"
        "    if 'aot.compile' in args[0]: print(process.pid, flush=True)\n"
        "    return process\n"
        "subprocess.Popen = recording\n"
        f"build([BuildRequest({broken.FACTORY!r}, 'toy', (), 'sleeps', '128x8')], Store(sys.argv[1]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    deadline = time.monotonic() + 30
    # The worker has taken its folder once it reads its job, after it asked the kernel to die with its parent.
    while not list((tmp_path / "store" / "build").glob("*.lock")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert is_alive(worker)
    parent.kill()
    parent.wait()
    while is_alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_a_compiler_nothing_is_tried(tmp_path, monkeypatch):
    compiler_version.cache_clear()
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    started = time.monotonic()
    with pytest.raises(EnvironmentFault, match="/nonexistent/g"):
        build([BuildRequest("no.such:factory", "toy", (), "toy_step", "128x8")], Store(tmp_path / "store"))
    assert time.monotonic() - started < 1
    assert not (tmp_path / "store").exists()


def test_a_cuda_build_is_refused_where_the_compiler_links_libstdcxx_statically(tmp_path, monkeypatch):
    fields = {field.name: "x" for field in dataclasses.fields(Fingerprint)} | {"libstdcxx": "static"}
    monkeypatch.setattr(aot_compile, "_fingerprint", lambda device_type: Fingerprint(**fields))
    monkeypatch.setattr(aot_compile, "load_program", lambda request: ToyStep(device_type="cuda"))
    with pytest.raises(EnvironmentFault, match="libstdc"):
        build(requests(SMALL), Store(tmp_path / "store"))


@pytest.mark.parametrize(
    ("factory", "program", "message"),
    [
        ("no.such:factory", "toy_step", "no.such:factory"),
        ("tests.support.toy:missing", "toy_step", "missing"),
        (FACTORY, "other_step", "has no program 'other_step'"),
    ],
)
def test_an_unknown_factory_or_program_is_a_config_error(tmp_path, factory, program, message):
    with pytest.raises(ConfigError, match=message):
        build([BuildRequest(factory, "toy", (), program, "128x8")], Store(tmp_path / "store"))


def test_a_build_folder_is_emptied_and_belongs_to_one_build_at_a_time(tmp_path):
    folder = tmp_path / "key"
    folder.mkdir()
    (folder / "junk").write_text("of a killed build")
    probe = (
        "import fcntl, sys\n"
        "try: fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: print('taken')"
    )

    def others_see():
        command = [sys.executable, "-c", probe, f"{folder}.lock"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with aot_compile._own_folder(folder):
        assert not (folder / "junk").exists()
        assert others_see() == "taken"
    assert others_see() == ""
    assert not folder.exists()
