"""Packed micro-batches: whole documents laid end to end in one row of T tokens, with A anchors.

Planning decides which documents share a micro-batch, from their sizes alone; packing lays out the tensors of
one of them. Documents of similar length meet, because the target runs them right-padded to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aot.buckets import Bucket, choose
from dflash.data.anchors import anchor_counts, document_order, draw_anchors
from dflash.data.dataset import Document
from dflash.data.randomness import permutation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from dflash.config import DataConfig
    from dflash.data.dataset import Documents

#: Documents are sorted by length within this many micro-batches' worth of shuffled documents.
WINDOW_BATCHES = 32


@dataclass(frozen=True)
class MicroBatch:
    """Documents (indices) that run together, their tokens and anchors, and the bucket that holds them."""

    documents: tuple[int, ...]
    tokens: int
    anchors: int
    bucket: Bucket


@dataclass(frozen=True)
class Sizes:
    """What each document brings, int64 [documents], and how many were cut or have nothing to train on."""

    tokens: np.ndarray
    anchors: np.ndarray
    truncated: int
    dropped: int


@dataclass(frozen=True)
class PackedBatch:
    """The CPU tensors of one micro-batch under the step's input names (features and teacher excepted).

    `tensors`: input_ids int64 [T], position_ids int32 [T], doc_ids int32 [T] (-1 is padding), loss_mask bool
    [T], context_start int32 [A], anchors int32 [A] (sorted; invalid ones at the end), anchor_valid bool [A].
    Documents lie in order from row 0; `lengths` says how many tokens each has.
    """

    bucket: Bucket
    document_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    tensors: dict[str, torch.Tensor]

    @property
    def token_ids(self) -> list[torch.Tensor]:
        """The token ids of each document, int64 [length]."""
        return list(self.tensors["input_ids"][: sum(self.lengths)].split(self.lengths))


def measure(documents: Documents, config: DataConfig) -> Sizes:
    """Return what every document brings under this run's limits; a dropped one has 0 anchors."""
    tokens, candidates = documents.measure(config.max_seq_len)
    return Sizes(
        tokens=tokens,
        anchors=anchor_counts(candidates, config.resolved_anchors_per_token, config.max_anchors),
        truncated=int(np.sum(documents.lengths > config.max_seq_len)),
        dropped=int(np.sum(candidates == 0)),
    )


def plan_epoch(
    documents: Documents, config: DataConfig, *, seed: int, epoch: int, shuffle: bool
) -> list[MicroBatch]:
    """Return the micro-batches of one epoch; every document that has a candidate anchor is in exactly one.

    A micro-batch is closed when the next document would pass `token_budget`, `max_anchors` or
    `max_batch_size`. Without `shuffle` the folder's order is kept but for the sorting in windows.
    """
    sizes = measure(documents, config)
    order = document_order(seed, epoch, len(documents)) if shuffle else np.arange(len(documents))
    order = order[sizes.anchors[order] > 0]
    batches = list(_fill(_sorted_in_windows(order, sizes.tokens, config.token_budget), sizes, config))
    if shuffle:
        batches = [batches[i] for i in permutation(len(batches), seed, "micro-batches", epoch)]
    return batches


def _sorted_in_windows(order: np.ndarray, tokens: np.ndarray, token_budget: int) -> np.ndarray:
    """Sort each window by length, up and down in turn, so that neighbours are alike across windows too."""
    window = np.cumsum(tokens[order]) // (token_budget * WINDOW_BATCHES)
    direction = np.where(window % 2 == 0, 1, -1)
    return order[np.lexsort((tokens[order] * direction, window))]


def _fill(order: np.ndarray, sizes: Sizes, config: DataConfig) -> Iterator[MicroBatch]:
    buckets = config.resolved_buckets
    members: list[int] = []
    tokens = anchors = 0
    for index in order.tolist():
        more_tokens, more_anchors = int(sizes.tokens[index]), int(sizes.anchors[index])
        fits = tokens + more_tokens <= config.token_budget and anchors + more_anchors <= config.max_anchors
        if members and (not fits or len(members) == config.max_batch_size):
            yield _close(members, tokens, anchors, buckets)
            members, tokens, anchors = [], 0, 0
        members.append(index)
        tokens += more_tokens
        anchors += more_anchors
    if members:
        yield _close(members, tokens, anchors, buckets)


def _close(members: list[int], tokens: int, anchors: int, buckets: Sequence[Bucket]) -> MicroBatch:
    bucket = choose(buckets, tokens, anchors)
    assert bucket is not None, f"no bucket holds {tokens} tokens and {anchors} anchors"
    return MicroBatch(tuple(members), tokens, anchors, bucket)


def load_batch(
    documents: Documents, batch: MicroBatch, config: DataConfig, *, seed: int, epoch: int
) -> PackedBatch:
    """Read a micro-batch's documents, cut them at `max_seq_len`, draw this epoch's anchors and pack them."""
    rows, anchors = [], []
    for index in batch.documents:
        whole = documents[index]
        row = Document(whole.id, whole.input_ids[: config.max_seq_len], whole.loss_mask[: config.max_seq_len])
        rows.append(row)
        anchors.append(
            draw_anchors(
                seed, epoch, row.id, row.loss_mask, config.resolved_anchors_per_token, config.max_anchors
            )
        )
    return pack(rows, anchors, batch.bucket)


def pack(rows: Sequence[Document], anchors: Sequence[np.ndarray], bucket: Bucket) -> PackedBatch:
    """Lay documents end to end in a row of `bucket.tokens`, and their anchors in `bucket.anchors` places.

    `anchors[i]` are sorted positions within document i. Places without an anchor point at the last token with
    an empty context and are not valid.
    """
    import torch

    T, A = bucket.tokens, bucket.anchors
    lengths = [len(row.input_ids) for row in rows]
    starts = np.cumsum([0, *lengths[:-1]])
    used, count = sum(lengths), sum(map(len, anchors))
    assert bucket.holds(used, count), f"{used} tokens and {count} anchors do not fit {bucket}"

    input_ids, loss_mask = np.zeros(T, np.int64), np.zeros(T, bool)
    position_ids, doc_ids = np.zeros(T, np.int32), np.full(T, -1, np.int32)
    input_ids[:used] = np.concatenate([row.input_ids for row in rows])
    loss_mask[:used] = np.concatenate([row.loss_mask for row in rows])
    position_ids[:used] = np.concatenate([np.arange(length) for length in lengths])
    doc_ids[:used] = np.repeat(np.arange(len(rows)), lengths)

    anchor, context_start = np.full(A, T - 1, np.int32), np.full(A, T - 1, np.int32)
    anchor[:count] = np.concatenate([start + own for start, own in zip(starts, anchors, strict=True)])
    context_start[:count] = np.repeat(starts, [len(own) for own in anchors])
    arrays = {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "doc_ids": doc_ids,
        "loss_mask": loss_mask,
        "context_start": context_start,
        "anchors": anchor,
        "anchor_valid": np.arange(A) < count,
    }
    return PackedBatch(
        bucket,
        tuple(row.id for row in rows),
        tuple(lengths),
        {name: torch.from_numpy(array) for name, array in arrays.items()},
    )
