"""One attention interface, two backends: `sdpa` with a dense mask (CPU), `flex` with index tables (CUDA).

Both take a query [heads, Q, D] and key, value [kv_heads, K, D] and return [heads, Q, D].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch.nn.attention.flex_attention import BlockMask

from dflash.drafter.block_mask import TILE

if TYPE_CHECKING:
    from dflash.drafter.block_mask import MaskRule

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# What the public `flex_attention` passes on. Rows are not safe: one may be empty in the first tile it meets.
KERNEL_OPTIONS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def _same_score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score


def sdpa(mask_QK: Tensor) -> Attend:
    """Attention under a dense bool mask [Q, K]."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[0] // key.shape[0]
        key, value = (t.repeat_interleave(groups, dim=0) for t in (key, value))
        return F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask_QK)[0]

    return attend


def flex(rule: MaskRule, context_start_A: Tensor, anchors_A: Tensor) -> Attend:
    """Block-sparse attention; K and V stay at kv_heads.

    The operator is called directly: the public function compiles itself on every eager call. The two
    tensors must be inputs of the traced graph: buffers of `mask_mod` computed in it can fail to lower.
    """
    tables = rule.flex_tables(context_start_A, anchors_A)
    for name, table in tables.items():
        assert table.is_contiguous(), f"{name} would give wrong gradients, silently"
    queries = anchors_A.shape[0] * rule.block_size

    def mask_mod(batch, head, query, key, context_start_A, anchors_A):
        return rule.visible(query, key, context_start_A, anchors_A)

    block_mask = BlockMask(
        **tables, BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod, seq_lengths=(queries, rule.tokens + queries)
    ).as_tuple()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention_hop(
            query[None],
            key[None],
            value[None],
            _same_score,
            block_mask,
            query.shape[-1] ** -0.5,
            KERNEL_OPTIONS,
            (),
            (context_start_A, anchors_A),
        )[0][0]

    return attend


def make_attend(backend: str, rule: MaskRule, context_start_A: Tensor, anchors_A: Tensor) -> Attend:
    """Return the attention of one layer type over one packed micro-batch."""
    if backend == "flex":
        return flex(rule, context_start_A, anchors_A)
    return sdpa(rule.dense(context_start_A, anchors_A))
