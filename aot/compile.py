"""Build artifacts: one worker process per build, each alone in a folder named by its key.

Processes, because tracing is not thread-safe. A folder per key, emptied first and always at the same path,
because a package's bytes depend on the path it is compiled in. A worker traces, hashes the graph, compiles,
takes the machine's paths out of the package and publishes it, which has a child process try it first; the
parent only schedules.

    build(requests) -> workers `python -m aot.compile` (request on stdin) -> store
    check(requests) -> the same workers, twice each                       -> which bytes differ
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aot.archive import MODEL_NAME
from aot.buckets import Bucket
from aot.canary import Trial, child_environment, try_packages
from aot.errors import ConfigError, EnvironmentFault, UserError
from aot.fingerprint import Fingerprint, compiler_version
from aot.package import canonical_package, differing_members, machine_paths
from aot.policy import Policy, check_trust
from aot.store import Store
from aot.target import Target
from aot.trace import key_inputs, trace

if TYPE_CHECKING:
    from aot.manifest import KeyInputs, Manifest
    from aot.program import Program

# A CPU package is tried with fewer, as many and more threads than it was built for.
CANARY_THREADS = (1, 2, 8)
# Variables that change what Inductor generates: a package depends on its key's compile options alone.
INDUCTOR_VARIABLES = ("TORCHINDUCTOR_", "AOT_INDUCTOR_", "TORCH_COMPILE_", "ATEN_CPU_CAPABILITY")
# Sets are walked in one order; kernels carry no line tables, which name source files.
DETERMINISTIC_VARIABLES = {"PYTHONHASHSEED": "0", "TRITON_DISABLE_LINE_INFO": "1"}
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 12


class BuildFailed(UserError):
    """A worker could not build its artifact."""


@dataclass(frozen=True)
class BuildRequest:
    """One artifact to build: a factory `module:function`, its arguments, and its program and bucket.

    `target` names the CPUs it is for, e.g. `cpu:x86-64-v3`; empty: this machine and richer ones.
    """

    factory: str
    run_file: str
    overrides: tuple[str, ...]
    program: str
    bucket: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.program} {self.bucket}"


@dataclass(frozen=True)
class BuildResult:
    """`cached`: the store, or a remote, had it and every byte is good; nothing was compiled."""

    request: BuildRequest
    manifest: Manifest
    seconds: float
    cached: bool


@dataclass(frozen=True)
class CheckResult:
    """Two builds of one request in clean processes: the members of the package that differ, if any."""

    request: BuildRequest
    differing: tuple[str, ...]


@dataclass(frozen=True)
class BuildEvent:
    """For progress: `seconds` is the build's own time so far, `detail` what went wrong."""

    kind: Literal["cached", "pulled", "started", "finished", "failed"]
    request: BuildRequest
    seconds: float = 0.0
    detail: str = ""


Progress = Callable[[BuildEvent], None]


def load_program(request: BuildRequest) -> Program:
    """Make the program that a request names. Raises ConfigError if its factory or the program is unknown."""
    for program in _programs(request.factory, request.run_file, request.overrides):
        if program.name == request.program:
            return program
    raise ConfigError(f"'{request.factory}' has no program '{request.program}' for run '{request.run_file}'")


def build(
    requests: Sequence[BuildRequest],
    store: Store,
    jobs: int = 1,
    build_root: Path | None = None,
    progress: Progress | None = None,
    lookup: Callable[[KeyInputs], Manifest | None] | None = None,
) -> list[BuildResult]:
    """Build what the store lacks, `jobs` workers at a time, and return one result per request, in order.

    `build_root` (default: `build` inside the store) must stay the same for builds to be reproducible.
    `lookup` may bring an artifact into the store instead of a build (`aot.remote.lookup`).
    Raises EnvironmentFault at once without a C++ compiler, UntrustedArtifact for one from a remote that no
    run would take, BuildFailed after the other builds have ended; an exception, Ctrl-C included, kills all
    workers.
    """
    compiler_version()
    report = progress or (lambda event: None)
    root = build_root or store.root / "build"
    results: dict[BuildRequest, BuildResult] = {}
    waiting: list[_Worker] = []
    for request in dict.fromkeys(requests):
        inputs = _inputs(request)
        manifest = store.intact(inputs.program, inputs.bucket, inputs.key())
        if manifest is not None:
            # What was built here may be signed later; what a remote brought must be trusted already.
            check_trust(store, manifest, Policy("local"))
            results[request] = BuildResult(request, manifest, 0.0, cached=True)
            report(BuildEvent("cached", request))
        elif lookup is not None and (manifest := lookup(inputs)) is not None:
            results[request] = BuildResult(request, manifest, 0.0, cached=True)
            report(BuildEvent("pulled", request))
        else:
            waiting.append(_Worker(request, inputs, store, root))
    if waiting:
        store.require_writable()
    for worker in _run_all(waiting, jobs, report):
        results[worker.request] = worker.published()
    return [results[request] for request in requests]


