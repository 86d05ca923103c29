"""The loss over supervised block slots, in chunks of anchors, so that no Q x V tensor ever exists whole.

    loss = (1 - kl_weight) * CE + kl_weight * temperature^2 * KL + cap_weight * CAP

KL is from the target to the drafter, both at temperature. Each term is a sum over supervised slots, weighted
per slot. S = B - 1 slots of a block carry loss: slot 0 is the anchor itself. CAP is the entropy of the slots
whose argmax is right: it rewards confidence where it is earned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.drafter.model import at_least_float32

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dflash.config import LossConfig

# Each chunk is one more copy of the loss in the graph: more chunks compile for longer.
MAX_CHUNKS = 16


@dataclass(frozen=True)
class Slots:
    """What slots 1..B-1 of each anchor are trained on."""

    label_AS: Tensor
    supervised_AS: Tensor
    teacher_index_AS: Tensor

    def rows(self, chunk: slice) -> Slots:
        return Slots(self.label_AS[chunk], self.supervised_AS[chunk], self.teacher_index_AS[chunk])


@dataclass(frozen=True)
class BlockLoss:
    """Weighted sums (0-d) and unweighted values per slot [A, S], zero where a slot is not supervised."""

    loss: Tensor
    ce: Tensor
    kl: Tensor
    cap: Tensor
    slot_ce_AS: Tensor
    correct_AS: Tensor


def slots(batch: Mapping[str, Tensor], block_size: int) -> Slots:
    """Slot k of the anchor at index a has label `input_ids[a+k]`; its teacher is the target's state at a+k-1.

    A slot is supervised if its anchor is valid, and its token is in the anchor's document and in `loss_mask`.
    """
    last = batch["input_ids"].shape[0] - 1
    anchor_A1 = batch["anchors"].long()[:, None]
    unclamped_AS = anchor_A1 + torch.arange(1, block_size, device=anchor_A1.device)
    index_AS = unclamped_AS.clamp(max=last)
    same_document_AS = (unclamped_AS <= last) & (batch["doc_ids"][index_AS] == batch["doc_ids"][anchor_A1])
    return Slots(
        label_AS=batch["input_ids"][index_AS],
        supervised_AS=same_document_AS & batch["loss_mask"][index_AS] & batch["anchor_valid"][:, None],
        teacher_index_AS=(unclamped_AS - 1).clamp(max=last),
    )


def chunks(anchors: int, slots_per_anchor: int, max_rows: int) -> Iterator[slice]:
    """Cut the anchors into equal runs of at most `max_rows` rows of logits, but no more than 16 runs."""
    most = max(1, max_rows // slots_per_anchor)
    size = -(-anchors // min(-(-anchors // most), MAX_CHUNKS))
    for first in range(0, anchors, size):
        yield slice(first, min(first + size, anchors))


def slot_weights(
    loss: LossConfig, weights: Mapping[str, Tensor], slot_ce_AS: Tensor, supervised_AS: Tensor
) -> Tensor:
    """Return the weight of each slot [A, S], 0 where it is not supervised.

    D-PACE weighs slot k by how far the block is likely to be accepted from there on: the sum over supervised
    m >= k of the product of the smoothed confidences of supervised slots 1..m. It carries no gradient.
    """
    if loss.weighting == "gamma":
        return torch.where(supervised_AS, weights["slot_weights"], 0.0)
    alpha = weights["dpace_alpha"]
    confidence_AS = (1 - alpha) * torch.exp(-slot_ce_AS.detach()) + alpha
    accepted_AS = torch.where(supervised_AS, confidence_AS, 1.0).cumprod(-1)
    reach_AS = torch.where(supervised_AS, accepted_AS, 0.0)
    return torch.where(supervised_AS, reach_AS.flip(-1).cumsum(-1).flip(-1), 0.0)


def block_loss(
    config: LossConfig,
    hidden_ASH: Tensor,
    teacher_hidden_TH: Tensor,
    lm_head_VH: Tensor,
    slots: Slots,
    weights: Mapping[str, Tensor],
) -> BlockLoss:
    """Return the loss of a chunk of anchors from the drafter's normed hidden states of slots 1..B-1."""
    temperature = weights["temperature"]
    # Two-dimensional on purpose: a product over [A, S, H] may copy the head once for each anchor.
    logits_RV = at_least_float32(F.linear(hidden_ASH.flatten(0, 1), lm_head_VH))
    teacher_RH = teacher_hidden_TH[slots.teacher_index_AS.flatten()]
    teacher_RV = at_least_float32(F.linear(teacher_RH, lm_head_VH))
    log_p_RV = F.log_softmax(logits_RV, dim=-1)
    log_q_RV = F.log_softmax(logits_RV / temperature, dim=-1)
    log_target_RV = F.log_softmax(teacher_RV / temperature, dim=-1)

    shape = slots.label_AS.shape
    nll_AS = F.nll_loss(log_p_RV, slots.label_AS.flatten(), reduction="none").view(shape)
    ce_AS = torch.where(slots.supervised_AS, nll_AS, 0.0)
    kl_AS = (log_target_RV.exp() * (log_target_RV - log_q_RV)).sum(-1).view(shape)
    entropy_AS = -(log_p_RV.exp() * log_p_RV).sum(-1).view(shape)
    correct_AS = (logits_RV.argmax(-1).view(shape) == slots.label_AS) & slots.supervised_AS

    weight_AS = slot_weights(config, weights, ce_AS, slots.supervised_AS)
    return _weighted(weight_AS, ce_AS, kl_AS, entropy_AS, correct_AS, weights)


