"""Anchors: the response tokens that start a training block.

A candidate is a supervised token p >= 1 whose next token is supervised too, so that slot 1 of its block
carries a loss. How many anchors a document gets, and which, depends on the document, the seed and the epoch
alone: never on the documents packed beside it or on the number of workers.
"""

import numpy as np

from dflash.data.randomness import permutation


def candidates(loss_mask: np.ndarray) -> np.ndarray:
    """Return the sorted candidate positions of one document, int32, given its bool loss mask [length]."""
    mask = np.asarray(loss_mask, dtype=bool)
    return (np.flatnonzero(mask[1:-1] & mask[2:]) + 1).astype(np.int32)


def anchor_counts(candidate_counts: np.ndarray, anchors_per_token: float, limit: int) -> np.ndarray:
    """Return how many anchors documents with so many candidates get, int64 [documents].

    `anchors_per_token` x candidates, rounded; at least one where there is a candidate, at most `limit`, the
    anchor budget of a micro-batch.
    """
    wanted = np.floor(np.asarray(candidate_counts) * anchors_per_token + 0.5).astype(np.int64)
    return np.minimum(np.minimum(np.maximum(wanted, 1), candidate_counts), limit)


def draw_anchors(
    seed: int, epoch: int, document_id: str, loss_mask: np.ndarray, anchors_per_token: float, limit: int
) -> np.ndarray:
    """Return the document's anchors in this epoch: distinct, sorted, int32; none without candidates."""
    positions = candidates(loss_mask)
    count = int(anchor_counts(len(positions), anchors_per_token, limit))
    chosen = permutation(len(positions), seed, "anchors", epoch, document_id)[:count]
    return np.sort(positions[chosen])


def document_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order in which an epoch visits `count` documents, int64."""
    return permutation(count, seed, "order", epoch)
