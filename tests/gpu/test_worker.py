"""A drafter worker on a GPU waits for nothing but its own earlier micro-batches."""

import contextlib
import math
import os
from pathlib import Path

import pytest
import torch

from aot.buckets import Bucket
from aot.compile import BuildRequest, build
from aot.runtime import prepare
from aot.store import Store
from dflash.config import load_config
from dflash.data.packing import MicroBatch
from dflash.drafter.model import init_parameters
from dflash.drafter.programs import TrainStep, make_programs
from dflash.train.drafter_worker import Delivery, DrafterWorker, RoundResult
from dflash.train.metrics import Sums
from dflash.train.noise import Span
from dflash.train.optimizer import ANCHORS, Replica
from dflash.train.pipeline import Hub, OrderedQueue
from dflash.train.plan import TRAIN, Round, WorkItem
from dflash.train.target_worker import Courier

RUN = "scripts/gpu/smollm2-gpu.toml"
FACTORY = "dflash.drafter.programs:program_set"
BUCKET = Bucket(2048, 64)
CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
FIXED = ("embed_tokens", "lm_head", "slot_weights", "kl_weight", "temperature", "cap_weight")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextlib.contextmanager
def no_waiting():
    """Any operation that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """The program and its prepared package."""
    program = make_programs(load_config(RUN))[0]
    store = Store(Path(os.environ.get("DFLASH_AOT_STORE") or tmp_path_factory.mktemp("store")))
    build([BuildRequest(FACTORY, RUN, (), program.name, str(BUCKET))], store)
    return program, prepare(store, [(program, BUCKET)], run=RUN, device=str(CUDA))


def example(program: TrainStep, seed: int) -> dict[str, torch.Tensor]:
    tensors = program.example_inputs(BUCKET, seed, CUDA)
    return dict(zip(program.call_spec(BUCKET).input_names, tensors, strict=True))


def item(index: int) -> WorkItem:
    return WorkItem(index, TRAIN, 1, index, 0, MicroBatch((index,), BUCKET.tokens, BUCKET.anchors, BUCKET))


def deliveries(program: TrainStep, count: int, poisoned: int) -> list[Delivery]:
    """Micro-batches of different content, brought from the host; one has a feature that is not finite."""
    found = []
    for index in range(count):
        inputs = {
            name: tensor.to(CPU)
            for name, tensor in example(program, 10 + index).items()
            if not name.startswith("param.") and name not in FIXED
        }
        if index == poisoned:
            inputs["features"][5, 7] = math.nan
        brought, arrived = Courier(CPU, CUDA).bring(inputs)
        found.append(Delivery(item(index), brought, (Span(str(index), 0, BUCKET.tokens),), arrived))
    return found


def test_a_round_and_its_update_never_wait_and_drop_what_is_not_finite(step):
    program, prepared = step
    config = load_config(RUN, ("train.noise_start=0.0", "train.noise_end=0.0")).train
    replica = Replica(init_parameters(program.config, 0, "cpu"), torch.bfloat16, CUDA)
    fixed = {name: tensor for name, tensor in example(program, 0).items() if name in FIXED}
    worker = DrafterWorker(0, 1, CUDA, config, 1, prepared, replica, fixed)
    artifact = prepared[TRAIN, BUCKET].load(CUDA)
    worker._calls = {(TRAIN, BUCKET): artifact}
    hub, count, poisoned = Hub(60.0), 6, 3
    queue: OrderedQueue[Delivery] = OrderedQueue(hub, count)
    with torch.no_grad():
        batches = deliveries(program, count, poisoned)
        artifact({**worker._params, **fixed, **batches[0].inputs})
        for position, delivery in enumerate(batches):
            queue.put(position, delivery)
        torch.cuda.synchronize()
        masters = {name: master.clone() for name, master in replica.masters.items()}
        params = {name: param.clone() for name, param in worker._params.items()}
        with no_waiting():
            result = worker._round(Round(TRAIN, 1, tuple(item(i) for i in range(count))), queue, hub)
            summed = {name: tensor.clone() for name, tensor in worker.total.items()}
            replica.step(worker.total, 1e-3, config)
        expected = [artifact({**params, **fixed, **d.inputs}) for d in batches]
        good = [outputs for index, outputs in enumerate(expected) if index != poisoned]

    assert isinstance(result, RoundResult)
    sums = [part.sums() for part in result.parts]
    assert [index for index, found in enumerate(sums) if found is None] == [poisoned]
    assert all(part.late.seconds > 0 for part in result.parts)
    assert summed.pop(ANCHORS).item() == sum(Sums.of(outputs).anchors for outputs in good) > 0
    for name, tensor in summed.items():
        wanted = torch.zeros_like(tensor)
        for outputs in good:
            wanted += outputs[f"grad.{name}"]
        assert torch.equal(tensor, wanted), name
        assert not torch.equal(replica.masters[name], masters[name]), name
