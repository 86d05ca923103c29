"""The coordinator: opens rounds, sums gradients, updates the weights, reports, checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aot.console import note
from dflash.train.devices import on
from dflash.train.metrics import COUNTERS, Reporter, Sums, eval_line, train_line
from dflash.train.optimizer import gradient_norm, learning_rate
from dflash.train.plan import TRAIN, Round, RunPlan
from dflash.train.reduce import scale_gradients, sum_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dflash.config import RunConfig
    from dflash.train.drafter_worker import DrafterWorker, RoundResult
    from dflash.train.optimizer import Replica
    from dflash.train.pipeline import RoundGate
    from dflash.train.target_worker import TargetWorker


@dataclass
class Progress:
    """How far the run is. `updates` counts steps whose gradient was finite; the rest were skipped."""

    step: int = 0
    updates: int = 0
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))


class Coordinator:
    """Runs in the main thread while the workers wait at the gate."""

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        progress: Progress,
        replicas: Sequence[Replica],
        drafters: Sequence[DrafterWorker],
        targets: Sequence[TargetWorker],
        gate: RoundGate[RoundResult],
        reporter: Reporter,
        checkpoint: Callable[[], None],
    ):
        """`checkpoint` saves the state as `progress` has it."""
        self._config, self._plan, self.progress = config, plan, progress
        self._replicas, self._drafters, self._targets = replicas, drafters, targets
        self._gate, self._reporter, self._checkpoint = gate, reporter, checkpoint
        self._first_step = progress.step
        self._started = self._last = time.monotonic()
        self._target_waited_s = 0.0

    def run(self, interrupted: Callable[[], bool]) -> bool:
        """Work through the plan; False when interrupted, with a checkpoint at the last step boundary."""
        self._started = self._last = time.monotonic()
        for index, work in enumerate(self._plan.rounds(self.progress.step)):
            if interrupted():
                return self._interrupted()
            self._gate.open(index)
            if work.program == TRAIN:
                results = self._gate.collect()
                assert results is not None
                self._update(work, results)
                if self._checkpoint_due():
                    self._checkpoint()
            else:
                # An evaluation is repeated whole by the run that resumes, so there is no need to finish it.
                results = self._gate.collect(interrupted)
                if results is None:
                    return self._interrupted()
                self._report_evaluation(work, results)
        return True

    def _interrupted(self) -> bool:
        if self.progress.step:
            self._checkpoint()
        return False

    def _checkpoint_due(self) -> bool:
        every, step = self._config.output.checkpoint_every, self.progress.step
        return step == self._plan.total_steps or (every > 0 and step % every == 0)

    def _update(self, work: Round, results: Sequence[RoundResult]) -> None:
        """Turn the drafters' gradient sums into one update, unless they are not finite or nothing is left."""
        train = self._config.train
        sums = merged(results)
        totals = sum_gradients([d.gradients for d in self._drafters], [d.device for d in self._drafters])
        first = self._drafters[0].device
        with on(first):
            norm = gradient_norm(totals[first]).item() / sums.anchors if sums.anchors else math.nan
        lr = learning_rate(work.step, self._plan.total_steps, train)
        counters = self.progress.counters
        if math.isfinite(norm):
            self.progress.updates += 1
            scale_gradients(totals, train.clip / max(norm, train.clip) / sums.anchors)
            for replica in self._replicas:
                with on(replica.device):
                    replica.step(totals[replica.device], self.progress.updates, lr, train)
        else:
            counters["skipped_steps"] += 1
        counters["dropped_micro_batches"] += sum(result.dropped for result in results)
        self._count_eager(results)
        self.progress.step = work.step
        self._report_step(work, results, {**sums.summary(), "grad_norm": norm, "lr": lr})

    def _count_eager(self, results: Sequence[RoundResult]) -> None:
        self.progress.counters["eager_calls"] += sum(result.eager_calls for result in results)

    def _report_step(self, work: Round, results: Sequence[RoundResult], values: dict[str, Any]) -> None:
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        tokens = sum(item.batch.tokens for item in work.items)
        target_waited_s = sum(target.waited_s for target in self._targets)
        row = {
            "kind": "train",
            "step": work.step,
            "epoch": work.items[-1].epoch,
            **values,
            "tokens": tokens,
            "padding": 1 - tokens / sum(item.batch.bucket.tokens for item in work.items),
            "seconds": seconds,
            "ktok_per_s": tokens / seconds / 1e3,
            "drafter_wait_s": sum(result.waited_s for result in results) / len(results),
            "target_wait_s": (target_waited_s - self._target_waited_s) / len(self._targets),
            **self.progress.counters,
        }
        self._target_waited_s = target_waited_s
        self._reporter.write(row)
        note(train_line(row, self._plan.total_steps, self._eta_s(now)))

    def _eta_s(self, now: float) -> float:
        done = self.progress.step - self._first_step
        return (now - self._started) / done * (self._plan.total_steps - self.progress.step)

    def _report_evaluation(self, work: Round, results: Sequence[RoundResult]) -> None:
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._count_eager(results)
        row = {
            "kind": "eval",
            "step": work.step,
            **merged(results).summary(),
            "dropped": sum(result.dropped for result in results),
            "seconds": seconds,
        }
        self._reporter.write(row)
        note(eval_line(row))


def merged(results: Sequence[RoundResult]) -> Sums:
    """All drafters' metric sums, added in the order of the micro-batches, whoever ran them."""
    parts = sorted((part for result in results for part in result.parts), key=lambda part: part[0])
    return Sums.total(sums for _, sums in parts)
