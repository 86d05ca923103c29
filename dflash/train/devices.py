"""Devices named in a run file, checked against the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from aot.errors import ConfigError, EnvironmentFault


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
