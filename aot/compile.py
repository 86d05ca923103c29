"""Build artifacts: one worker process per build, each alone in a folder named by its key.

Processes, because tracing is not thread-safe. A folder per key, emptied first and always at the same path,
because a package's bytes depend on the path it is compiled in. A worker traces, hashes the graph, compiles,
has a child process try the package, and publishes it; the parent only schedules.

    build(requests) -> workers `python -m aot.compile` (request on stdin) -> store
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
import time
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
from aot.store import Store
from aot.trace import key_inputs, trace

if TYPE_CHECKING:
    from aot.manifest import KeyInputs, Manifest
    from aot.program import Program

# A CPU package is tried with fewer, as many and more threads than it was built for.
CANARY_THREADS = (1, 2, 8)
# Variables that change what Inductor generates: a package depends on its key's compile options alone.
INDUCTOR_VARIABLES = ("TORCHINDUCTOR_", "AOT_INDUCTOR_", "TORCH_COMPILE_", "ATEN_CPU_CAPABILITY")
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 12


class BuildFailed(UserError):
    """A worker could not build its artifact."""


@dataclass(frozen=True)
class BuildRequest:
    """One artifact to build: a factory `module:function`, its arguments, and its program and bucket."""

    factory: str
    run_file: str
    overrides: tuple[str, ...]
    program: str
    bucket: str

    def __str__(self) -> str:
        return f"{self.program} {self.bucket}"


@dataclass(frozen=True)
class BuildResult:
    """`cached`: the store had it and every byte is good, nothing was compiled."""

    request: BuildRequest
    manifest: Manifest
    seconds: float
    cached: bool


@dataclass(frozen=True)
class BuildEvent:
    """For progress: `seconds` is the build's own time so far, `detail` what went wrong."""

    kind: Literal["cached", "started", "finished", "failed"]
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
) -> list[BuildResult]:
    """Build what the store lacks, `jobs` workers at a time, and return one result per request, in order.

    `build_root` (default: `build` inside the store) must stay the same for builds to be reproducible.
    Raises EnvironmentFault at once without a C++ compiler, BuildFailed after the other builds have ended;
    an exception, Ctrl-C included, kills all workers.
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
            results[request] = BuildResult(request, manifest, 0.0, cached=True)
            report(BuildEvent("cached", request))
        else:
            waiting.append(_Worker(request, inputs, store, root))
    failures = []
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
                    result = worker.result()
                except BuildFailed as failure:
                    failures.append(failure)
                    report(BuildEvent("failed", worker.request, worker.seconds, failure.message))
                else:
                    results[worker.request] = result
                    report(BuildEvent("finished", worker.request, worker.seconds))
            time.sleep(POLL_SECONDS)
    if failures:
        raise BuildFailed("\n".join(failure.message for failure in failures), failures[0].hint)
    return [results[request] for request in requests]


class _Worker:
    """One build process, leader of its own process group, so that its compilers end with it."""

    def __init__(self, request: BuildRequest, inputs: KeyInputs, store: Store, build_root: Path):
        self.request, self.inputs, self.key, self.store = request, inputs, inputs.key(), store
        self.folder = build_root / self.key
        self.log = build_root / f"{self.key}.log"

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        scratch = {
            "TMPDIR": str(self.folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }
        kept = {k: v for k, v in child_environment().items() if not k.startswith(INDUCTOR_VARIABLES)}
        job = {
            **asdict(self.request),
            "store": str(self.store.root),
            "folder": str(self.folder),
            "key": self.key,
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

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self) -> BuildResult:
        if self.process.returncode == 0:
            manifest = self.store.find(self.inputs.program, self.inputs.bucket, self.key)
            assert manifest is not None, "a worker that ends well has published"
            self.log.unlink()
            return BuildResult(self.request, manifest, self.seconds, cached=False)
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        tail = self.log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
        raise BuildFailed(
            f"building {self.request} failed ({how}):\n" + "\n".join(f"  {line}" for line in tail),
            f"the whole log: {self.log}",
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
    return key_inputs(program, Bucket.parse(request.bucket), fingerprint)


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


def _build_one(request: BuildRequest, store: Store, folder: Path, key: str) -> None:
    """Build and publish one artifact in this process, whose TMPDIR and caches lie in `folder`."""
    inputs = _inputs(request)
    assert inputs.key() == key, "the worker and its parent describe the same build"
    if store.intact(inputs.program, inputs.bucket, key) is not None:
        return
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
    if inputs.call_spec.device_type == "cuda":
        # A trial needs a whole step's memory: one at a time, whoever builds beside it.
        with _locked(folder.parent / "gpu.lock"):
            _try_package(package, inputs)
    else:
        _try_package(package, inputs)
    record = {
        "nodes": str(len(exported.graph.nodes)),
        "python": inputs.fingerprint.python,
        "trace_seconds": f"{traced - started:.1f}",
        "compile_seconds": f"{compiled - traced:.1f}",
    }
    store.publish(package, inputs, graph_hash(exported), record)


def _try_package(package: Path, inputs: KeyInputs) -> None:
    spec = inputs.call_spec
    trial = Trial(f"{inputs.program} {inputs.bucket}", str(package), spec, spec.device_type)
    thread_counts = CANARY_THREADS if spec.device_type == "cpu" else (1,)
    for threads in thread_counts:
        try_packages([trial], {"OMP_NUM_THREADS": str(threads)})


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Read one job from stdin and build it; the parent keeps the output as a log."""
    _die_with_parent()
    job = json.load(sys.stdin)
    folder, store, key = Path(job.pop("folder")), Store(job.pop("store")), job.pop("key")
    request = BuildRequest(**{**job, "overrides": tuple(job["overrides"])})
    try:
        with _own_folder(folder):
            _build_one(request, store, folder, key)
    except UserError as error:
        print(f"error: {error.message}", f"hint: {error.hint}" if error.hint else "", sep="\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