def check(
    requests: Sequence[BuildRequest],
    store: Store,
    jobs: int = 1,
    build_root: Path | None = None,
    progress: Progress | None = None,
) -> list[CheckResult]:
    """Build every request twice, each time in a new process and an emptied folder, and compare the packages.

    Nothing is published; the store only lends its `build` folder. Raises as `build` does.
    """
    compiler_version()
    report = progress or (lambda event: None)
    root = build_root or store.root / "build"
    packages: dict[BuildRequest, list[bytes]] = {}
    inputs = {request: _inputs(request) for request in requests}
    store.require_writable()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="check-", dir=root) as outputs:
        for _ in range(2):
            workers = [
                _Worker(request, wanted, store, root, Path(outputs, f"{wanted.key()}.pt2"))
                for request, wanted in inputs.items()
            ]
            for worker in _run_all(workers, jobs, report):
                assert worker.output is not None
                packages.setdefault(worker.request, []).append(worker.output.read_bytes())
    return [CheckResult(request, tuple(differing_members(*packages[request]))) for request in requests]


def _run_all(workers: list[_Worker], jobs: int, report: Progress) -> list[_Worker]:
    """Run workers, `jobs` at a time. Raises BuildFailed if any failed, after the others have ended."""
    waiting, failures, done = list(workers), [], []
    with _killed_on_exit([]) as running:
        while waiting or running:
            while waiting and len(running) < jobs:
                worker = waiting.pop(0)
                worker.start()
                running.append(worker)
                report(BuildEvent("started", worker.request))
            for worker in [worker for worker in running if worker.ended()]:
                running.remove(worker)
                try:
                    worker.check_ended_well()
                except BuildFailed as failure:
                    failures.append(failure)
                    report(BuildEvent("failed", worker.request, worker.seconds, failure.message))
                else:
                    done.append(worker)
                    report(BuildEvent("finished", worker.request, worker.seconds))
            if running:
                time.sleep(POLL_SECONDS)
    if failures:
        raise BuildFailed("\n".join(failure.message for failure in failures), failures[0].hint)
    return done


class _Worker:
    """One build process, leader of its own process group, so that its compilers end with it."""

    def __init__(
        self,
        request: BuildRequest,
        inputs: KeyInputs,
        store: Store,
        build_root: Path,
        output: Path | None = None,
    ):
        """With `output`, the package goes into that file and is not published."""
        self.request, self.inputs, self.key, self.store = request, inputs, inputs.key(), store
        self.output = output
        self.seconds = 0.0
        self.folder = build_root / self.key
        # Not the key's alone: another process may be building it, too.
        self.log = build_root / f"{self.key}.{uuid.uuid4().hex}.log"

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        scratch = {
            "TMPDIR": str(self.folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            **DETERMINISTIC_VARIABLES,
        }
        kept = {k: v for k, v in child_environment().items() if not k.startswith(INDUCTOR_VARIABLES)}
        job = {
            **asdict(self.request),
            "store": str(self.store.root),
            "folder": str(self.folder),
            "key": self.key,
            "output": str(self.output) if self.output else None,
        }
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aot.compile"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**kept, **scratch},
                start_new_session=True,
            )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(json.dumps(job).encode())

    def ended(self) -> bool:
        self.seconds = time.monotonic() - self.started
        return self.process.poll() is not None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def published(self) -> BuildResult:
        manifest = self.store.find(self.inputs.program, self.inputs.bucket, self.key)
        assert manifest is not None, "a worker that ends well has published"
        return BuildResult(self.request, manifest, self.seconds, cached=False)

    def check_ended_well(self) -> None:
        if self.process.returncode == 0:
            self.log.unlink(missing_ok=True)
            return
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        tail = self.log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
        log = self.log.replace(self.folder.with_suffix(".log"))
        raise BuildFailed(
            f"building {self.request} failed ({how}):\n" + "\n".join(f"  {line}" for line in tail),
            f"the whole log: {log}",
        )


