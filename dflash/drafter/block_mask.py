"""Which keys a block may see, as a rule, as a dense mask and as FlexAttention's index tables.

Queries are A blocks of B slots (query q is slot q % B of block q // B). Keys are the T packed context
tokens, then the Q block slots themselves. A block sees its own document's context strictly before its anchor
(the anchor's own feature does not exist yet when the block is drafted), and itself; never another block. An
invalid anchor has an empty context (`context_start == anchor`) and keeps its own block, so that no softmax
row is empty.

Everything follows from two int32 tensors per anchor, so no Q x K tensor is needed to build the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dflash.config import DrafterConfig

TILE = 128


@dataclass(frozen=True)
class MaskRule:
    """The visibility rule of one kind of layer over T context tokens and blocks of B slots."""

    tokens: int
    block_size: int
    causal: bool = False
    window: int | None = None

    def visible(self, query: Tensor, key: Tensor, context_start_A: Tensor, anchors_A: Tensor) -> Tensor:
        """Return whether each query index sees each key index (broadcast), as bool.

        Written for scalars too: FlexAttention traces it as its `mask_mod`.
        """
        block = query // self.block_size
        slot = query - block * self.block_size
        anchor = anchors_A[block]
        key_slot = key - self.tokens - block * self.block_size
        in_context = (key >= context_start_A[block]) & (key < anchor)
        in_block = (key_slot >= 0) & (key_slot < self.block_size)
        if self.causal:
            in_block = in_block & (key_slot <= slot)
        if self.window is not None:
            in_context = in_context & (anchor + slot - key < self.window)
            in_block = in_block & (slot - key_slot < self.window) & (key_slot - slot < self.window)
        return in_context | in_block

    def dense(self, context_start_A: Tensor, anchors_A: Tensor) -> Tensor:
        """Return the whole mask, bool [Q, K]."""
        queries = anchors_A.shape[0] * self.block_size
        query_Q1 = torch.arange(queries, dtype=torch.int32, device=anchors_A.device)[:, None]
        key_K = torch.arange(self.tokens + queries, dtype=torch.int32, device=anchors_A.device)
        return self.visible(query_Q1, key_K, context_start_A, anchors_A)

    def _intervals(self, context_start_A: Tensor, anchors_A: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the key intervals [low, high) that each query sees, int32 [Q]: context, then own block."""
        size, anchors = self.block_size, anchors_A.shape[0]
        slot_B = torch.arange(size, dtype=torch.int32, device=anchors_A.device)
        block_A = torch.arange(anchors, dtype=torch.int32, device=anchors_A.device)
        low_B = torch.zeros_like(slot_B) if self.window is None else (slot_B - self.window + 1).clamp(min=0)
        high_B = (
            torch.full_like(slot_B, size) if self.window is None else (slot_B + self.window).clamp(max=size)
        )
        if self.causal:
            high_B = slot_B + 1
        context_low_AB = context_start_A[:, None].expand(anchors, size)
        if self.window is not None:
            context_low_AB = torch.maximum(context_low_AB, anchors_A[:, None] + slot_B - self.window + 1)
        first_A1 = (self.tokens + block_A * size)[:, None]
        return (
            (context_low_AB.reshape(-1), anchors_A[:, None].expand(anchors, size).reshape(-1)),
            ((first_A1 + low_B).reshape(-1), (first_A1 + high_B).reshape(-1)),
        )

    def flex_tables(self, context_start_A: Tensor, anchors_A: Tensor, tile: int = TILE) -> dict[str, Tensor]:
        """Return FlexAttention's eight index tables, contiguous int32, by their `BlockMask` names.

        T and Q must be multiples of `tile`. A tile is full where every query sees every key, partial where
        some do; what counts is how many (query, key) pairs of it are visible.
        """
        queries = anchors_A.shape[0] * self.block_size
        assert not self.tokens % tile, f"{self.tokens} context tokens are not whole tiles of {tile}"
        assert not queries % tile, f"{queries} queries are not whole tiles of {tile}"
        start_k = torch.arange(0, self.tokens + queries, tile, dtype=torch.int32, device=anchors_A.device)
        seen_Qk = torch.zeros((), dtype=torch.int32, device=anchors_A.device)
        for low_Q, high_Q in self._intervals(context_start_A, anchors_A):
            first_Qk = torch.maximum(low_Q[:, None], start_k)
            last_Qk = torch.minimum(high_Q[:, None], start_k + tile)
            seen_Qk = seen_Qk + (last_Qk - first_Qk).clamp(min=0)
        seen_qk = seen_Qk.view(queries // tile, tile, -1).sum(1, dtype=torch.int32)
        full_qk = seen_qk == tile * tile
        partial_qk = (seen_qk > 0) & ~full_qk
        tables = {}
        for prefix, tiles_qk in (("", partial_qk), ("full_", full_qk)):
            tables[f"{prefix}kv_num_blocks"], tables[f"{prefix}kv_indices"] = _ordered(tiles_qk)
            tables[f"{prefix}q_num_blocks"], tables[f"{prefix}q_indices"] = _ordered(tiles_qk.T)
        return tables


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's count of set tiles, [1, 1, rows], and their columns first, [1, 1, rows, columns].

    A transposed table gives silently wrong gradients of keys and values in compiled FlexAttention, so
    the rows are made contiguous before they are sorted.
    """
    tiles = tiles.contiguous().to(torch.int32)
    columns = torch.argsort(tiles, dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], columns.to(torch.int32)[None, None]


def mask_rule(config: DrafterConfig, layer_type: str, tokens: int, block_size: int) -> MaskRule:
    """Return one layer type's rule.

    Without `is_causal` in the config, sliding layers are causal inside the block and full layers are not.
    """
    sliding = layer_type == "sliding_attention"
    causal = sliding if config.is_causal is None else config.is_causal
    return MaskRule(tokens, block_size, causal, config.sliding_window if sliding else None)
