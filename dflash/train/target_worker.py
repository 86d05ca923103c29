"""One target worker: runs the frozen target over a micro-batch's documents, delivers packed features."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from dflash.data.packing import load_batch
from dflash.train.devices import on
from dflash.train.drafter_worker import Delivery
from dflash.train.noise import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dflash.config import DataConfig
    from dflash.data.dataset import Documents
    from dflash.data.packing import PackedBatch
    from dflash.target.huggingface import HuggingFaceTarget
    from dflash.train.pipeline import Hub, OrderedQueue
    from dflash.train.plan import Round, WorkItem


def packed_features(
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Lay each document's features [length, n*H] and final states [length, H] end to end in `tokens` rows.

    Rows beyond the last document are zero.
    """
    packed = {}
    for name, parts in zip(("features", "teacher_hidden"), zip(*outputs, strict=True), strict=True):
        rows = torch.zeros(tokens, parts[0].shape[1], dtype=dtype, device=parts[0].device)
        used = sum(part.shape[0] for part in parts)
        torch.cat([part.to(dtype) for part in parts], out=rows[:used])
        packed[name] = rows
    return packed


def spans(packed: PackedBatch) -> tuple[Span, ...]:
    """Where each document lies."""
    start, found = 0, []
    for document, length in zip(packed.document_ids, packed.lengths, strict=True):
        found.append(Span(document, start, length))
        start += length
    return tuple(found)


class Courier:
    """Brings tensors from one device to another beside what both compute, on streams of its own."""

    def __init__(self, source: torch.device, destination: torch.device):
        self._destination = destination
        apart = source != destination and destination.type == "cuda"
        # The destination's stream last: entered last, its device is the current one.
        self._streams = [
            torch.cuda.Stream(device) for device in (source, destination) if apart and device.type == "cuda"
        ]

    def bring(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
        """Return the tensors on the destination, and the event of their arrival if that is a GPU."""
        if self._destination.type != "cuda":
            return {name: tensor.to(self._destination) for name, tensor in tensors.items()}, None
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                if stream.device != self._destination:
                    stream.wait_stream(torch.cuda.current_stream(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            brought = {name: self._moved(tensor) for name, tensor in tensors.items()}
            return brought, torch.cuda.current_stream(self._destination).record_event()

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._destination:
            return tensor
        if tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        else:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor.to(self._destination, non_blocking=True)


class TargetWorker:
    """The body of one target thread; `documents` is {program: the split it reads}."""

    def __init__(
        self,
        index: int,
        workers: int,
        device: torch.device,
        target: HuggingFaceTarget,
        documents: Mapping[str, Documents],
        config: DataConfig,
        seed: int,
        dtype: torch.dtype,
    ):
        self.index, self.workers, self.device = index, workers, device
        self.name = f"target worker {index} ({device})"
        self.waited_s = 0.0
        self._target, self._documents = target, documents
        self._config, self._seed, self._dtype = config, seed, dtype

    def run(
        self,
        rounds: Iterable[Round],
        queues: Sequence[OrderedQueue[Delivery]],
        drafter_devices: Sequence[torch.device],
        hub: Hub,
    ) -> None:
        """Work until the rounds end or the hub stops."""
        positions = [0] * len(queues)
        couriers = {device: Courier(self.device, device) for device in drafter_devices}
        with on(self.device), torch.no_grad():
            for work in rounds:
                for item in work.items:
                    drafter = item.index % len(queues)
                    position = positions[drafter]
                    positions[drafter] += 1
                    if item.sequence % self.workers != self.index:
                        continue
                    hub.check()
                    hub.does(self.name, str(item))
                    packed, features = self._features(item)
                    hub.does(self.name, f"waiting to deliver {item}")
                    self.waited_s += queues[drafter].admit(position)
                    inputs, arrived = couriers[drafter_devices[drafter]].bring({**features, **packed.tensors})
                    queues[drafter].put(position, Delivery(item, inputs, spans(packed), arrived))

    def _features(self, item: WorkItem) -> tuple[PackedBatch, dict[str, torch.Tensor]]:
        packed = load_batch(
            self._documents[item.program], item.batch, self._config, seed=self._seed, epoch=item.epoch
        )
        outputs = self._target.features(packed.token_ids)
        return packed, packed_features(outputs, item.batch.bucket.tokens, self._dtype)
