"""AdamW over fp32 master weights, and the learning-rate schedule.

One `Replica` per device holds the parameters that the program reads (in the drafter's dtype), their fp32
masters and Adam's moments. Workers on one device share it: they only read, between updates. In float32 the
parameters are the masters themselves. An update never waits for the device: whether the gradient is finite,
its norm and how many updates there were stay on it. The fused operator is called directly because
`torch.optim` imports Dynamo on first use, and training must not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash.config import TrainConfig

Tensors = dict[str, torch.Tensor]
#: Beside a worker's gradient sums: how many valid anchors they come from, float32 [1].
ANCHORS = "anchors"


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Rate of optimizer step `step` (from 1): linear warm-up, then a cosine towards min_lr_ratio.

    The cosine would end one step after the last, so that no step has a rate of zero.
    """
    warmup = math.ceil(config.warmup_ratio * total_steps)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / (total_steps - warmup + 1)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def gradient_norm(grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Euclidean norm over all gradients, a 0-d float32 tensor; not finite if any gradient is not."""
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads.values()])
    )


class Replica:
    """Parameters, masters and Adam state on one device."""

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device):
        """Copy `weights` (z-lab names, any float dtype) to `device`; moments start at zero."""
        self.device, self.dtype = device, dtype
        self.masters: Tensors = {
            name: weight.to(device, torch.float32, copy=True) for name, weight in weights.items()
        }
        self.params: Tensors = (
            self.masters
            if dtype == torch.float32
            else {name: master.to(dtype) for name, master in self.masters.items()}
        )
        self.first: Tensors = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.second: Tensors = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        #: How many updates there were, float32 0-d.
        self.updates = torch.zeros((), device=device)

    def step(self, total: Mapping[str, torch.Tensor], lr: float, config: TrainConfig) -> torch.Tensor:
        """Apply one update in place, from gradient sums by name and their ANCHORS; both are consumed.

        Returns the norm of the mean gradient before clipping, 0-d. If that is not finite, as it is without
        any anchor, nothing changes. Only matrices decay: norms stay near 1.
        """
        norm = gradient_norm({name: total[name] for name in self.masters}) / total[ANCHORS][0]
        skip = (~norm.isfinite()).float()
        self.updates.add_(1 - skip)
        divisor = total[ANCHORS][0] * norm.clamp(min=config.clip) / config.clip
        for matrices, decay in ((True, config.weight_decay), (False, 0.0)):
            names = [name for name, master in self.masters.items() if (master.ndim >= 2) is matrices]
            torch._fused_adamw_(
                [self.masters[name] for name in names],
                [total[name] for name in names],
                [self.first[name] for name in names],
                [self.second[name] for name in names],
                [],
                [self.updates] * len(names),
                lr=lr,
                beta1=config.betas[0],
                beta2=config.betas[1],
                weight_decay=decay,
                eps=config.adam_eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=skip,
            )
        self._follow()
        return norm

    def _follow(self) -> None:
        """Have the parameters follow their masters."""
        if self.params is not self.masters:
            torch._foreach_copy_(list(self.params.values()), list(self.masters.values()))

    def load_state(self, masters: Tensors, first: Tensors, second: Tensors, updates: int) -> None:
        """Overwrite masters, moments and parameters in place, by name, and the number of updates."""
        for own, stored in ((self.masters, masters), (self.first, first), (self.second, second)):
            assert own.keys() == stored.keys()
            for name, tensor in own.items():
                tensor.copy_(stored[name])
        self.updates.fill_(updates)
        self._follow()
