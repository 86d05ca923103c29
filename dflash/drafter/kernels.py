"""The loss over the vocabulary in two passes, as Triton operators that export and land in a package.

Per row (one supervised slot) with drafter logits z, target logits y, label l and temperature T:

    p = softmax(z)    q = softmax(z / T)    t = softmax(y / T)
    CE      = lse(z) - z_l                       dCE/dz  = p - onehot(l)
    KL      = sum t * (y - z) / T - lse(y / T) + lse(z / T)
                                                 dKL/dz  = (q - t) / T
    entropy = lse(z) - sum p * z                 dH/dz   = -p * (z - lse(z) + H)

`row_statistics` reads both logits once and keeps every sum online, in float32. `logit_gradient` reads them
once more and writes

    dz = ce_scale * (p - onehot(l)) + kl_scale * (q - t) - cap_scale * p * (z - lse(z) + H)

so the backward of the loss needs no float32 tensor over the vocabulary and no autograd. Logits stay in the
dtype that the matrix product left them in. A logit of -inf counts as -1e30: it has probability zero and adds
nothing, but to the KL where the target has mass there. The naive twin is `dflash.drafter.loss.block_loss`.

Offsets are 64-bit: rows x vocabulary passes 2^31 at the reference bucket.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

#: Columns per tile and tiles per step: a row's sums are kept per lane, so that no step waits for its warps.
STATISTICS_TILE, STATISTICS_PARTS = 1024, 2
GRADIENT_TILE, GRADIENT_STEPS = 1024, 8
WARPS = 4
#: Stands for -inf, whose difference with itself is NaN.
LOWEST = -1e30
#: Rows of the float32 tensor that `row_statistics` returns; the lse are relative to the label's logit.
STATISTICS = ("ce", "kl", "entropy", "correct", "lse", "tempered_lse", "teacher_lse")
#: Rows of the float32 tensor that `logit_gradient` takes.
SCALES = ("ce", "kl", "cap")


@triton.jit
def _load_logits(pointer, inside, LOWEST: tl.constexpr):
    return tl.maximum(tl.load(pointer, mask=inside, other=LOWEST).to(tl.float32), LOWEST)


@triton.jit
def _origin(logit, LOWEST: tl.constexpr):
    """What logits are taken relative to, so that a common offset costs no digits: the label's."""
    return tl.where(logit > LOWEST, logit, 0.0)


@triton.jit
def _row_statistics(
    logits_ptr, teacher_ptr, label_ptr, supervised_ptr, temperature_ptr, out_ptr, R, V,
    TILE: tl.constexpr, PARTS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    supervised = tl.load(supervised_ptr + row) != 0
    if not supervised:
        for i in tl.static_range(7):
            tl.store(out_ptr + i * R + row, 0.0)
        return
    label = tl.load(label_ptr + row)
    inverse = 1.0 / tl.load(temperature_ptr).to(tl.float32)
    start = row.to(tl.int64) * V
    label_logit = _load_logits(logits_ptr + start + label, True, LOWEST)
    zero_z = _origin(label_logit, LOWEST)
    zero_y = _origin(_load_logits(teacher_ptr + start + label, True, LOWEST), LOWEST)
    label_logit -= zero_z
    lane = tl.arange(0, PARTS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    best = tl.full([TILE], LOWEST, tl.float32)
    best_teacher = tl.full([TILE], LOWEST, tl.float32)
    plain = tl.zeros([TILE], tl.float32)
    tempered = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE], tl.float32)
    teacher_sum = tl.zeros([TILE], tl.float32)
    cross = tl.zeros([TILE], tl.float32)
    # Of equal logits an argmax takes the first.
    earlier = tl.zeros([TILE], tl.int32)
    for first in range(0, V, PARTS * TILE):
        column = first + lane
        z = _load_logits(logits_ptr + start + column, column < V, LOWEST) - zero_z
        y = _load_logits(teacher_ptr + start + column, column < V, LOWEST) - zero_y
        earlier += tl.sum(((z == label_logit) & (column < label)).to(tl.int32), axis=0)

        now = tl.maximum(best, tl.max(z, axis=0))
        fade = tl.exp(best - now)
        e = tl.exp(z - now[None, :])
        plain = plain * fade + tl.sum(e, axis=0)
        weighted = weighted * fade + tl.sum(e * z, axis=0)
        tempered *= tl.exp((best - now) * inverse)
        tempered += tl.sum(tl.exp((z - now[None, :]) * inverse), axis=0)
        best = now

        now = tl.maximum(best_teacher, tl.max(y, axis=0))
        fade = tl.exp((best_teacher - now) * inverse)
        e = tl.exp((y - now[None, :]) * inverse)
        teacher_sum = teacher_sum * fade + tl.sum(e, axis=0)
        cross = cross * fade + tl.sum(e * (y - z), axis=0)
        best_teacher = now
    highest = tl.max(best, axis=0)
    teacher_highest = tl.max(best_teacher, axis=0)
    fade = tl.exp(best - highest)
    total = tl.sum(plain * fade, axis=0)
    lse = highest + tl.log(total)
    tempered_total = tl.sum(tempered * tl.exp((best - highest) * inverse), axis=0)
    tempered_lse = highest * inverse + tl.log(tempered_total)
    teacher_fade = tl.exp((best_teacher - teacher_highest) * inverse)
    teacher_total = tl.sum(teacher_sum * teacher_fade, axis=0)
    teacher_lse = teacher_highest * inverse + tl.log(teacher_total)
    mean_gap = tl.sum(cross * teacher_fade, axis=0) / teacher_total
    out = out_ptr + row
    tl.store(out, lse - label_logit)
    tl.store(out + R, mean_gap * inverse - teacher_lse + tempered_lse)
    tl.store(out + 2 * R, lse - tl.sum(weighted * fade, axis=0) / total)
    tl.store(out + 3 * R, ((highest <= label_logit) & (tl.sum(earlier, axis=0) == 0)).to(tl.float32))
    tl.store(out + 4 * R, lse)
    tl.store(out + 5 * R, tempered_lse)
    tl.store(out + 6 * R, teacher_lse)


