"""The drafter's programs: call specs, example inputs and references of `train_step` and `eval_step`."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aot.errors import ConfigError
from aot.program import CallSpec, Program, ProgramSet, TensorSpec
from dflash.drafter import step
from dflash.drafter.block_mask import TILE
from dflash.drafter.model import parameter_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aot.buckets import Bucket
    from dflash.config import DrafterConfig, LossConfig, RunConfig

# What the graph does not depend on. All else in the sections is structure, and in the key.
DRAFTER_EXCLUDED = {
    "initializer_range": "used before training only",
    "max_position_embeddings": "recorded in checkpoints only: angles are computed from positions",
    "num_target_layers": "a property of the target",
    "target_layer_ids": "which layers are tapped is data; how many is in the features' shape",
    "layer_types": "given resolved",
}
LOSS_EXCLUDED = {
    "gamma": "enters through slot_weights",
    "dpace_alpha": "an input",
    "kl_weight": "an input",
    "temperature": "an input",
    "cap_weight": "an input",
}

# Example inputs favour a few tokens, in the labels and in the head, so that some guesses are right by chance.
FREQUENT_TOKENS = 4


def weights(loss: LossConfig, block_size: int, device: torch.device | str) -> dict[str, Tensor]:
    """Return the loss's scalars as tensor inputs: a sweep or a schedule needs no rebuild.

    `slot_weights` float32 [B-1] is exp(-(k-1)/gamma) for slot k; with D-PACE `dpace_alpha` is in its place.
    """
    scalars = {"kl_weight": loss.kl_weight, "temperature": loss.temperature, "cap_weight": loss.cap_weight}
    if loss.weighting == "gamma":
        first: Any = {"slot_weights": [math.exp(-k / loss.gamma) for k in range(block_size - 1)]}
    else:
        first = {"dpace_alpha": loss.dpace_alpha}
    return {
        name: torch.tensor(value, dtype=torch.float32, device=device)
        for name, value in (first | scalars).items()
    }


def _structure(section: Any, excluded: Mapping[str, str]) -> dict[str, Any]:
    """A config section without the excluded fields, as JSON without floats."""
    values = section.model_dump(mode="json")
    return {k: repr(v) if isinstance(v, float) else v for k, v in values.items() if k not in excluded}


class DrafterProgram(Program):
    """What both steps share. Inputs: parameters, frozen embedding and head, the batch, the loss's weights."""

    discrete_outputs = frozenset({"accept", "slot_correct", "cap"})

    def __init__(self, config: DrafterConfig, loss: LossConfig):
        self.config = config
        self.loss = loss
        self.device_type = "cuda" if config.attention == "flex" else "cpu"

    @property
    def identity(self) -> Mapping[str, Any]:
        drafter = _structure(self.config, DRAFTER_EXCLUDED)
        drafter["layer_types"] = list(self.config.resolved_layer_types)
        return {"drafter": drafter, "loss": _structure(self.loss, LOSS_EXCLUDED)}

    @property
    def source_modules(self) -> tuple[str, ...]:
        return ("dflash.drafter.step",)

    def check_bucket(self, bucket: Bucket) -> None:
        size = self.config.block_size
        multiple = TILE // math.gcd(TILE, size)
        tokens, anchors = -(-bucket.tokens // TILE) * TILE, -(-bucket.anchors // multiple) * multiple
        if (tokens, anchors) != (bucket.tokens, bucket.anchors):
            raise ConfigError(
                f"bucket {bucket}: tokens and anchors x block size {size} must be multiples of {TILE}",
                f"use `{tokens}x{anchors}`",
            )

    def _input_specs(self, bucket: Bucket) -> tuple[TensorSpec, ...]:
        c, T, A = self.config, bucket.tokens, bucket.anchors
        H, V = c.hidden_size, c.vocab_size
        shapes = {f"{step.PARAMETER_PREFIX}{name}": shape for name, shape in parameter_shapes(c).items()}
        shapes |= {"embed_tokens": (V, H), "lm_head": (V, H)}
        specs = [TensorSpec(name, shape, c.dtype) for name, shape in shapes.items()]
        specs += [
            TensorSpec("features", (T, len(c.target_layer_ids) * H), c.dtype),
            TensorSpec("teacher_hidden", (T, H), c.dtype),
            TensorSpec("input_ids", (T,), "int64"),
            TensorSpec("position_ids", (T,), "int32"),
            TensorSpec("doc_ids", (T,), "int32"),
            TensorSpec("loss_mask", (T,), "bool"),
            TensorSpec("context_start", (A,), "int32"),
            TensorSpec("anchors", (A,), "int32"),
            TensorSpec("anchor_valid", (A,), "bool"),
        ]
        gamma = self.loss.weighting == "gamma"
        specs.append(
            TensorSpec("slot_weights", (c.block_size - 1,), "float32")
            if gamma
            else TensorSpec("dpace_alpha", (), "float32")
        )
        return (
            *specs,
            *(TensorSpec(name, (), "float32") for name in ("kl_weight", "temperature", "cap_weight")),
        )

    def _output_specs(self, bucket: Bucket) -> tuple[TensorSpec, ...]:
        scalars = ("loss", "ce", "kl", "cap", "anchors", "accept")
        per_slot = ("slot_ce", "slot_correct", "slot_count")
        slot_shape = (self.config.block_size - 1,)
        return (
            *(TensorSpec(name, (), "float32") for name in scalars),
            *(TensorSpec(name, slot_shape, "float32") for name in per_slot),
        )

    def call_spec(self, bucket: Bucket) -> CallSpec:
        return CallSpec(self.device_type, self._input_specs(bucket), self._output_specs(bucket))

    @abstractmethod
    def run(self, config: DrafterConfig, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The step itself, under this config (its attention backend may differ from the program's)."""

    def function(self, bucket: Bucket) -> Callable[..., tuple[Tensor, ...]]:
        return self._positional(bucket, self.config)

    def _positional(self, bucket: Bucket, config: DrafterConfig) -> Callable[..., tuple[Tensor, ...]]:
        spec = self.call_spec(bucket)
        input_names, output_names = spec.input_names, spec.output_names

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            outputs = self.run(config, dict(zip(input_names, tensors, strict=True)))
            return tuple(outputs[name] for name in output_names)

        return run

    def reference(self, bucket: Bucket, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same step in float64 with dense attention, uncompiled."""
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        return self._positional(bucket, self.config.model_copy(update={"attention": "sdpa"}))(*wide)

    def example_inputs(self, bucket: Bucket, seed: int, device: torch.device) -> tuple[Tensor, ...]:
        """Random parameters and a packed row of several documents with padding, holes and invalid anchors."""
        layout = example_layout(bucket, self.config.block_size, seed)
        generator = torch.Generator(device).manual_seed(seed)
        fixed = weights(self.loss, self.config.block_size, device)
        inputs = []
        for spec in self._input_specs(bucket):
            if spec.name in fixed:
                value = fixed[spec.name]
            elif spec.name in layout:
                value = torch.from_numpy(layout[spec.name]).to(device)
            elif spec.name == "input_ids":
                rare, frequent = (
                    torch.randint(high, spec.shape, generator=generator, device=device)
                    for high in (self.config.vocab_size, FREQUENT_TOKENS)
                )
                value = torch.where(
                    torch.rand(spec.shape, generator=generator, device=device) < 0.25, rare, frequent
                )
            else:
                value = torch.randn(spec.shape, generator=generator, device=device)
                value = (_center(spec) + _scale(spec) * value).to(getattr(torch, spec.dtype))
                if spec.name == "lm_head":
                    value[:FREQUENT_TOKENS] *= 4
            inputs.append(value)
        return tuple(inputs)


def _center(spec: TensorSpec) -> float:
    return 1.0 if len(spec.shape) == 1 else 0.0


def _scale(spec: TensorSpec) -> float:
    """Norm weights lie near 1, activations have unit variance, matrices keep their input's."""
    if len(spec.shape) == 1:
        return 0.1
    return 1.0 if spec.name in ("features", "teacher_hidden", "embed_tokens") else spec.shape[1] ** -0.5


def example_layout(bucket: Bucket, block_size: int, seed: int) -> dict[str, np.ndarray]:
    """Return the integer part of a packed row: four documents, an eighth of padding, some invalid anchors.

    Every document's last candidate is an anchor, so that some blocks run past their document.
    """
    random = np.random.Generator(np.random.Philox(seed))
    T, A = bucket.tokens, bucket.anchors
    used = T - T // 8
    cuts = np.sort(random.choice(np.arange(4, used - 4, 4), size=3, replace=False))
    lengths = np.diff([0, *cuts, used])
    doc_ids = np.full(T, -1, np.int32)
    position_ids = np.zeros(T, np.int32)
    starts = np.zeros(T, np.int32)
    loss_mask = random.random(T) < 0.9
    last = []
    for document, (end, length) in enumerate(zip(np.cumsum(lengths), lengths, strict=True)):
        start = end - length
        doc_ids[start:end], starts[start:end] = document, start
        position_ids[start:end] = np.arange(length)
        loss_mask[start] = False
        loss_mask[end - 2 : end] = True
        last.append(end - 2)
    loss_mask &= doc_ids >= 0
    follows = np.append(loss_mask[1:] & (doc_ids[1:] == doc_ids[:-1]), False)
    candidates = np.setdiff1d(np.flatnonzero(loss_mask & follows & (position_ids >= 1)), last)
    wanted = min(A - max(1, A // 8), len(candidates) + len(last)) - len(last)
    valid = np.sort([*last, *random.choice(candidates, size=wanted, replace=False)]).astype(np.int32)
    anchors = np.full(A, T - 1, np.int32)
    anchors[: len(valid)] = valid
    context_start = anchors.copy()
    context_start[: len(valid)] = starts[valid]
    return {
        "position_ids": position_ids,
        "doc_ids": doc_ids,
        "loss_mask": loss_mask,
        "context_start": context_start,
        "anchors": anchors,
        "anchor_valid": np.arange(A) < len(valid),
    }


class TrainStep(DrafterProgram):
    """Loss, metrics and the gradient of every parameter."""

    name = "train_step"

    def _output_specs(self, bucket: Bucket) -> tuple[TensorSpec, ...]:
        grads = (
            TensorSpec(f"grad.{name}", shape, self.config.dtype)
            for name, shape in parameter_shapes(self.config).items()
        )
        return (*super()._output_specs(bucket), *grads)

    def run(self, config: DrafterConfig, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return step.train_step(config, self.loss, inputs)


class EvalStep(DrafterProgram):
    """Loss and metrics, also per block."""

    name = "eval_step"

    def _output_specs(self, bucket: Bucket) -> tuple[TensorSpec, ...]:
        per_block = (TensorSpec(name, (bucket.anchors,), "float32") for name in ("block_ce", "block_count"))
        return (*super()._output_specs(bucket), *per_block)

    def run(self, config: DrafterConfig, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return step.eval_step(config, self.loss, inputs)


def make_programs(config: RunConfig) -> tuple[TrainStep, EvalStep]:
    """Return the run's two programs."""
    return TrainStep(config.drafter, config.loss), EvalStep(config.drafter, config.loss)


def program_set(run_file: str, overrides: Sequence[str]) -> ProgramSet:
    """Entry point of group `aot.programs`: the programs, buckets and sizes of a run file or recipe."""
    from dflash.config import load_config
    from dflash.train.plan import run_histogram

    config = load_config(run_file, overrides)
    return ProgramSet(make_programs(config), config.data.resolved_buckets, run_histogram(config))
