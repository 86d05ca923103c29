"""The pure functions that are compiled: one training step, one evaluation step.

Both take every tensor by name and return every tensor by name. Values are sums over the micro-batch's valid
anchors, beside their count: the optimizer divides once, by the count of all micro-batches of its step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.drafter.attention import make_attend
from dflash.drafter.block_mask import mask_rule
from dflash.drafter.loss import (
    BlockLoss,
    Slots,
    block_loss,
    chunks,
    fused_block_loss,
    fused_loss_and_gradient,
    loss_and_gradient,
    slots,
)
from dflash.drafter.model import Parameters, forward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash.config import DrafterConfig, LossConfig

PARAMETER_PREFIX = "param."


def parameters_of(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the drafter's parameters among a step's inputs, by checkpoint name."""
    return {k.removeprefix(PARAMETER_PREFIX): v for k, v in inputs.items() if k.startswith(PARAMETER_PREFIX)}


def block_hidden(config: DrafterConfig, params: Parameters, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the drafter's normed hidden states [A, B, H] of every block of the packed row."""
    anchors_A, size, tokens = inputs["anchors"], config.block_size, inputs["input_ids"].shape[0]
    block_ids_AB = torch.full((anchors_A.shape[0], size), config.mask_token_id, device=anchors_A.device)
    block_ids_AB = torch.cat((inputs["input_ids"][anchors_A.long()][:, None], block_ids_AB[:, 1:]), dim=1)
    slot_B = torch.arange(size, dtype=torch.int32, device=anchors_A.device)
    position_AB = inputs["position_ids"][anchors_A.long()][:, None] + slot_B
    attend = {
        layer_type: make_attend(
            config.attention, mask_rule(config, layer_type, tokens, size), inputs["context_start"], anchors_A
        )
        for layer_type in dict.fromkeys(config.resolved_layer_types)
    }
    hidden_QH = forward(
        config,
        params,
        inputs["features"],
        F.embedding(block_ids_AB.flatten(), inputs["embed_tokens"]),
        inputs["position_ids"],
        position_AB.flatten(),
        attend,
    )
    return hidden_QH.view(-1, size, config.hidden_size)


def _metrics(parts: list[BlockLoss], targets: Slots, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum the chunks. `accept` is the acceptance length summed: 1 + leading hits of each valid block."""
    ce_AS = torch.cat([part.slot_ce_AS for part in parts])
    correct_AS = torch.cat([part.correct_AS for part in parts]).to(ce_AS.dtype)
    valid_A = inputs["anchor_valid"].to(ce_AS.dtype)
    sums = {
        name: torch.stack([getattr(part, name).detach() for part in parts]).sum()
        for name in ("loss", "ce", "kl", "cap")
    }
    return sums | {
        "anchors": valid_A.sum(),
        "accept": (valid_A + correct_AS.cumprod(-1).sum(-1)).sum(),
        "slot_ce": ce_AS.detach().sum(0),
        "slot_correct": correct_AS.sum(0),
        "slot_count": targets.supervised_AS.to(ce_AS.dtype).sum(0),
    }


def train_step(config: DrafterConfig, loss: LossConfig, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return loss sums, metrics and `grad.<name>` of every parameter, for one packed micro-batch."""
    params = {name: value.detach().requires_grad_() for name, value in parameters_of(inputs).items()}
    hidden_ASH = block_hidden(config, params, inputs)[:, 1:]
    targets = slots(inputs, config.block_size)
    # The head's gradient is taken chunk by chunk, so that only one chunk's logits are alive.
    of_chunk = fused_loss_and_gradient if loss.fused_on(config.attention) else loss_and_gradient
    parts, hidden_grads = [], []
    for chunk in chunks(*targets.label_AS.shape, loss.max_chunk_rows):
        part, hidden_grad = of_chunk(
            loss, hidden_ASH[chunk], inputs["teacher_hidden"], inputs["lm_head"], targets.rows(chunk), inputs
        )
        parts.append(part)
        hidden_grads.append(hidden_grad)
    grads = torch.autograd.grad(hidden_ASH, tuple(params.values()), torch.cat(hidden_grads))
    named = {f"grad.{name}": grad for name, grad in zip(params, grads, strict=True)}
    return _metrics(parts, targets, inputs) | named


@torch.no_grad()
def eval_step(config: DrafterConfig, loss: LossConfig, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return loss sums and metrics, and per anchor the unweighted CE sum and the supervised slots."""
    hidden_ASH = block_hidden(config, parameters_of(inputs), inputs)[:, 1:]
    targets = slots(inputs, config.block_size)
    of_chunk = fused_block_loss if loss.fused_on(config.attention) else block_loss
    parts = [
        of_chunk(
            loss, hidden_ASH[chunk], inputs["teacher_hidden"], inputs["lm_head"], targets.rows(chunk), inputs
        )
        for chunk in chunks(*targets.label_AS.shape, loss.max_chunk_rows)
    ]
    ce_AS = torch.cat([part.slot_ce_AS for part in parts])
    return _metrics(parts, targets, inputs) | {
        "block_ce": ce_AS.sum(1),
        "block_count": targets.supervised_AS.to(ce_AS.dtype).sum(1),
    }
