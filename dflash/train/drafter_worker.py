"""One drafter worker: takes packed features in order, runs the compiled step, adds up gradients.

A worker loads its own copy of every artifact in its own thread and never shares it. It only reads the
weights; between rounds the coordinator reads its gradient sums and updates them.

A worker enqueues work and does not wait for it: one micro-batch runs on the device while the next is being
enqueued, and metrics are read when they have arrived. Whether a micro-batch is finite is decided on the
device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dflash.drafter.step import PARAMETER_PREFIX
from dflash.train.devices import on
from dflash.train.late import Late
from dflash.train.metrics import Sums
from dflash.train.noise import Span, add_noise, amplitude
from dflash.train.optimizer import ANCHORS, gradient_norm
from dflash.train.plan import TRAIN, Round, WorkItem

if TYPE_CHECKING:
    from aot.buckets import Bucket
    from aot.program import Program
    from aot.runtime import PreparedArtifact
    from dflash.config import TrainConfig
    from dflash.train.optimizer import Replica
    from dflash.train.pipeline import Hub, OrderedQueue, RoundGate

GRADIENT_PREFIX = "grad."
Call = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
#: Micro-batches enqueued and not finished: one that runs, and one that follows it without a gap.
IN_FLIGHT = 2


@dataclass(frozen=True)
class Delivery:
    """One packed micro-batch on the drafter's device, and where its documents lie.

    On a GPU the tensors may still be on their way, until `arrived`.
    """

    item: WorkItem
    inputs: Mapping[str, torch.Tensor]
    spans: tuple[Span, ...]
    arrived: torch.cuda.Event | None = None

    def meet(self) -> None:
        """Have the current stream wait for the tensors, and their memory for the current stream."""
        if self.arrived is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(self.arrived)
        for tensor in self.inputs.values():
            tensor.record_stream(stream)


@dataclass(frozen=True)
class Part:
    """What one micro-batch gave: its index in the round, and on their way its metrics and if it counts."""

    index: int
    late: Late

    def sums(self) -> Sums | None:
        """The metrics; None for a micro-batch that was dropped. Waits for the micro-batch to end."""
        values = self.late.read()
        return Sums.unflat(values[:-1]) if values[-1] else None


@dataclass
class RoundResult:
    """What one drafter contributes to one round."""

    parts: list[Part] = field(default_factory=list)
    eager_calls: int = 0
    waited_s: float = 0.0


class EagerStep:
    """The uncompiled function in an artifact's place, for `on_miss = "eager"`: slow, and counted."""

    def __init__(self, program: Program, bucket: Bucket):
        self._spec = program.call_spec(bucket)
        self._function = program.function(bucket)

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            outputs = self._function(*(inputs[name] for name in self._spec.input_names))
        return dict(zip(self._spec.output_names, outputs, strict=True))


class DrafterWorker:
    """The body of one drafter thread."""

    def __init__(
        self,
        index: int,
        workers: int,
        device: torch.device,
        config: TrainConfig,
        total_steps: int,
        artifacts: Mapping[tuple[str, Bucket], PreparedArtifact | EagerStep],
        replica: Replica,
        fixed_inputs: Mapping[str, torch.Tensor],
    ):
        """`fixed_inputs` are those no micro-batch changes: frozen embedding and head, loss weights."""
        self.index, self.workers, self.device = index, workers, device
        self.name = f"drafter worker {index} ({device})"
        self._config, self._total_steps, self._artifacts = config, total_steps, artifacts
        self._params = {f"{PARAMETER_PREFIX}{name}": param for name, param in replica.params.items()}
        self._fixed_inputs = fixed_inputs
        self._calls: dict[tuple[str, Bucket], Call] = {}
        self.gradients = {name: torch.zeros_like(master) for name, master in replica.masters.items()}
        self.anchors = torch.zeros(1, device=device)
        self._in_flight: deque[Part] = deque()

    @property
    def total(self) -> dict[str, torch.Tensor]:
        """The gradient sums of the round by name, and the ANCHORS that they come from; zeroed by the next."""
        return {**self.gradients, ANCHORS: self.anchors}

    def run(
        self,
        rounds: Iterable[Round],
        queue: OrderedQueue[Delivery],
        gate: RoundGate[RoundResult],
        hub: Hub,
    ) -> None:
        """Work until the rounds end or the hub stops."""
        with on(self.device), torch.no_grad():
            hub.does(self.name, "loading artifacts")
            self._calls = {
                need: artifact if isinstance(artifact, EagerStep) else artifact.load(self.device)
                for need, artifact in self._artifacts.items()
            }
            for index, work in enumerate(rounds):
                hub.does(self.name, f"waiting for {work.program} round of step {work.step}")
                gate.enter(index)
                gate.arrive(self.index, self._round(work, queue, hub))

    def _round(self, work: Round, queue: OrderedQueue[Delivery], hub: Hub) -> RoundResult:
        result = RoundResult()
        if work.program == TRAIN:
            for tensor in self.total.values():
                tensor.zero_()
        for item in work.items[self.index :: self.workers]:
            hub.does(self.name, f"waiting for {item}")
            delivery, waited_s = queue.get()
            assert delivery.item == item
            hub.does(self.name, str(item))
            result.waited_s += waited_s
            self._micro_batch(delivery, result)
        return result

    def _micro_batch(self, delivery: Delivery, result: RoundResult) -> None:
        """Enqueue one micro-batch; one with any value that is not finite adds nothing and is dropped."""
        item = delivery.item
        training = item.program == TRAIN
        while len(self._in_flight) >= IN_FLIGHT:
            self._in_flight.popleft().late.wait()
        delivery.meet()
        part = Part(item.index, Late(self.device))
        if training:
            level = amplitude(item.step, self._total_steps, self._config)
            add_noise(delivery.inputs["features"], delivery.spans, level, item.epoch, self._config)
        call = self._calls[item.program, item.batch.bucket]
        outputs = call({**self._params, **self._fixed_inputs, **delivery.inputs})
        metrics = Sums.flat(outputs)
        counts = metrics.isfinite().all()
        if training:
            gradients = {name: outputs[f"{GRADIENT_PREFIX}{name}"] for name in self.gradients}
            counts &= gradient_norm(gradients).isfinite()
            for name, gradient in gradients.items():
                self.gradients[name].add_(torch.where(counts, gradient, 0))
            self.anchors.add_(torch.where(counts, outputs["anchors"], 0))
        part.late.send(torch.cat((metrics, counts.double()[None])))
        self._in_flight.append(part)
        result.parts.append(part)
        result.eager_calls += isinstance(call, EagerStep)
