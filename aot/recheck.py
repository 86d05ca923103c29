"""The two checks that run code, in a child process: what an artifact's graph would be now, what it computes.

`graph` traces the program again, without compiling, and hashes the result. `numerics` runs the package, the
program's own function and its float64 twin on the same fresh inputs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from aot.archive import MODEL_NAME
from aot.buckets import Bucket
from aot.canary import child_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from aot.program import Program

#: Relative error allowed of each output, by the lowest precision among a program's inputs: TWIN_FACTOR times
#: what the eager twin itself is off from float64, but no less than the first number, no more than the second.
#: Discrete outputs are held to the second.
TOLERANCE = {
    "float64": (1e-12, 1e-9),
    "float32": (1e-5, 1e-2),
    "float16": (1e-2, 1e-1),
    "bfloat16": (3e-2, 3e-1),
}
TWIN_FACTOR = 1.5


@dataclass(frozen=True)
class OutputError:
    """Relative errors `|a-b|/|b|` of one output against float64: the package's, and its eager twin's."""

    name: str
    error: float
    twin_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        # Written so that NaN fails.
        return self.error <= self.tolerance


@dataclass(frozen=True)
class RunSource:
    """Where programs come from, so that a child process can make them again."""

    factory: str
    run_file: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class ChildRequest:
    """What a child needs for `graph` or `numerics`: the program, the verified package, the inputs' seed."""

    level: str
    source: RunSource
    program: str
    bucket: str
    package: str = ""
    seed: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def ask_child(request: ChildRequest, timeout_s: float = 3600.0) -> tuple[Any, str | None]:
    """Return a child's answer, or why there is none."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "aot.recheck"],
            input=json.dumps(asdict(request)),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=child_environment(request.environment),
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s:.0f} s"
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:] or ["no message"]
        return None, f"the child process ended with code {child.returncode}: {last[0]}"
    return json.loads(child.stdout.splitlines()[-1]), None


def measure(program: Program, bucket: Bucket, package: str, seed: int) -> list[OutputError]:
    """Run the package, the program's own function eagerly, and the float64 twin on the same fresh inputs.

    Inputs are drawn again for each of them, because a program may add into its accumulators.
    """
    import torch

    device = torch.device(program.device_type, 0) if program.device_type == "cuda" else torch.device("cpu")

    def inputs() -> tuple[torch.Tensor, ...]:
        return program.example_inputs(bucket, seed, device)

    loader = torch._C._aoti.AOTIModelPackageLoader(
        package, MODEL_NAME, True, 1, 0 if device.index == 0 else -1
    )
    with torch.no_grad():
        compiled = [tensor.double().cpu() for tensor in loader.run(list(inputs()))]
    twin = [tensor.double().cpu() for tensor in program.function(bucket)(*inputs())]
    exact = [tensor.double().cpu() for tensor in program.reference(bucket, inputs())]
    spec = program.call_spec(bucket)
    floor, ceiling = max(TOLERANCE.get(tensor.dtype, (0.0, 0.0)) for tensor in spec.inputs)
    errors = []
    for name, ours, eager, reference in zip(spec.output_names, compiled, twin, exact, strict=True):
        twin_error = relative_error(eager, reference)
        tolerance = min(max(floor, TWIN_FACTOR * twin_error), ceiling)
        if name in program.discrete_outputs:
            tolerance = ceiling
        errors.append(OutputError(name, relative_error(ours, reference), twin_error, tolerance))
    return errors


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """`|a-b|/|b|` over all elements; the absolute error where the reference is all zero."""
    return float((ours - reference).norm()) / (float(reference.norm()) or 1.0)


def traced_hash(program: Program, bucket: Bucket) -> str:
    """Return the hash of the graph that a build would compile now; nothing is compiled."""
    from aot.graph import graph_hash
    from aot.trace import trace

    return graph_hash(trace(program, bucket))


def main() -> None:
    """Answer one ChildRequest from stdin with one line of JSON."""
    from aot.compile import BuildRequest, load_program

    record: dict[str, Any] = json.load(sys.stdin)
    source = record["source"]
    request = BuildRequest(
        source["factory"], source["run_file"], tuple(source["overrides"]), record["program"], record["bucket"]
    )
    program, bucket = load_program(request), Bucket.parse(record["bucket"])
    if record["level"] == "graph":
        print(json.dumps(traced_hash(program, bucket)))
        return
    errors = measure(program, bucket, record["package"], record["seed"])
    print(json.dumps([asdict(error) for error in errors]))


if __name__ == "__main__":
    main()