@contextmanager
def _killed_on_exit(workers: list[_Worker]) -> Iterator[list[_Worker]]:
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()


@functools.lru_cache(maxsize=8)
def _programs(factory: str, run_file: str, overrides: tuple[str, ...]) -> tuple[Program, ...]:
    module, _, function = factory.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"program factory '{factory}' cannot be imported: {error}") from error
    return make(run_file, overrides).programs


def _inputs(request: BuildRequest) -> KeyInputs:
    program = load_program(request)
    fingerprint = _fingerprint(program.device_type)
    if program.device_type == "cuda" and fingerprint.libstdcxx == "static":
        raise EnvironmentFault(
            "the C++ compiler links libstdc++ statically: every CUDA package it builds crashes when loaded",
            "`export CXX=/usr/bin/g++`; `dflash-aot doctor` tests it",
        )
    target = Target.parse(request.target) if request.target else None
    return key_inputs(program, Bucket.parse(request.bucket), fingerprint, target)


@functools.cache
def _fingerprint(device_type: str) -> Fingerprint:
    return Fingerprint.probe(device_type, with_compiler=True)


@contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Hold and empty a build folder, removed after a good build; a second build of one key waits here."""
    with _locked(folder.with_name(f"{folder.name}.lock")):
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("tmp", "inductor", "triton"):
            (folder / name).mkdir(parents=True)
        yield
        shutil.rmtree(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build_one(
    request: BuildRequest, store: Store, folder: Path, key: str, output: Path | None
) -> Manifest | None:
    """Build one artifact in this process, whose TMPDIR and caches lie in `folder`; publish it, or write the
    package to `output`.
    """
    inputs = _inputs(request)
    assert inputs.key() == key, "the worker and its parent describe the same build"
    if output is None and (found := store.intact(inputs.program, inputs.bucket, key)) is not None:
        return found
    from torch._inductor import aoti_compile_and_package

    from aot.graph import graph_hash

    program = load_program(request)
    started = time.monotonic()
    exported = trace(program, inputs.bucket)
    traced = time.monotonic()
    package = folder / f"{MODEL_NAME}.pt2"
    aoti_compile_and_package(
        exported, package_path=str(package), inductor_configs=dict(inputs.compile_options)
    )
    compiled = time.monotonic()
    paths = machine_paths(folder, store.root)
    package.write_bytes(canonical_package(package.read_bytes(), paths))
    if output is not None:
        package.replace(output)
        return None
    record = {
        "nodes": str(len(exported.graph.nodes)),
        "python": inputs.fingerprint.python,
        "trace_seconds": f"{traced - started:.1f}",
        "compile_seconds": f"{compiled - traced:.1f}",
        **{name.lower(): value for name, value in DETERMINISTIC_VARIABLES.items()},
    }
    return store.publish(
        package,
        inputs,
        graph_hash(exported),
        record,
        trial=lambda path: _try_package(path, inputs, folder.parent / "gpu.lock"),
    )


def _try_package(package: Path, inputs: KeyInputs, gpu_lock: Path) -> None:
    """Try a package. One for a GPU takes a whole step's memory there: only one at a time."""
    spec = inputs.call_spec
    trial = Trial(f"{inputs.program} {inputs.bucket}", str(package), spec, spec.device_type)
    if spec.device_type == "cuda":
        with _locked(gpu_lock):
            try_packages([trial])
        return
    for threads in CANARY_THREADS:
        try_packages([trial], {"OMP_NUM_THREADS": str(threads)})


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Read one job from stdin and build it; the parent keeps the output as a log."""
    _die_with_parent()
    job = json.load(sys.stdin)
    folder, store, key = Path(job.pop("folder")), Store(job.pop("store")), job.pop("key")
    output = job.pop("output")
    request = BuildRequest(**{**job, "overrides": tuple(job["overrides"])})
    try:
        with _own_folder(folder):
            _build_one(request, store, folder, key, Path(output) if output else None)
    except UserError as error:
        print(f"error: {error.message}", f"hint: {error.hint}" if error.hint else "", sep="\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
