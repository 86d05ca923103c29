"""A trial run in a child process: a package that crashes takes the child with it, not the run.

The child (`python -m aot.canary`) loads each package with the C++ loader, runs it once on plausible inputs
made from its call spec, and checks the outputs against the spec. One child serves all packages of a run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aot.archive import MODEL_NAME
from aot.errors import CorruptArtifact, TrialCrashed
from aot.program import CallSpec, TensorSpec
from aot.trace import outputs_mismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

CHECK_INPUTS_VARIABLE = "AOTI_RUNTIME_CHECK_INPUTS"
# What a package does to its process. SIGKILL is left out: somebody, or the kernel short of memory, sends it.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_MARK = "canary "


@dataclass(frozen=True)
class Trial:
    """One verified package to try: its name for messages, its path, its call spec and a torch device."""

    name: str
    path: str
    call_spec: CallSpec
    device: str


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a Python child that imports what this process can import."""
    search = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": search, CHECK_INPUTS_VARIABLE: "1", **(extra or {})}


def try_packages(
    trials: Sequence[Trial],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    folder: Path | None = None,
) -> None:
    """Run every trial in one child; return when all passed.

    `environment` adds variables for the child (e.g. OMP_NUM_THREADS); it unpacks inside `folder`, by default
    the temporary one. Raises CorruptArtifact naming the package that failed or ran out of time, TrialCrashed
    if it crashed the child.
    """
    request = json.dumps([asdict(trial) for trial in trials])
    with tempfile.TemporaryDirectory(prefix="dflash-aot-canary-", dir=folder) as scratch:
        # The loader unpacks into TMPDIR and a killed process leaves that behind: this folder goes with the
        # child.
        child = subprocess.Popen(
            [sys.executable, "-m", "aot.canary"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment({"TMPDIR": scratch, **(environment or {})}),
        )
        try:
            output, errors = child.communicate(request, timeout=timeout_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            child.kill()
            output, errors = child.communicate()
            timed_out = True
        except BaseException:
            child.kill()
            child.wait()
            raise
    reports = [json.loads(line.removeprefix(_MARK)) for line in output.splitlines() if line.startswith(_MARK)]
    for trial, report in zip(trials, reports, strict=False):
        if report["error"]:
            raise CorruptArtifact(f"{trial.name}: its trial run failed: {report['error']}")
    if len(reports) < len(trials):
        name = trials[len(reports)].name
        how = f"ran longer than {timeout_s:.0f} s" if timed_out else _death(child.returncode, errors)
        message = f"{name}: its trial run in a child process {how}"
        hint = "`dflash-aot doctor` checks this machine and its compiler; then build the artifact again"
        if -child.returncode in CRASHES and not timed_out:
            raise TrialCrashed(message, hint, name)
        raise CorruptArtifact(message, hint)


def _death(code: int, errors: str) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    last = errors.strip().splitlines()[-1:] or ["without a word"]
    return f"ended with exit code {code}: {last[0]}"


def plausible_inputs(specs: Sequence[TensorSpec], device: torch.device) -> list[torch.Tensor]:
    """Small random numbers, zeros for integers (an index of 0 is valid everywhere), True for booleans."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    tensors = []
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        tensor = torch.zeros(1, dtype=dtype, device=device).new_empty_strided(spec.shape, spec.stride).zero_()
        if dtype.is_floating_point:
            tensor.normal_(0.0, 0.02, generator=generator)
        elif dtype == torch.bool:
            tensor.fill_(True)
        tensors.append(tensor)
    return tensors


def _try(trial: Trial) -> str | None:
    import contextlib

    import torch

    device = torch.device(trial.device)
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    index = -1 if device.type == "cpu" else (device.index or 0)
    try:
        with guard, torch.no_grad():
            loader = torch._C._aoti.AOTIModelPackageLoader(trial.path, MODEL_NAME, True, 1, index)
            outputs = loader.run(plausible_inputs(trial.call_spec.inputs, device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except (RuntimeError, ValueError, OSError) as error:
        return str(error).strip().splitlines()[0]
    return outputs_mismatch(trial.call_spec.outputs, outputs)


def _parse(record: dict) -> Trial:
    spec = record["call_spec"]
    inputs, outputs = (tuple(TensorSpec(**tensor) for tensor in spec[side]) for side in ("inputs", "outputs"))
    return Trial(
        record["name"], record["path"], CallSpec(spec["device_type"], inputs, outputs), record["device"]
    )


def main() -> None:
    """Read trials from stdin; write one line for each as soon as it is done."""
    for record in json.load(sys.stdin):
        report = {"error": _try(_parse(record))}
        print(_MARK + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
