"""Held-out quality of a drafter through its `eval_step` artifact: CE, acceptance length, and controls.

Two controls tell learning from luck. With features of *another* document the drafter must get worse: the
paired difference is given with its standard error. And it must beat the unigram model of the training text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash.data.packing import load_batch
from dflash.drafter.loss import slots
from dflash.train.metrics import Sums
from dflash.train.plan import EVAL_EPOCH
from dflash.train.target_worker import packed_features

if TYPE_CHECKING:
    from aot.buckets import Bucket
    from dflash.config import RunConfig
    from dflash.data.dataset import Documents
    from dflash.data.packing import MicroBatch, PackedBatch
    from dflash.target.huggingface import HuggingFaceTarget

Call = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass
class HeldOut:
    """Sums over the split, and per document its summed CE and supervised slots."""

    sums: Sums
    documents: dict[str, tuple[float, float]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Means as in training's metrics, and `token_ce_se`: the error of `token_ce` over documents."""
        ce, slots_D = np.array(list(self.documents.values())).T
        return {**self.sums.summary(), "token_ce_se": ratio_and_error(ce, slots_D)[1]}


def ratio_and_error(values_D: np.ndarray, weights_D: np.ndarray) -> tuple[float, float]:
    """Return sum(values) / sum(weights) and its standard error, documents being the independent draws.

    The error is the usual linearisation of a ratio; it is infinite for a single document.
    """
    count, weight = len(values_D), weights_D.sum()
    ratio = values_D.sum() / weight
    if count < 2:
        return float(ratio), math.inf
    residual_D = values_D - ratio * weights_D
    return float(ratio), float(math.sqrt(count / (count - 1) * (residual_D**2).sum()) / weight)


def increase(base: HeldOut, other: HeldOut) -> tuple[float, float]:
    """Return how much higher `other`'s CE per slot is on the same documents, and its standard error."""
    assert base.documents.keys() == other.documents.keys()
    differences = [other.documents[name][0] - base.documents[name][0] for name in base.documents]
    weights = [slots for _, slots in base.documents.values()]
    return ratio_and_error(np.array(differences), np.array(weights))


@dataclass(frozen=True)
class Evaluator:
    """One drafter over one held-out split; `calls` has an eval step for every bucket of `batches`."""

    config: RunConfig
    documents: Documents
    batches: Sequence[MicroBatch]
    target: HuggingFaceTarget
    calls: Mapping[Bucket, Call]
    inputs: Mapping[str, torch.Tensor]
    device: torch.device

    def run(self, shuffle_features: bool = False, done: Callable[[], None] = lambda: None) -> HeldOut:
        """Evaluate every micro-batch; `done` is called after each.

        With `shuffle_features` each document's features are those of the next one of the split, repeated or
        cut to its length; tokens, labels and teacher stay its own.
        """
        parts, documents = [], {}
        donors = self._donors() if shuffle_features else None
        for packed, batch in self._packed():
            outputs = self.calls[batch.bucket]({**self.inputs, **self._batch_inputs(packed, batch, donors)})
            parts.append(Sums.of(outputs))
            documents |= _per_document(packed, outputs)
            done()
        return HeldOut(Sums.total(parts), documents)

    def unigram_ce(self, train: Documents) -> float:
        """CE per slot of the training text's token frequencies, one added to each, on the same labels."""
        counts_V = np.ones(self.config.drafter.vocab_size)
        for index in range(len(train)):
            row = train[index]
            np.add.at(counts_V, row.input_ids[row.loss_mask], 1)
        cost_V = -np.log(counts_V / counts_V.sum())
        cost, count = 0.0, 0
        for packed, _ in self._packed():
            targets = slots(packed.tensors, self.config.drafter.block_size)
            labels = targets.label_AS[targets.supervised_AS].numpy()
            cost, count = cost + float(cost_V[labels].sum()), count + len(labels)
        return cost / count

    def _packed(self) -> Iterator[tuple[PackedBatch, MicroBatch]]:
        config = self.config
        for batch in self.batches:
            yield (
                load_batch(self.documents, batch, config.data, seed=config.train.seed, epoch=EVAL_EPOCH),
                batch,
            )

    def _donors(self) -> dict[int, int]:
        order = [index for batch in self.batches for index in batch.documents]
        return dict(zip(order, order[1:] + order[:1], strict=True))

    def _batch_inputs(
        self, packed: PackedBatch, batch: MicroBatch, donors: Mapping[int, int] | None
    ) -> dict[str, torch.Tensor]:
        outputs = self.target.features(packed.token_ids)
        if donors is not None:
            limit = self.config.data.max_seq_len
            texts = [torch.from_numpy(self.documents[donors[i]].input_ids[:limit]) for i in batch.documents]
            foreign = [
                _resized(features, len(own))
                for (features, _), (own, _) in zip(self.target.features(texts), outputs, strict=True)
            ]
            outputs = [(features, hidden) for features, (_, hidden) in zip(foreign, outputs, strict=True)]
        dtype = getattr(torch, self.config.drafter.dtype)
        tensors = {**packed_features(outputs, batch.bucket.tokens, dtype), **packed.tensors}
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}


def _resized(features_LF: torch.Tensor, length: int) -> torch.Tensor:
    """Repeat or cut rows to `length`."""
    return features_LF[torch.arange(length, device=features_LF.device) % features_LF.shape[0]]


def _per_document(packed: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Sum block CE and slot counts by the document that each valid anchor lies in."""
    valid_A = packed.tensors["anchor_valid"]
    owner_A = packed.tensors["doc_ids"][packed.tensors["anchors"].long()][valid_A].numpy()
    sums = [
        np.bincount(
            owner_A, outputs[name].double().cpu()[valid_A].numpy(), minlength=len(packed.document_ids)
        )
        for name in ("block_ce", "block_count")
    ]
    return {
        name: (float(ce), float(count)) for name, ce, count in zip(packed.document_ids, *sums, strict=True)
    }
