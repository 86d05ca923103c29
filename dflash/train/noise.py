"""Uniform noise on context features: one draw per document, the same wherever and whenever it is packed.

The draw depends on (seed, epoch, document id) alone. The CPU uses numpy's Philox, because torch's CPU
generator keeps 32 bits of a seed; CUDA uses the device's own Philox, so that the two streams differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dflash.data.randomness import device_seed, philox_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash.config import TrainConfig

PURPOSE = "noise"


@dataclass(frozen=True)
class Span:
    """Where a document lies in a packed micro-batch."""

    document: str
    start: int
    length: int


def amplitude(step: int, total_steps: int, config: TrainConfig) -> float:
    """Amplitude of optimizer step `step` (from 1), linear from noise_start to noise_end over the run."""
    progress = (step - 1) / max(1, total_steps - 1)
    return config.noise_start + (config.noise_end - config.noise_start) * progress


def uniform(
    shape: tuple[int, int], seed: int, epoch: int, document: str, device: torch.device
) -> torch.Tensor:
    """Float32 values in [-1, 1) on `device`, of 24 random bits each."""
    if device.type == "cpu":
        count = math.prod(shape)
        halves = philox_words((count + 1) // 2, seed, PURPOSE, epoch, document).view(np.uint32)[:count]
        unit = torch.from_numpy((halves >> 8).astype(np.float32).reshape(shape)).mul_(2.0**-24)
    else:
        on_device = torch.Generator(device)
        on_device.manual_seed(device_seed(seed, PURPOSE, epoch, document, bits=63))
        unit = torch.rand(shape, generator=on_device, device=device)
    return unit.mul_(2).sub_(1)


def add_noise(
    features_TF: torch.Tensor, spans: Sequence[Span], step_amplitude: float, epoch: int, config: TrainConfig
) -> None:
    """Add noise to each document's rows in place; padding rows stay as they are.

    `features_TF` [T, n*H] in any float dtype. The amplitude is absolute, or times the RMS of the document's
    features.
    """
    if step_amplitude == 0:
        return
    for span in spans:
        rows = features_TF[span.start : span.start + span.length]
        noise = uniform(tuple(rows.shape), config.seed, epoch, span.document, rows.device)
        values = rows.float()
        scale = step_amplitude
        if config.noise_scale == "rms":
            scale = step_amplitude * values.square().mean().sqrt()
        rows.copy_(values.add_(noise.mul_(scale)))
