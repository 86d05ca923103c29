"""What an artifact costs and saves on this CPU: one table from one run; `make bench` calls it.

Eager, whole-graph `torch.compile` and the artifact run the demonstration's train step at each bucket: in one
process by turns for the steady step, and each in a new process for the first step and the peak memory. Exits
with 1 if an aim is missed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from aot.buckets import Bucket, choose
from aot.compile import BuildRequest, build
from aot.runtime import prepare
from aot.store import Store, default_store_root
from dflash.config import load_config
from dflash.drafter.programs import make_programs, program_set

RECIPE = "smollm2-cpu"
FACTORY = "dflash.drafter.programs:program_set"
CPU = torch.device("cpu")
ROUNDS = 9
MODES = ("eager", "torch.compile cold", "torch.compile warm", "artifact")
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

Step = Callable[[Sequence[torch.Tensor]], object]


def make_step(mode: str, bucket: Bucket, store: Store) -> Step:
    """Return the train step at a bucket, run one way; compiled forms compile at their first call."""
    program = make_programs(load_config(RECIPE))[0]
    function = program.function(bucket)
    if mode == "eager":
        return lambda inputs: function(*inputs)
    if mode == "artifact":
        artifact = prepare(store, [(program, bucket)], run=RECIPE)[program.name, bucket].load(CPU)
        names = artifact.call_spec.input_names
        return lambda inputs: artifact(dict(zip(names, inputs, strict=True)))
    import torch._dynamo

    # Lets Dynamo take `torch.autograd.grad` into the graph: forward, loss and backward as one.
    torch._dynamo.config.trace_autograd_ops = True
    compiled = torch.compile(function, fullgraph=True)
    return lambda inputs: compiled(*inputs)


def example(bucket: Bucket) -> tuple[torch.Tensor, ...]:
    return make_programs(load_config(RECIPE))[0].example_inputs(bucket, 0, CPU)


def in_new_process(mode: str, bucket: Bucket, cache: str) -> dict[str, float]:
    """Time from process start to the end of the first step, and its peak memory."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, __file__, "--first-step", mode, "--bucket", str(bucket)],
        env={**os.environ, CACHE_VARIABLE: cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)
    return {"first_s": result["ended"] - started, "peak_mib": result["peak_mib"]}


def first_step(mode: str, bucket: Bucket) -> None:
    step, inputs = make_step(mode, bucket, Store(default_store_root())), example(bucket)
    step(inputs)
    # Not `ru_maxrss`: a child inherits that of the process it was forked from.
    status = Path("/proc/self/status").read_text("utf-8")
    peak_mib = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps({"ended": time.time(), "peak_mib": peak_mib}))


def steady_ms(bucket: Bucket, store: Store) -> dict[str, float]:
    """Median milliseconds of each way, taken by turns: a slow minute of the machine meets all alike."""
    inputs = example(bucket)
    steps = {mode: make_step(mode, bucket, store) for mode in ("eager", "torch.compile warm", "artifact")}
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    for turn in range(ROUNDS + 2):
        for mode, step in steps.items():
            begun = time.perf_counter()
            step(inputs)
            if turn >= 2:
                times[mode].append(1e3 * (time.perf_counter() - begun))
    return {mode: statistics.median(values) for mode, values in times.items()}


