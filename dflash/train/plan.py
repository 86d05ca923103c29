"""The whole run as a deterministic sequence of work, known before the first step.

A run is a list of rounds. A training round is one optimizer step: G = grad_accum x drafters micro-batches,
fewer in the last one. An evaluation round is one pass over the held-out micro-batches. Work item m of a round
goes to drafter m mod M, and the m-th item of the run to target worker m mod N, so that who does what never
depends on timing. Because the sequence is known, so is every (program, bucket) that it needs.
This module imports no torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aot.buckets import LengthHistogram
from aot.errors import ConfigError
from dflash.data.packing import MicroBatch, plan_epoch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aot.buckets import Bucket
    from dflash.config import RunConfig
    from dflash.data.dataset import Documents

TRAIN = "train_step"
EVAL = "eval_step"
#: Held-out documents keep the anchors of this epoch, so that evaluations compare.
EVAL_EPOCH = 0


@dataclass(frozen=True)
class WorkItem:
    """One micro-batch of one round; `program` is what runs on it."""

    sequence: int
    program: str
    step: int
    index: int
    epoch: int
    batch: MicroBatch

    def __str__(self) -> str:
        return f"{self.program} of step {self.step}, micro-batch {self.index} ({self.batch.bucket})"


@dataclass(frozen=True)
class Round:
    """All items between two synchronisation points; `step` counts optimizer steps from 1."""

    program: str
    step: int
    items: tuple[WorkItem, ...]


@dataclass(frozen=True)
class RunPlan:
    """Training micro-batches as (epoch, micro-batch) in order, held-out ones, and how they form rounds."""

    train: tuple[tuple[int, MicroBatch], ...]
    held_out: tuple[MicroBatch, ...]
    micro_batches_per_step: int
    eval_every: int
    total_steps: int

    @classmethod
    def make(cls, config: RunConfig, documents: Documents, held_out: Documents | None) -> RunPlan:
        """Plan every epoch, or as many as `max_steps` needs.

        Raises ConfigError when a split has no document that gives a block to train on.
        """
        group = config.train.grad_accum * len(config.topology.drafter_devices)
        wanted = None if config.train.max_steps is None else config.train.max_steps * group
        train: list[tuple[int, MicroBatch]] = []
        for epoch in range(config.train.epochs):
            train += [(epoch, batch) for batch in _pack(config, documents, epoch, shuffle=True)]
            if not train:
                raise _no_work("data.train", config.data.train, config, documents)
            if wanted is not None and len(train) >= wanted:
                break
        train = train[:wanted]
        return cls(
            train=tuple(train),
            held_out=() if held_out is None else held_out_batches(config, held_out),
            micro_batches_per_step=group,
            eval_every=config.eval.eval_every,
            total_steps=-(-len(train) // group),
        )

    def evaluates_after(self, step: int) -> bool:
        at_interval = self.eval_every > 0 and step % self.eval_every == 0
        return bool(self.held_out) and (at_interval or step == self.total_steps)

    def rounds(self, completed: int = 0) -> Iterator[Round]:
        """Yield the rounds after `completed` steps, beginning with the evaluation of that step if it has one.

        Items keep the sequence numbers that they have in the whole run.
        """
        sequence = 0
        for step in range(1, self.total_steps + 1):
            start = (step - 1) * self.micro_batches_per_step
            group = self.train[start : start + self.micro_batches_per_step]
            if step > completed:
                yield _round(TRAIN, step, sequence, group)
            sequence += len(group)
            if self.evaluates_after(step):
                if step >= completed:
                    yield _round(EVAL, step, sequence, tuple((EVAL_EPOCH, batch) for batch in self.held_out))
                sequence += len(self.held_out)

    def needs(self) -> list[tuple[str, Bucket]]:
        """Every (program, bucket) that the run emits, sorted."""
        train = {(TRAIN, batch.bucket) for _, batch in self.train}
        return sorted(train | {(EVAL, batch.bucket) for batch in self.held_out})

    def histogram(self) -> LengthHistogram:
        """How many micro-batches of each (tokens, anchors) one pass over the plan emits, per program."""
        counts = {TRAIN: Counter((batch.tokens, batch.anchors) for _, batch in self.train)}
        if self.held_out:
            counts[EVAL] = Counter((batch.tokens, batch.anchors) for batch in self.held_out)
        return LengthHistogram({program: dict(sizes) for program, sizes in counts.items()})

    def padding(self) -> dict[str, float]:
        """Share of bucket tokens that carry no document, per program."""
        batches = {TRAIN: [batch for _, batch in self.train], EVAL: list(self.held_out)}
        return {
            program: 1 - sum(b.tokens for b in listed) / sum(b.bucket.tokens for b in listed)
            for program, listed in batches.items()
            if listed
        }

    def digest(self) -> str:
        """SHA-256 of the training sequence: equal if and only if a resumed run would see the same work."""
        digest = hashlib.sha256(f"{self.micro_batches_per_step}\n".encode())
        for epoch, batch in self.train:
            members = ",".join(map(str, batch.documents))
            digest.update(f"{epoch} {batch.bucket} {batch.tokens} {batch.anchors} {members}\n".encode())
        return digest.hexdigest()


def held_out_batches(config: RunConfig, documents: Documents) -> tuple[MicroBatch, ...]:
    """The micro-batches of every evaluation; raises ConfigError when there is nothing to evaluate on."""
    batches = _pack(config, documents, EVAL_EPOCH, shuffle=False)
    if not batches:
        raise _no_work("data.eval", config.data.eval, config, documents)
    return tuple(batches[: config.eval.eval_max_batches])


def run_histogram(config: RunConfig) -> LengthHistogram | None:
    """Histogram of a run whose data is prepared; None where a folder is not there yet."""
    from dflash.data.dataset import Documents

    folders = [folder for folder in (config.data.train, config.data.eval) if folder]
    if not config.data.train or not all(Path(folder).is_dir() for folder in folders):
        return None
    held_out = Documents.open(config.data.eval) if config.data.eval else None
    return RunPlan.make(config, Documents.open(config.data.train), held_out).histogram()


def _pack(config: RunConfig, documents: Documents, epoch: int, shuffle: bool) -> list[MicroBatch]:
    return plan_epoch(
        documents,
        config.data,
        seed=config.train.seed,
        epoch=epoch,
        shuffle=shuffle,
    )


def _round(program: str, step: int, sequence: int, group: tuple[tuple[int, MicroBatch], ...]) -> Round:
    items = (
        WorkItem(sequence + index, program, step, index, epoch, batch)
        for index, (epoch, batch) in enumerate(group)
    )
    return Round(program, step, tuple(items))


def _no_work(key: str, folder: str, config: RunConfig, documents: Documents) -> ConfigError:
    if documents.measure(None)[1].any():
        return ConfigError(
            f"{key} '{folder}' has no document with two supervised tokens in a row among its first "
            f"{config.data.max_seq_len} tokens: there is nothing to train on",
            "raise data.max_seq_len",
        )
    return ConfigError(
        f"{key} '{folder}' has no document with two supervised tokens in a row: there is nothing to train on",
        "prepare it again with `dflash prepare` and check its assistant-only loss mask",
    )