@triton.jit
def _logit_gradient(
    logits_ptr, teacher_ptr, label_ptr, temperature_ptr, statistics_ptr, scales_ptr, out_ptr, R, V,
    TILE: tl.constexpr, STEPS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = row.to(tl.int64) * V
    label = tl.load(label_ptr + row)
    inverse = 1.0 / tl.load(temperature_ptr).to(tl.float32)
    zero_z = _origin(_load_logits(logits_ptr + start + label, True, LOWEST), LOWEST)
    zero_y = _origin(_load_logits(teacher_ptr + start + label, True, LOWEST), LOWEST)
    ce_scale = tl.load(scales_ptr + row)
    kl_scale = tl.load(scales_ptr + R + row)
    cap_scale = tl.load(scales_ptr + 2 * R + row)
    entropy = tl.load(statistics_ptr + 2 * R + row)
    lse = tl.load(statistics_ptr + 4 * R + row)
    tempered_lse = tl.load(statistics_ptr + 5 * R + row)
    teacher_lse = tl.load(statistics_ptr + 6 * R + row)
    live = (ce_scale != 0.0) | (kl_scale != 0.0) | (cap_scale != 0.0)
    # A row without loss may hold anything: it is not read, and its gradient is zero.
    readable = tl.where(live, V, 0)
    first = tl.program_id(1) * (TILE * STEPS)
    for step in range(STEPS):
        column = first + step * TILE + tl.arange(0, TILE)
        z = _load_logits(logits_ptr + start + column, column < readable, LOWEST) - zero_z
        y = _load_logits(teacher_ptr + start + column, column < readable, LOWEST) - zero_y
        p = tl.exp(z - lse)
        q = tl.exp(z * inverse - tempered_lse)
        t = tl.exp(y * inverse - teacher_lse)
        gradient = ce_scale * (p - (column == label).to(tl.float32)) + kl_scale * (q - t)
        gradient -= cap_scale * p * (z - lse + entropy)
        tl.store(out_ptr + start + column, gradient.to(out_ptr.dtype.element_ty), mask=column < V)


@triton_op("dflash_aot::row_statistics", mutates_args=())
def row_statistics(
    logits_RV: Tensor, teacher_RV: Tensor, label_R: Tensor, supervised_R: Tensor, temperature: Tensor
) -> Tensor:
    """Return STATISTICS [7, R] in float32, all zero where a row is not supervised.

    Logits are contiguous and of any float dtype, labels int64, `supervised_R` bool, temperature 0-d.
    """
    rows, vocabulary = logits_RV.shape
    out = torch.empty((len(STATISTICS), rows), dtype=torch.float32, device=logits_RV.device)
    wrap_triton(_row_statistics)[(rows,)](
        logits_RV, teacher_RV, label_R, supervised_R, temperature, out, rows, vocabulary,
        TILE=STATISTICS_TILE, PARTS=STATISTICS_PARTS, LOWEST=LOWEST, num_warps=WARPS,
    )  # fmt: skip
    return out


@row_statistics.register_fake
def _(logits_RV, teacher_RV, label_R, supervised_R, temperature):
    return logits_RV.new_empty((len(STATISTICS), logits_RV.shape[0]), dtype=torch.float32)


@triton_op("dflash_aot::logit_gradient", mutates_args=())
def logit_gradient(
    logits_RV: Tensor,
    teacher_RV: Tensor,
    label_R: Tensor,
    temperature: Tensor,
    statistics_7R: Tensor,
    scales_3R: Tensor,
) -> Tensor:
    """Return the gradient of the loss by the logits, [R, V] in their dtype; `scales_3R` as SCALES says."""
    rows, vocabulary = logits_RV.shape
    out = torch.empty_like(logits_RV)
    wrap_triton(_logit_gradient)[(rows, triton.cdiv(vocabulary, GRADIENT_TILE * GRADIENT_STEPS))](
        logits_RV, teacher_RV, label_R, temperature, statistics_7R, scales_3R, out, rows, vocabulary,
        TILE=GRADIENT_TILE, STEPS=GRADIENT_STEPS, LOWEST=LOWEST, num_warps=WARPS,
    )  # fmt: skip
    return out


@logit_gradient.register_fake
def _(logits_RV, teacher_RV, label_R, temperature, statistics_7R, scales_3R):
    return torch.empty_like(logits_RV)