def build_seconds_on_one_core(bucket: Bucket) -> dict[str, float]:
    """Build the train step from nothing, pinned to one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with tempfile.TemporaryDirectory() as folder:
            request = BuildRequest(FACTORY, RECIPE, (), "train_step", str(bucket))
            record = build([request], Store(Path(folder)))[0].manifest.environment
    finally:
        os.sched_setaffinity(0, allowed)
    return {name: float(record[name]) for name in ("trace_seconds", "compile_seconds")}


def load_seconds(store: Store) -> float:
    """Verify and load every artifact of the demonstration, all of which this machine has tried before."""
    programs, config = make_programs(load_config(RECIPE)), load_config(RECIPE)
    needs = [(program, bucket) for program in programs for bucket in config.data.resolved_buckets]
    prepare(store, needs, run=RECIPE)
    begun = time.perf_counter()
    for prepared in prepare(store, needs, run=RECIPE).values():
        prepared.load(CPU)
    return time.perf_counter() - begun


def padding(buckets: Sequence[Bucket]) -> dict[Bucket, tuple[int, float]]:
    """Per bucket: training micro-batches, and the share of token slots without a token."""
    histogram = program_set(RECIPE, ()).histogram
    found: dict[Bucket, list[tuple[int, int]]] = {bucket: [] for bucket in buckets}
    for (tokens, anchors), count in (histogram.counts["train_step"] if histogram else {}).items():
        bucket = choose(buckets, tokens, anchors)
        assert bucket is not None
        found[bucket].append((tokens * count, count))
    return {
        bucket: (count, 1 - sum(t for t, _ in sizes) / (count * bucket.tokens))
        for bucket, sizes in found.items()
        if (count := sum(c for _, c in sizes))
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(buckets: Sequence[Bucket], store: Store) -> dict[str, Any]:
    requests = [
        BuildRequest(FACTORY, RECIPE, (), p.name, str(b))
        for p in make_programs(load_config(RECIPE))
        for b in buckets
    ]
    note("building what is missing")
    build(requests, store, jobs=len(os.sched_getaffinity(0)))
    rows: dict[str, Any] = {}
    for bucket in buckets:
        with tempfile.TemporaryDirectory() as cache:
            first = {}
            for mode in MODES:
                note(f"{bucket}: first step, {mode}")
                first[mode] = in_new_process(mode, bucket, cache)
            os.environ[CACHE_VARIABLE] = cache
            note(f"{bucket}: steady step")
            steady = steady_ms(bucket, store)
        rows[str(bucket)] = {"first": first, "steady": steady}
    note("building one bucket on one core")
    return {
        "buckets": rows,
        "build": build_seconds_on_one_core(buckets[0]),
        "load_s": load_seconds(store),
        "padding": {str(b): value for b, value in padding(buckets).items()},
    }


def report(measured: dict[str, Any]) -> bool:
    """Print the table and the aims; return whether all were met."""
    print(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, recipe {RECIPE}, train step\n")
    print(f"{'bucket':10s} {'way':20s} {'step ms':>9s} {'first step s':>13s} {'peak MiB':>9s}")
    for bucket, row in measured["buckets"].items():
        for mode in MODES:
            steady = row["steady"].get(mode)
            step = f"{steady:9.0f}" if steady else f"{'-':>9s}"
            first = row["first"][mode]
            print(f"{bucket:10s} {mode:20s} {step} {first['first_s']:13.1f} {first['peak_mib']:9.0f}")
    for bucket, (count, share) in measured["padding"].items():
        print(f"{bucket:10s} {count} training micro-batches, {share:.1%} padding")
    seconds = measured["build"]
    total = sum(seconds.values())
    print(
        f"\ntrace {seconds['trace_seconds']:.1f} s + compile {seconds['compile_seconds']:.1f} s on one core"
    )
    print(f"verify + load of all artifacts {measured['load_s']:.2f} s\n")
    aims = {
        "trace + compile of one bucket <= 45 s on one core": total <= 45,
        "verify + load < 1 s": measured["load_s"] < 1,
    }
    for bucket, row in measured["buckets"].items():
        steady = row["steady"]
        ratio = steady["artifact"] / steady["torch.compile warm"]
        aims[f"{bucket}: artifact / warm torch.compile = {ratio:.3f} <= 1.02"] = ratio <= 1.02
        ratio = steady["artifact"] / steady["eager"]
        aims[f"{bucket}: artifact / eager = {ratio:.3f} <= 1"] = ratio <= 1
    for text, met in aims.items():
        print(f"{'ok    ' if met else 'MISSED'} {text}")
    return all(aims.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-step", choices=MODES)
    parser.add_argument("--bucket")
    arguments = parser.parse_args()
    if arguments.first_step:
        first_step(arguments.first_step, Bucket.parse(arguments.bucket))
        return
    met = report(measure(load_config(RECIPE).data.resolved_buckets, Store(default_store_root())))
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()
