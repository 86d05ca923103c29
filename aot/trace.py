"""From a program to one graph, and to the inputs of its key.

Only `trace` loads torch's tracing machinery. The key is made without it, in processes that never trace.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aot.errors import ConfigError, UserError
from aot.manifest import KeyInputs
from aot.program import TensorSpec
from aot.source import digest_of_files, source_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.export import ExportedProgram

    from aot.buckets import Bucket
    from aot.fingerprint import Fingerprint
    from aot.program import Program
    from aot.target import Target

Option = bool | int | str

DEFAULT_OPTIONS: dict[str, Option] = {
    # Without these two a CPU package sizes its buffers for the building machine and crashes on more threads.
    "cpp.threads": 2,
    "cpp.dynamic_threads": True,
    # Precompiled headers live outside the build folder and would tie a package's bytes to an earlier build.
    "aot_inductor.precompile_headers": False,
    # Debug tables are two thirds of a package.
    "aot_inductor.enable_line_tables": False,
}
#: The torch release that brought an option; older ones refuse to hear of it.
OPTION_SINCE = {"cpp.march": (2, 13), "aot_inductor.enable_line_tables": (2, 13)}


class CallSpecMismatch(UserError):
    """A program's function does not do what its call spec says."""


def torch_release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a torch version such as `2.13.0+cpu`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    assert match is not None, version
    return int(match[1]), int(match[2])


def effective_options(program: Program, torch_version: str | None = None) -> dict[str, Option]:
    """Return the compile options of a program: the defaults, its own over them, those this torch knows.

    `torch_version` is that of the installed torch if absent.
    """
    if torch_version is None:
        import torch

        torch_version = str(torch.__version__)
    release = torch_release(torch_version)
    options = {**DEFAULT_OPTIONS, **program.compile_options}
    return {name: options[name] for name in sorted(options) if OPTION_SINCE.get(name, (0, 0)) <= release}


def key_inputs(
    program: Program, bucket: Bucket, fingerprint: Fingerprint, target: Target | None = None
) -> KeyInputs:
    """Return everything that names the artifact of `program` at `bucket` on the machine of `fingerprint`,
    or on every machine that has the instructions of `target`.

    Nothing is traced. Raises ConfigError if the program has no form at this bucket or no CPU form for a
    target, EnvironmentFault if this machine cannot build for the target.
    """
    program.check_bucket(bucket)
    sources = source_files(program.source_modules)
    options = effective_options(program, fingerprint.torch_version)
    if target is not None:
        if program.device_type != "cpu":
            raise ConfigError(
                f"program {program.name} runs on {program.device_type}: '{target}' is no target for it",
                "build without `--target`",
            )
        fingerprint = target.fingerprint(fingerprint, torch_release(fingerprint.torch_version))
        options = dict(sorted({**options, **target.options()}.items()))
    return KeyInputs(
        program=program.name,
        identity=program.identity,
        bucket=bucket,
        call_spec=program.call_spec(bucket),
        compile_options=options,
        source_digest=digest_of_files(sources),
        sources=sources,
        fingerprint=fingerprint,
    )


def trace(program: Program, bucket: Bucket, device_type: str | None = None) -> ExportedProgram:
    """Trace a program's function at one bucket into one exported graph, on tensors without memory.

    `device_type` replaces the program's own: without a GPU, gradients of fake CUDA tensors cannot be traced.
    Raises CallSpecMismatch if the outputs are not those that the call spec declares.
    """
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    program.check_bucket(bucket)
    spec = program.call_spec(bucket)
    # One mode for both steps: tensors of two fake modes do not mix.
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mode:
        inputs = [_empty(tensor, device_type or spec.device_type) for tensor in spec.inputs]
    graph = make_fx(program.function(bucket), tracing_mode="real")(*inputs)
    # What was computed and not used, such as the last product of a recomputed function.
    graph.graph.eliminate_dead_code()
    graph.recompile()
    _check_outputs(program, bucket, graph)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = graph

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.graph(*tensors)

    with torch.no_grad():
        return torch.export.export(Step(), tuple(inputs), strict=False)


def outputs_mismatch(specs: Sequence[TensorSpec], outputs: Sequence[torch.Tensor]) -> str | None:
    """Say how tensors differ from what is declared: the first output by name, or None if all agree."""
    if len(outputs) != len(specs):
        return f"{len(outputs)} outputs, declared {len(specs)}"
    for spec, tensor in zip(specs, outputs, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        found = TensorSpec(spec.name, tuple(tensor.shape), dtype, tuple(tensor.stride()))
        if found != spec:
            return (
                f"output '{spec.name}' is {found} with strides {list(found.stride)}, "
                f"declared {spec} with strides {list(spec.stride)}"
            )
    return None


def _empty(spec: TensorSpec, device_type: str) -> torch.Tensor:
    import torch

    return torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=device_type)


def _check_outputs(program: Program, bucket: Bucket, graph: torch.fx.GraphModule) -> None:
    (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
    results = results if isinstance(results, (list, tuple)) else (results,)
    mismatch = outputs_mismatch(program.call_spec(bucket).outputs, [node.meta["val"] for node in results])
    if mismatch is not None:
        raise CallSpecMismatch(f"program {program.name} at {bucket}: {mismatch}")
