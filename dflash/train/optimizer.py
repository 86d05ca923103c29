"""AdamW over fp32 master weights, and the learning-rate schedule.

One `Replica` per device holds the parameters that the program reads (in the drafter's dtype), their fp32
masters and Adam's moments. Workers on one device share it: they only read, between updates. In float32 the
parameters are the masters themselves. Written out because `torch.optim` imports Dynamo on first use, and
training must not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash.config import TrainConfig

Tensors = dict[str, torch.Tensor]


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

    def step(self, grads: Mapping[str, torch.Tensor], updates: int, lr: float, config: TrainConfig) -> None:
        """Apply update number `updates` (from 1) in place. Only matrices decay: norms stay near 1."""
        beta1, beta2 = config.betas
        step_size = lr / (1 - beta1**updates)
        second_correction = math.sqrt(1 - beta2**updates)
        for name, master in self.masters.items():
            grad, first, second = grads[name], self.first[name], self.second[name]
            first.lerp_(grad, 1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            if master.ndim >= 2:
                master.mul_(1 - lr * config.weight_decay)
            denominator = second.sqrt().div_(second_correction).add_(config.adam_eps)
            master.addcdiv_(first, denominator, value=-step_size)
            if self.params is not self.masters:
                self.params[name].copy_(master)

    def load_state(self, masters: Tensors, first: Tensors, second: Tensors) -> None:
        """Overwrite masters, moments and parameters in place, by name."""
        for own, stored in ((self.masters, masters), (self.first, first), (self.second, second)):
            assert own.keys() == stored.keys()
            for name, tensor in own.items():
                tensor.copy_(stored[name])
        if self.params is not self.masters:
            for name, param in self.params.items():
                param.copy_(self.masters[name])
