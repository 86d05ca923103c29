"""The two shapes that the GPU path is measured at, their inputs, and how much arithmetic a step must do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aot.buckets import Bucket
from dflash.config import RunConfig, load_config
from dflash.drafter.programs import TrainStep, make_programs

RECIPE = "qwen3.6-27b-5x3"


@dataclass(frozen=True)
class Shape:
    """A bucket of the reference recipe under overrides; `document` is the length of every document."""

    name: str
    bucket: Bucket
    document: int
    overrides: tuple[str, ...] = ()

    def config(self, *more: str) -> RunConfig:
        return load_config(RECIPE, (*self.overrides, *more))

    def program(self, *more: str) -> TrainStep:
        return make_programs(self.config(*more))[0]


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "h2560",
            Bucket(8192, 512),
            2048,
            (
                "drafter.hidden_size=2560",
                "drafter.intermediate_size=9728",
                "drafter.vocab_size=151936",
                "drafter.mask_token_id=151669",
                "drafter.block_size=16",
                "loss.gamma=7.0",
                "data.token_budget=8192",
                "data.max_anchors=512",
                'data.buckets=["8192x512"]',
            ),
        ),
        Shape("reference", Bucket(49152, 1024), 6144, ('data.buckets=["49152x1024"]',)),
    )
}


def full_inputs(shape: Shape, program: TrainStep, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random inputs with every token supervised and every anchor valid, spread over equal documents."""
    names = program.call_spec(shape.bucket).input_names
    inputs = dict(zip(names, program.example_inputs(shape.bucket, seed, device), strict=True))
    T, A, length = shape.bucket.tokens, shape.bucket.anchors, shape.document
    token_T = torch.arange(T, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(seed)
    # One anchor in each of A equal runs of tokens, none at a document's first or last token.
    anchors_A = torch.arange(A) * (T // A) + torch.randint(1, T // A - 1, (A,), generator=generator)
    anchors_A = anchors_A.to(device, torch.int32)
    return inputs | {
        "position_ids": token_T % length,
        "doc_ids": token_T // length,
        "loss_mask": torch.ones(T, dtype=torch.bool, device=device),
        "anchors": anchors_A,
        "context_start": anchors_A // length * length,
        "anchor_valid": torch.ones(A, dtype=torch.bool, device=device),
    }


def step_tflop(shape: Shape, program: TrainStep, inputs: dict[str, torch.Tensor]) -> float:
    """Matrix arithmetic of one step, in 1e12 operations: forward and both gradients, attention as masked.

    The features need no gradient, so `fc` and the embedding have two products, the rest three; the head is
    frozen: drafter and teacher logits and one gradient.
    """
    c, T, A = program.config, shape.bucket.tokens, shape.bucket.anchors
    Q, H, D = A * c.block_size, c.hidden_size, c.head_dim
    queries, keys = c.num_heads * D, c.num_kv_heads * D
    per_query = 2 * H * queries + 2 * H * keys + 3 * H * c.intermediate_size
    layers = 3 * 2 * c.num_layers * (Q * per_query + T * 2 * H * keys)
    fc = 2 * 2 * T * len(c.target_layer_ids) * H * H
    head = 3 * 2 * A * (c.block_size - 1) * H * c.vocab_size
    pairs = (inputs["anchors"] - inputs["context_start"] + c.block_size).double().sum().item() * c.block_size
    # Two products forward, five backward.
    attention = 7 * 2 * c.num_layers * c.num_heads * D * pairs
    return (layers + fc + head + attention) / 1e12
