"""The coordinator: opens rounds, sums gradients, updates the weights, reports, checkpoints.

It waits for no GPU: an update is enqueued behind the micro-batches that it sums, and a step is reported once
the next one has been enqueued, when its figures have arrived.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aot.console import note
from dflash.train.devices import on
from dflash.train.late import Late
from dflash.train.metrics import COUNTERS, Reporter, Sums, eval_line, train_line
from dflash.train.optimizer import learning_rate
from dflash.train.plan import TRAIN, Round, RunPlan
from dflash.train.reduce import sum_gradients

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


@dataclass(frozen=True)
class Step:
    """An update that was enqueued and is not reported yet."""

    work: Round
    results: Sequence[RoundResult]
    lr: float
    norm: Late
    ended: float
    target_waited_s: float


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
        self._unreported: Step | None = None
        # A step on the CPU has ended when it has been enqueued.
        self._reports_late = any(drafter.device.type == "cuda" for drafter in drafters)

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
                    self._save()
            else:
                self._report_step()
                # An evaluation is repeated whole by the run that resumes, so there is no need to finish it.
                results = self._gate.collect(interrupted)
                if results is None:
                    return self._interrupted()
                self._report_evaluation(work, results)
        return True

    def _interrupted(self) -> bool:
        if self.progress.step:
            self._save()
        return False

    def _save(self) -> None:
        """A checkpoint holds the counters of its own step."""
        self._report_step()
        self._checkpoint()

    def _checkpoint_due(self) -> bool:
        every, step = self._config.output.checkpoint_every, self.progress.step
        return step == self._plan.total_steps or (every > 0 and step % every == 0)

    def _update(self, work: Round, results: Sequence[RoundResult]) -> None:
        """Turn the drafters' gradient sums into one update, unless they are not finite or nothing is left."""
        train = self._config.train
        lr = learning_rate(work.step, self._plan.total_steps, train)
        totals = sum_gradients([d.total for d in self._drafters], [d.device for d in self._drafters])
        norms = {}
        for replica in self._replicas:
            with on(replica.device):
                norms[replica.device] = Late(replica.device)
                norms[replica.device].send(replica.step(totals[replica.device], lr, train))
        self.progress.step = work.step
        self._report_step()
        self._unreported = Step(
            work,
            results,
            lr,
            norms[self._drafters[0].device],
            time.monotonic(),
            sum(target.waited_s for target in self._targets),
        )
        if not self._reports_late:
            self._report_step()

    def _report_step(self) -> None:
        """Report the step whose update was enqueued last, unless that is done; waits for it to end."""
        step, self._unreported = self._unreported, None
        if step is None:
            return
        sums, dropped = merged(step.results)
        norm = float(step.norm.read())
        counters = self.progress.counters
        if math.isfinite(norm):
            self.progress.updates += 1
        else:
            counters["skipped_steps"] += 1
        counters["dropped_micro_batches"] += dropped
        self._count_eager(step.results)
        row = self._row(step, {**sums.summary(), "grad_norm": norm, "lr": step.lr})
        self._reporter.write(row)
        note(train_line(row, self._plan.total_steps, self._eta_s(step)))

    def _count_eager(self, results: Sequence[RoundResult]) -> None:
        self.progress.counters["eager_calls"] += sum(result.eager_calls for result in results)

    def _row(self, step: Step, values: dict[str, Any]) -> dict[str, Any]:
        seconds, self._last = step.ended - self._last, step.ended
        items, drafters = step.work.items, len(step.results)
        tokens = sum(item.batch.tokens for item in items)
        busy_s = sum(part.late.seconds for result in step.results for part in result.parts)
        row = {
            "kind": "train",
            "step": step.work.step,
            "epoch": items[-1].epoch,
            **values,
            "tokens": tokens,
            "padding": 1 - tokens / sum(item.batch.bucket.tokens for item in items),
            "seconds": seconds,
            "ktok_per_s": tokens / seconds / 1e3,
            "drafter_wait_s": sum(result.waited_s for result in step.results) / drafters,
            "drafter_busy": busy_s / drafters / seconds,
            "target_wait_s": (step.target_waited_s - self._target_waited_s) / len(self._targets),
            **self.progress.counters,
        }
        self._target_waited_s = step.target_waited_s
        return row

    def _eta_s(self, step: Step) -> float:
        done = step.work.step - self._first_step
        return (step.ended - self._started) / done * (self._plan.total_steps - step.work.step)

    def _report_evaluation(self, work: Round, results: Sequence[RoundResult]) -> None:
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._count_eager(results)
        sums, dropped = merged(results)
        row = {
            "kind": "eval",
            "step": work.step,
            **sums.summary(),
            "dropped": dropped,
            "seconds": seconds,
        }
        self._reporter.write(row)
        note(eval_line(row))


def merged(results: Sequence[RoundResult]) -> tuple[Sums, int]:
    """All drafters' metric sums, and how many micro-batches were dropped; waits for the last one.

    Added in the order of the micro-batches, whoever ran them.
    """
    parts = sorted((part for result in results for part in result.parts), key=lambda part: part.index)
    sums = [part.sums() for part in parts]
    return Sums.total(found for found in sums if found is not None), sums.count(None)
