"""Devices named in a run file, checked against the machine, and arithmetic that repeats itself on the CPU."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from aot.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Read by Intel's MKL at its first call.
REPRODUCIBLE_VARIABLE, REPRODUCIBLE_VALUE = "MKL_CBWR", "AUTO"
#: What the CPU's matrix products want; torch's own allocations have it, memory-mapped weights do not.
ALIGNMENT_BYTES = 64


def make_reproducible() -> None:
    """Have the CPU's matrix products give the same bits in every run; a variable that is set already wins.

    MKL promises that only in this mode, for aligned data and a fixed number of threads; it cost nothing that
    could be measured at the demonstration's shapes. Call it before the first product of the process.
    """
    os.environ.setdefault(REPRODUCIBLE_VARIABLE, REPRODUCIBLE_VALUE)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous, copied if its memory is not aligned (artifacts would copy it at every call)."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()


def resolve_devices(names: Iterable[str], key: str) -> list[torch.device]:
    """Return the devices in order, CUDA ones with their index.

    Raises ConfigError for an unknown name or an empty list, EnvironmentFault for a GPU that is not there.
    """
    devices = [_resolve(name, key) for name in names]
    if not devices:
        raise ConfigError(f"{key} is empty", "name at least one device, e.g. `cpu` or `cuda:0`")
    return devices


def _resolve(name: str, key: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{key}: '{name}' is not a device", "use `cpu` or `cuda:INDEX`")
    if device.type == "cpu":
        return torch.device("cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise EnvironmentFault(
            f"{key}: there is no '{name}', torch sees {count} CUDA device(s)",
            f"name others, e.g. `--set '{key}=[\"cpu\"]'`; `dflash-aot doctor` says what torch sees",
        )
    return torch.device("cuda", index)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one of this thread; nothing to do on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
