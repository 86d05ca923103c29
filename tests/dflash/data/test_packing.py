from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aot.buckets import Bucket
from dflash.config import DataConfig
from dflash.data.anchors import candidates, draw_anchors
from dflash.data.dataset import Document
from dflash.data.packing import load_batch, measure, pack, plan_epoch

CONFIG = DataConfig(
    max_seq_len=100, token_budget=256, max_anchors=32, max_batch_size=6, buckets=("128x16", "256x16")
)


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"max_anchors": 8, "buckets": ()}, {"max_batch_size": 2}, {"anchors_per_token": 0.9}],
    ids=str,
)
def test_every_document_is_in_one_micro_batch_within_all_budgets(documents, shuffle, changes):
    config = CONFIG.model_copy(update=changes)
    sizes = measure(documents, config)
    batches = plan_epoch(documents, config, seed=0, epoch=0, shuffle=shuffle)
    visited = Counter(index for batch in batches for index in batch.documents)
    assert visited == Counter(np.flatnonzero(sizes.anchors > 0).tolist())
    for batch in batches:
        members = list(batch.documents)
        assert batch.tokens == sizes.tokens[members].sum() <= config.token_budget
        assert batch.anchors == sizes.anchors[members].sum() <= config.max_anchors
        assert 1 <= len(members) <= config.max_batch_size
        fitting = [b for b in config.resolved_buckets if b.holds(batch.tokens, batch.anchors)]
        assert batch.bucket == min(fitting, key=lambda b: b.tokens * b.anchors)


def test_plan_is_a_function_of_seed_and_epoch(documents):
    def plan(seed, epoch):
        return plan_epoch(documents, CONFIG, seed=seed, epoch=epoch, shuffle=True)

    assert plan(1, 0) == plan(1, 0)
    assert plan(1, 0) != plan(1, 1)
    assert plan(1, 0) != plan(2, 0)


def test_truncated_and_dropped_documents_are_counted(documents):
    sizes = measure(documents, CONFIG.model_copy(update={"max_seq_len": 4}))
    masks = [documents[i].loss_mask[:4] for i in range(len(documents))]
    assert sizes.truncated == sum(documents.lengths > 4) > 0
    assert sizes.dropped == sum(len(candidates(mask)) == 0 for mask in masks) > 0
    assert sizes.tokens.tolist() == [len(mask) for mask in masks]


def target_padding(batches, tokens):
    """Share of the target's right-padded rows that is padding."""
    padded = sum(len(batch.documents) * tokens[list(batch.documents)].max() for batch in batches)
    return 1 - sum(batch.tokens for batch in batches) / padded


def test_documents_of_similar_length_meet(documents):
    sizes = measure(documents, CONFIG)
    batches = plan_epoch(documents, CONFIG, seed=0, epoch=0, shuffle=True)
    assert target_padding(batches, sizes.tokens) < 0.05
    # The order of micro-batches is shuffled: long and short ones alternate.
    longest = [sizes.tokens[list(batch.documents)].max() for batch in batches]
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.5


def test_anchors_of_a_document_do_not_depend_on_its_company(documents):
    def drawn(config):
        anchors = {}
        for batch in plan_epoch(documents, config, seed=3, epoch=1, shuffle=True):
            packed = load_batch(documents, batch, config, seed=3, epoch=1)
            starts = np.cumsum([0, *packed.lengths[:-1]])
            placed = packed.tensors["anchors"][packed.tensors["anchor_valid"]].numpy()
            owner = np.searchsorted(starts, placed, side="right") - 1
            for i, name in enumerate(packed.document_ids):
                anchors[name] = (placed[owner == i] - starts[i]).tolist()
        return anchors

    rate = CONFIG.resolved_anchors_per_token
    other = CONFIG.model_copy(update={"token_budget": 512, "max_batch_size": 50, "anchors_per_token": rate})
    assert drawn(CONFIG) == drawn(other)
    document = documents[0]
    expected = draw_anchors(3, 1, document.id, document.loss_mask[:100], rate, CONFIG.max_anchors)
    assert drawn(CONFIG)[document.id] == expected.tolist()


def test_loaded_batch_holds_its_planned_size_and_truncated_documents(documents):
    for batch in plan_epoch(documents, CONFIG, seed=0, epoch=0, shuffle=True):
        packed = load_batch(documents, batch, CONFIG, seed=0, epoch=0)
        assert sum(packed.lengths) == batch.tokens
        assert int(packed.tensors["anchor_valid"].sum()) == batch.anchors
        for index, ids in zip(batch.documents, packed.token_ids, strict=True):
            assert ids.tolist() == documents[index].input_ids[:100].tolist()


@st.composite
def packings(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    rows, anchors = [], []
    for i, length in enumerate(lengths):
        mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
        rows.append(Document(f"d{i}", np.arange(length) + 100 * i, mask))
        anchors.append(
            np.array(sorted(draw(st.sets(st.integers(0, length - 1), max_size=5))), dtype=np.int32)
        )
    return rows, anchors


@given(packings(), st.integers(0, 30), st.integers(0, 9))
def test_layout_equals_the_definition_place_by_place(packing, more_tokens, more_anchors):
    rows, anchors = packing
    used, count = sum(len(row.input_ids) for row in rows), sum(map(len, anchors))
    bucket = Bucket(used + more_tokens, count + more_anchors)
    packed = pack(rows, anchors, bucket)
    tokens = [
        (int(token), position, i, bool(learn))
        for i, row in enumerate(rows)
        for position, (token, learn) in enumerate(zip(row.input_ids, row.loss_mask, strict=True))
    ]
    tokens += [(0, 0, -1, False)] * more_tokens
    names = ("input_ids", "position_ids", "doc_ids", "loss_mask")
    assert list(zip(*(packed.tensors[name].tolist() for name in names), strict=True)) == tokens
    starts = np.cumsum([0] + [len(row.input_ids) for row in rows])
    places = [(int(starts[i]), int(starts[i] + p), True) for i, own in enumerate(anchors) for p in own]
    places += [(bucket.tokens - 1, bucket.tokens - 1, False)] * more_anchors
    names = ("context_start", "anchors", "anchor_valid")
    assert list(zip(*(packed.tensors[name].tolist() for name in names), strict=True)) == places
    assert packed.tensors["anchors"].diff().ge(0).all()
    dtypes = {name: tensor.dtype for name, tensor in packed.tensors.items()}
    assert dtypes == {
        "input_ids": torch.int64, "position_ids": torch.int32, "doc_ids": torch.int32,
        "loss_mask": torch.bool, "context_start": torch.int32, "anchors": torch.int32,
        "anchor_valid": torch.bool,
    }  # fmt: skip


def test_more_than_the_bucket_holds_is_never_packed():
    row = Document("a", np.arange(9), np.ones(9, bool))
    for bucket in (Bucket(8, 4), Bucket(9, 1)):
        with pytest.raises(AssertionError, match="do not fit"):
            pack([row], [np.array([1, 2])], bucket)
