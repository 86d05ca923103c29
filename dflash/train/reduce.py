"""The gradient sum over drafter workers, the same on every run.

Workers on distinct CUDA devices use single-process NCCL, whose ring adds in an order of its own that does not
change between runs. Otherwise the sum is taken in worker order on the first worker's device and copied from
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensors = dict[str, torch.Tensor]


def uses_nccl(devices: Sequence[torch.device]) -> bool:
    """True when several workers sit on CUDA devices, each on its own."""
    return len(devices) > 1 and len(set(devices)) == len(devices) and all(d.type == "cuda" for d in devices)


def sum_gradients(
    per_worker: Sequence[Tensors], devices: Sequence[torch.device]
) -> dict[torch.device, Tensors]:
    """Sum float32 gradients by name; return the total on each distinct device.

    Consumes its inputs: totals may live in a worker's own buffers, which it must zero before it adds again.
    """
    if uses_nccl(devices):
        from torch.cuda import nccl

        for name in per_worker[0]:
            nccl.all_reduce([grads[name] for grads in per_worker])
        return dict(zip(devices, per_worker, strict=True))

    total = per_worker[0]
    for grads in per_worker[1:]:
        for name, tensor in total.items():
            tensor.add_(grads[name].to(tensor.device))
    totals = {devices[0]: total}
    for device, grads in zip(devices, per_worker, strict=True):
        if device not in totals:
            for name, tensor in grads.items():
                tensor.copy_(total[name])
            totals[device] = grads
    return totals
