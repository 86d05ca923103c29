"""What the train step costs on this GPU, every way side by side in one run; `make bench-gpu` calls it.

    a   eager model with torch.compile(flex_attention), unfused loss: what a trainer without artifacts runs
    b1  the whole step, the same graph and kernels, compiled by Inductor in the process
    b2  as b1, with the unfused loss
    c   the artifact

All ways compile side by side, each in its own process, and are timed one at a time as they are ready. Writes
a table to stdout and JSON to --output. The floor is the shape's arithmetic over the matrix rate measured.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench.gpu_shapes import RECIPE, SHAPES, Shape, full_inputs, step_tflop

from aot.buckets import Bucket
from aot.compile import BuildRequest, build
from aot.runtime import prepare
from aot.store import Store
from dflash.drafter.programs import TrainStep

FACTORY = "dflash.drafter.programs:program_set"
DEVICE = torch.device("cuda:0")
ROUNDS = 12
WAYS = ("a", "b1", "b2", "c")
#: Eight buckets of the reference recipe; the last is the reference bucket.
LADDER = (
    "6144x128",
    "12288x256",
    "18432x384",
    "24576x512",
    "30720x640",
    "36864x768",
    "43008x896",
    "49152x1024",
)

Step = Callable[[dict[str, torch.Tensor]], object]
#: Shape, way, what is recomputed.
Case = tuple[Shape, str, str]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def median_ms(step: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median milliseconds between two events around the call, after two calls that do not count."""
    times = []
    for turn in range(rounds + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = step()
        end.record()
        torch.cuda.synchronize()
        del result
        if turn >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def matmul_tflops() -> float:
    """The rate of a large bfloat16 product on random data, in 1e12 operations a second."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_ms(lambda: a @ b, 50) / 1e9


def eager_step(program: TrainStep) -> Step:
    """The step as plain PyTorch, its attention the public compiled flex_attention on contiguous tables."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    from dflash.drafter import step as steps
    from dflash.drafter.block_mask import TILE

    compiled = torch.compile(flex_attention, dynamic=False)

    def make_attend(backend, rule, context_start_A, anchors_A):
        queries = anchors_A.shape[0] * rule.block_size
        mask = BlockMask(
            **rule.flex_tables(context_start_A, anchors_A),
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=lambda b, h, q, k: rule.visible(q, k, context_start_A, anchors_A),
            seq_lengths=(queries, rule.tokens + queries),
        )
        return lambda q, k, v: compiled(q[None], k[None], v[None], block_mask=mask, enable_gqa=True)[0]

    steps.make_attend = make_attend
    return lambda inputs: program.run(program.config, inputs)


def jit_step(shape: Shape, program: TrainStep) -> Step:
    """The whole step compiled by Inductor in this process, from the graph that the artifact is made of."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    spec = program.call_spec(shape.bucket)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device=DEVICE) for t in spec.inputs]
    graph = make_fx(program.function(shape.bucket), tracing_mode="real")(*fake)
    with torch.no_grad():
        compiled = torch._inductor.compile(graph, fake)
    return lambda inputs: compiled(*(inputs[name] for name in spec.input_names))


def request(shape: Shape, recompute: str, bucket: str) -> BuildRequest:
    changes = (*shape.overrides, *overrides("c", recompute))
    return BuildRequest(FACTORY, RECIPE, changes, "train_step", bucket)


def artifact_step(shape: Shape, program: TrainStep, store: Store) -> Step:
    needs = [(program, shape.bucket)]
    return prepare(store, needs, run=RECIPE, device=str(DEVICE))[program.name, shape.bucket].load(DEVICE)


def overrides(way: str, recompute: str) -> tuple[str, ...]:
    return (f"loss.fused={str(way in ('b1', 'c')).lower()}", f"drafter.recompute={recompute}")


def measure_way(way: str, shape: Shape, recompute: str, folder: Path) -> dict[str, Any]:
    """Compile, say so, wait for the turn, then time; runs in a process of its own."""
    program, store = shape.program(*overrides(way, recompute)), Store(folder / "store")
    started = time.time()
    step = None
    if way in ("b1", "b2"):
        step = jit_step(shape, program)
    elif way == "c":
        build([request(shape, recompute, str(shape.bucket))], store)
        # Tried once per machine: not part of a later start.
        prepare(store, [(program, shape.bucket)], run=RECIPE, device=str(DEVICE))
    compile_s = time.time() - started
    mark = marks(folder, shape, way, recompute)
    mark["ready"].touch()
    while not mark["turn"].exists():
        time.sleep(0.1)
    inputs = full_inputs(shape, program, 0, DEVICE)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    if step is None:
        step = eager_step(program) if way == "a" else artifact_step(shape, program, store)
    with torch.no_grad() if way != "a" else torch.enable_grad():
        step(inputs)
        torch.cuda.synchronize()
        first_s = time.perf_counter() - begun
        ms = median_ms(lambda: step(inputs))
    return {
        "way": way,
        "recompute": recompute,
        "ms": ms,
        "first_s": first_s,
        "compile_s": compile_s,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "tokens_per_s": shape.bucket.tokens / ms * 1e3,
        "tflop": step_tflop(shape, program, inputs),
    }


def marks(folder: Path, shape: Shape, way: str, recompute: str) -> dict[str, Path]:
    """The files by which a case and this script talk."""
    return {kind: folder / f"{shape.name}-{way}-{recompute}.{kind}" for kind in ("ready", "turn", "cache")}


def load_seconds(shape: Shape, recompute: str, store: Store) -> float:
    """Verify and load the eight buckets, which this machine has tried before."""
    program = shape.program(*overrides("c", recompute))
    needs = [(program, Bucket.parse(bucket)) for bucket in LADDER]
    prepare(store, needs, run=RECIPE, device=str(DEVICE))
    begun = time.perf_counter()
    for prepared in prepare(store, needs, run=RECIPE, device=str(DEVICE)).values():
        prepared.load(DEVICE)
    return time.perf_counter() - begun


def build_ladder(store: Store, jobs: int) -> dict[str, Any]:
    """Build eight buckets of the reference recipe, `jobs` at a time."""
    wanted = [request(SHAPES["reference"], "activations", bucket) for bucket in LADDER]
    begun = time.perf_counter()
    results = build(
        wanted, store, jobs, progress=lambda e: note(f"{e.kind} {e.request} {e.seconds:.0f} s {e.detail}")
    )
    seconds = [result.seconds for result in results]
    return {"jobs": jobs, "wall_s": time.perf_counter() - begun, "seconds": seconds}


def start(case: Case, folder: Path) -> subprocess.Popen[str]:
    shape, way, recompute = case
    mark = marks(folder, shape, way, recompute)
    for path in (mark["ready"], mark["turn"]):
        path.unlink(missing_ok=True)
    words = ("--one", way, "--shape", shape.name, "--recompute", recompute, "--folder", str(folder))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(mark["cache"])}
    return subprocess.Popen(
        [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, env=environment
    )


@contextmanager
def gpu_alone(folder: Path) -> Iterator[None]:
    """Hold the lock under which builds try their packages: nothing else runs on the GPU meanwhile."""
    path = folder / "store" / "build" / "gpu.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def time_cases(cases: list[Case], folder: Path, deadline_s: float) -> dict[str, list[dict[str, Any]]]:
    """Time each case as soon as it has compiled, one at a time; what is not ready in time says so."""
    children = {case: start(case, folder) for case in cases}
    rows: dict[str, list[dict[str, Any]]] = {}
    begun = time.monotonic()
    while children:
        late = time.monotonic() - begun > deadline_s
        for case, child in list(children.items()):
            shape, way, recompute = case
            mark = marks(folder, shape, way, recompute)
            if not (mark["ready"].exists() or late or child.poll() is not None):
                continue
            if late and not mark["ready"].exists():
                child.kill()
            with gpu_alone(folder):
                mark["turn"].touch()
                output, _ = child.communicate()
            failed = {"way": way, "recompute": recompute, "error": f"exit code {child.returncode}"}
            row = failed if child.returncode else json.loads(output)
            note(f"{shape.name}: {json.dumps(row)}")
            rows.setdefault(shape.name, []).append(row)
            del children[case]
        time.sleep(0.2)
    return rows


def run(cases: list[Case], ladder: bool, folder: Path, jobs: int, deadline_s: float) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": torch.cuda.get_device_name(0), "torch": torch.__version__}
    report["matmul_tflops"] = matmul_tflops()
    report["shapes"] = time_cases(cases, folder, deadline_s)
    report["matmul_tflops_after"] = matmul_tflops()
    if ladder:
        store = Store(folder / "store")
        report["build"] = build_ladder(store, jobs)
        report["load_8_s"] = load_seconds(SHAPES["reference"], "activations", store)
    return report


def print_report(report: dict[str, Any]) -> None:
    rate = report["matmul_tflops"]
    print(f"{report['machine']}, torch {report['torch']}, matrix product {rate:.0f} TFLOP/s", end="")
    print(f" before and {report['matmul_tflops_after']:.0f} after")
    for name, rows in report["shapes"].items():
        print(f"\n{name} {SHAPES[name].bucket}")
        print("way recompute     step ms  x floor  Ktok/s  peak GiB  reserved  first step s")
        for row in rows:
            if "error" in row:
                print(row)
                continue
            floor_ms = row["tflop"] / rate * 1e3
            print(
                f"{row['way']:3s} {row['recompute']:12s} {row['ms']:8.1f} {row['ms'] / floor_ms:8.2f} "
                f"{row['tokens_per_s'] / 1e3:7.1f} {row['peak_gib']:9.1f} {row['reserved_gib']:9.1f} "
                f"{row['first_s']:13.2f}"
            )
    if "build" in report:
        built = report["build"]
        print(
            f"\n{len(built['seconds'])} builds, {built['jobs']} at a time: {built['wall_s']:.0f} s "
            f"(each {min(built['seconds']):.0f}-{max(built['seconds']):.0f} s)"
        )
        print(f"verify + load of 8 buckets: {report['load_8_s']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--cases",
        default=" ".join(
            f"{shape}:{way}" for shape in SHAPES for way in (*WAYS, "c:activations", "c:layers")
        ),
        help="SHAPE:WAY[:RECOMPUTE], separated by blanks",
    )
    parser.add_argument("--no-ladder", action="store_true", help="do not build and load eight buckets")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-gpu"))
    parser.add_argument("--output", type=Path, default=Path("runs/bench-gpu/report.json"))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds that a case may compile")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--recompute", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        shape = SHAPES[arguments.shape]
        print(json.dumps(measure_way(arguments.one, shape, arguments.recompute, arguments.folder)))
        return
    cases: list[Case] = []
    for text in arguments.cases.split():
        name, way, *recompute = text.split(":")
        cases.append((SHAPES[name], way, *(recompute or ["none"])))
    report = run(cases, not arguments.no_ladder, arguments.folder, arguments.jobs, arguments.deadline)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1))
    print_report(report)


if __name__ == "__main__":
    main()
