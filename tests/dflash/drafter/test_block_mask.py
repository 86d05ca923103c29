"""The analytic mask against loops; its index tables against the dense mask and `create_block_mask`."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from aot.buckets import Bucket
from dflash.drafter.attention import flex
from dflash.drafter.block_mask import MaskRule, mask_rule
from dflash.drafter.programs import example_layout
from tests.support.drafter import tiny_config

RULES = list(itertools.product((False, True), (None, 1, 2, 4)))


def splits(tokens):
    """Every way to cut a row into documents, as document ids; also with the last one turned into padding."""
    for cuts in itertools.product((0, 1), repeat=tokens - 1):
        ids = np.concatenate(([0], np.cumsum(cuts)))
        yield ids
        if ids[-1] > 0:
            yield np.where(ids == ids[-1], -1, ids)


def anchor_sets(doc_ids, count):
    """Every sorted choice of valid anchors, filled up with invalid ones: (context_start, anchors, valid)."""
    positions = [i for i, document in enumerate(doc_ids) if document >= 0]
    starts = [int(np.flatnonzero(doc_ids == document)[0]) for document in doc_ids]
    for valid in range(count + 1):
        for chosen in itertools.combinations(positions, valid):
            anchors = [*chosen, *[len(doc_ids) - 1] * (count - valid)]
            context_start = [starts[i] for i in chosen] + anchors[valid:]
            yield context_start, anchors, valid


def naive_mask(doc_ids, anchors, valid, size, causal, window):
    """The rule in words: own document strictly before the anchor, own block; windows are over positions."""
    tokens, queries = len(doc_ids), len(anchors) * size
    mask = np.zeros((queries, tokens + queries), bool)
    for q in range(queries):
        block, slot = divmod(q, size)
        anchor = anchors[block]
        for key in range(tokens):
            mask[q, key] = (
                block < valid
                and doc_ids[key] == doc_ids[anchor]
                and key < anchor
                and (window is None or anchor + slot - key < window)
            )
        for other in range(size):
            mask[q, tokens + block * size + other] = (not causal or other <= slot) and (
                window is None or abs(slot - other) < window
            )
    return mask


def tensors(context_start, anchors):
    return torch.tensor(context_start, dtype=torch.int32), torch.tensor(anchors, dtype=torch.int32)


@pytest.mark.parametrize(("tokens", "count", "size"), [(1, 1, 2), (3, 2, 3), (4, 2, 2), (5, 2, 2), (4, 3, 3)])
def test_dense_mask_equals_loops_over_every_small_layout(tokens, count, size):
    checked = 0
    for doc_ids in splits(tokens):
        for context_start, anchors, valid in anchor_sets(doc_ids, count):
            for causal, window in RULES:
                mask = MaskRule(tokens, size, causal, window).dense(*tensors(context_start, anchors)).numpy()
                expected = naive_mask(doc_ids, anchors, valid, size, causal, window)
                assert np.array_equal(mask, expected), (doc_ids, anchors, valid, causal, window)
                assert mask.any(1).all(), "a softmax row is empty"
                checked += 1
    assert checked >= 8


def naive_tiles(mask, tile):
    """(partial, full) tiles of a dense mask."""
    tiles = mask.reshape(mask.shape[0] // tile, tile, mask.shape[1] // tile, tile)
    some, every = tiles.any((1, 3)), tiles.all((1, 3))
    return some & ~every, every


def listed(counts, indices):
    """The tiles that a pair of tables names, as a mask."""
    named = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        named[row, indices[0, 0, row, :count].long()] = True
    return named.numpy()


@pytest.mark.parametrize(
    ("tokens", "count", "size", "tile"), [(4, 2, 2, 2), (4, 2, 3, 2), (4, 2, 4, 2), (6, 2, 3, 3)]
)
def test_index_tables_equal_the_dense_mask_over_every_small_layout(tokens, count, size, tile):
    """Tiles that hold several blocks, that cut blocks, and that are smaller than a block."""
    for doc_ids in splits(tokens):
        for context_start, anchors, _ in anchor_sets(doc_ids, count):
            for causal, window in RULES:
                rule, inputs = MaskRule(tokens, size, causal, window), tensors(context_start, anchors)
                partial, full = naive_tiles(rule.dense(*inputs).numpy(), tile)
                tables = rule.flex_tables(*inputs, tile=tile)
                for prefix, expected in (("", partial), ("full_", full)):
                    rows = listed(tables[f"{prefix}kv_num_blocks"], tables[f"{prefix}kv_indices"])
                    columns = listed(tables[f"{prefix}q_num_blocks"], tables[f"{prefix}q_indices"])
                    assert np.array_equal(rows, expected), (doc_ids, anchors, causal, window, prefix)
                    assert np.array_equal(columns, expected.T), (doc_ids, anchors, causal, window, prefix)


def random_layout(bucket, size):
    layout = example_layout(Bucket.parse(bucket), size, seed=3)
    return layout["context_start"], layout["anchors"]


@pytest.mark.parametrize(("causal", "window"), RULES)
@pytest.mark.parametrize(
    ("tokens", "size", "tile", "layout"),
    [
        (128, 4, 16, random_layout("128x16", 4)),
        (128, 10, 32, random_layout("128x64", 10)),
        (384, 8, 128, ([0] * 32, range(256, 288))),
    ],
    ids=["four documents", "tiles cut blocks", "one document, whole tiles"],
)
def test_index_tables_equal_create_block_mask(tokens, size, tile, layout, causal, window):
    rule = MaskRule(tokens, size, causal, None if window is None else 8 * window)
    inputs = tensors(*map(list, layout))
    queries = len(layout[1]) * size
    expected = create_block_mask(
        lambda b, h, q, k: rule.visible(q, k, *inputs), 1, 1, queries, tokens + queries, "cpu", tile
    )
    tables = rule.flex_tables(*inputs, tile=tile)
    assert len(tables) == 8
    for name, table in tables.items():
        assert torch.equal(table, getattr(expected, name)), name
        assert table.is_contiguous(), name
        assert table.dtype == torch.int32, name
    assert tables["kv_num_blocks"].sum() > 0
    if tile == 128 and window is None:
        assert tables["full_kv_num_blocks"].sum() > 0, "no full tile was tested"


def test_a_table_that_is_not_contiguous_is_refused(monkeypatch):
    """Compiled FlexAttention gives wrong key and value gradients from such tables without a word."""
    rule = MaskRule(128, 8)
    inputs = tensors([0] * 16, range(100, 116))
    flex(rule, *inputs)
    whole = MaskRule.flex_tables

    def transposed(self, *args):
        tables = whole(self, *args)
        wide = tables["q_indices"].repeat(1, 1, 1, 2)
        return tables | {"q_indices": wide.transpose(2, 3).contiguous().transpose(2, 3)}

    monkeypatch.setattr(MaskRule, "flex_tables", transposed)
    with pytest.raises(AssertionError, match="q_indices"):
        flex(rule, *inputs)


@pytest.mark.parametrize(
    ("is_causal", "layer_type", "causal", "window"),
    [
        (None, "full_attention", False, None),
        (None, "sliding_attention", True, 12),
        (False, "sliding_attention", False, 12),
        (True, "full_attention", True, None),
    ],
)
def test_causality_follows_the_layer_type_unless_the_config_says(is_causal, layer_type, causal, window):
    config = tiny_config(
        layer_types=("sliding_attention", "full_attention"), sliding_window=12, is_causal=is_causal
    )
    assert mask_rule(config, layer_type, 128, 8) == MaskRule(128, 8, causal, window)