def _weighted(
    weight_AS: Tensor,
    ce_AS: Tensor,
    kl_AS: Tensor,
    entropy_AS: Tensor,
    correct_AS: Tensor,
    weights: Mapping[str, Tensor],
) -> BlockLoss:
    ce = (weight_AS * ce_AS).sum()
    kl = (weight_AS * kl_AS).sum()
    cap = (torch.where(correct_AS, weight_AS, 0.0) * entropy_AS).sum()
    loss = (
        (1 - weights["kl_weight"]) * ce
        + weights["kl_weight"] * weights["temperature"] ** 2 * kl
        + weights["cap_weight"] * cap
    )
    return BlockLoss(loss, ce, kl, cap, ce_AS, correct_AS)


def loss_and_gradient(
    config: LossConfig,
    hidden_ASH: Tensor,
    teacher_hidden_TH: Tensor,
    lm_head_VH: Tensor,
    slots: Slots,
    weights: Mapping[str, Tensor],
) -> tuple[BlockLoss, Tensor]:
    """`block_loss` and the gradient of its loss by `hidden_ASH`, by autograd."""
    leaf = hidden_ASH.detach().requires_grad_()
    part = block_loss(config, leaf, teacher_hidden_TH, lm_head_VH, slots, weights)
    return part, torch.autograd.grad(part.loss, leaf)[0]


@dataclass(frozen=True)
class _Rows:
    """What the Triton operators work on: one row of logits per slot, and what was summed over it."""

    logits_RV: Tensor
    teacher_RV: Tensor
    label_R: Tensor
    statistics_7R: Tensor
    weight_AS: Tensor
    loss: BlockLoss


def _fused(
    config: LossConfig,
    hidden_ASH: Tensor,
    teacher_hidden_TH: Tensor,
    lm_head_VH: Tensor,
    slots: Slots,
    weights: Mapping[str, Tensor],
) -> _Rows:
    # Late: Triton is there on GPU machines only.
    from dflash.drafter.kernels import STATISTICS, row_statistics

    logits_RV = F.linear(hidden_ASH.detach().flatten(0, 1), lm_head_VH)
    teacher_RV = F.linear(teacher_hidden_TH[slots.teacher_index_AS.flatten()], lm_head_VH)
    label_R, supervised_R = slots.label_AS.flatten(), slots.supervised_AS.flatten()
    statistics_7R = row_statistics(logits_RV, teacher_RV, label_R, supervised_R, weights["temperature"])
    per_slot = dict(zip(STATISTICS, statistics_7R.view(-1, *slots.label_AS.shape).unbind(), strict=True))
    weight_AS = slot_weights(config, weights, per_slot["ce"], slots.supervised_AS)
    loss = _weighted(
        weight_AS, per_slot["ce"], per_slot["kl"], per_slot["entropy"], per_slot["correct"] > 0, weights
    )
    return _Rows(logits_RV, teacher_RV, label_R, statistics_7R, weight_AS, loss)


def fused_block_loss(
    config: LossConfig,
    hidden_ASH: Tensor,
    teacher_hidden_TH: Tensor,
    lm_head_VH: Tensor,
    slots: Slots,
    weights: Mapping[str, Tensor],
) -> BlockLoss:
    """`block_loss` through the Triton operators: logits in the head's dtype, sums over V in float32."""
    return _fused(config, hidden_ASH, teacher_hidden_TH, lm_head_VH, slots, weights).loss


def fused_loss_and_gradient(
    config: LossConfig,
    hidden_ASH: Tensor,
    teacher_hidden_TH: Tensor,
    lm_head_VH: Tensor,
    slots: Slots,
    weights: Mapping[str, Tensor],
) -> tuple[BlockLoss, Tensor]:
    """`loss_and_gradient` through the Triton operators; the gradient is in closed form."""
    from dflash.drafter.kernels import logit_gradient

    rows = _fused(config, hidden_ASH, teacher_hidden_TH, lm_head_VH, slots, weights)
    temperature, kl_weight = weights["temperature"], weights["kl_weight"]
    scales_3AS = torch.stack(
        (
            (1 - kl_weight) * rows.weight_AS,
            kl_weight * temperature * rows.weight_AS,
            weights["cap_weight"] * torch.where(rows.loss.correct_AS, rows.weight_AS, 0.0),
        )
    )
    gradient_RV = logit_gradient(
        rows.logits_RV,
        rows.teacher_RV,
        rows.label_R,
        temperature,
        rows.statistics_7R,
        scales_3AS.flatten(1),
    )
    return rows.loss, (gradient_RV @ lm_head_VH).view_as(hidden_ASH)
