"""A whole drafter worker at the reference bucket on one GPU: memory, what surrounds the step, starvation.

    PYTHONPATH=scripts python scripts/bench/gpu_worker.py [--recompute activations] [--store FOLDER]

The worker of the product with masters, Adam state and gradient sums, fed with features from pinned host
memory through the product's queue. Prints what the device reserved, the step inside the worker, the
optimizer's update, and the share of the time in which the drafter had nothing to do.
"""

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from bench.gpu_shapes import RECIPE, SHAPES, full_inputs

from aot.compile import BuildRequest, build
from aot.runtime import prepare
from aot.store import Store
from dflash.data.packing import MicroBatch
from dflash.drafter.model import init_parameters
from dflash.train.drafter_worker import Delivery, DrafterWorker
from dflash.train.late import Late
from dflash.train.noise import Span
from dflash.train.optimizer import Replica
from dflash.train.pipeline import Hub, OrderedQueue
from dflash.train.plan import TRAIN, Round, WorkItem
from dflash.train.target_worker import Courier

FACTORY = "dflash.drafter.programs:program_set"
CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
ROUNDS, WARM = 5, 2
FROZEN = ("embed_tokens", "lm_head", "slot_weights", "kl_weight", "temperature", "cap_weight")


def gib(count: int) -> float:
    return round(count / 2**30, 2)


def measure(shape_name: str, recompute: str, store: Store) -> dict[str, Any]:
    shape = SHAPES[shape_name]
    changes = ("loss.fused=true", f"drafter.recompute={recompute}")
    program, bucket = shape.program(*changes), shape.bucket
    request = BuildRequest(FACTORY, RECIPE, (*shape.overrides, *changes), TRAIN, str(bucket))
    build([request], store)
    prepared = prepare(store, [(program, bucket)], run=RECIPE, device=str(CUDA))
    config = shape.config().train

    inputs = full_inputs(shape, program, 0, CUDA)
    fixed = {name: inputs[name] for name in FROZEN}
    on_host = {
        name: tensor.cpu().pin_memory()
        for name, tensor in inputs.items()
        if name not in FROZEN and not name.startswith("param.")
    }
    del inputs
    replica = Replica(init_parameters(program.config, 0, "cpu"), torch.bfloat16, CUDA)
    torch.cuda.empty_cache()
    standing = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    worker = DrafterWorker(0, 1, CUDA, config, ROUNDS, prepared, replica, fixed)
    worker._calls = {(TRAIN, bucket): prepared[TRAIN, bucket].load(CUDA)}
    hub, G = Hub(600.0), config.grad_accum
    queue: OrderedQueue[Delivery] = OrderedQueue(hub, 1)
    documents = tuple(
        Span(str(i), i * shape.document, shape.document) for i in range(bucket.tokens // shape.document)
    )
    batch = MicroBatch((), bucket.tokens, bucket.anchors, bucket)
    rounds = [
        Round(TRAIN, r + 1, tuple(WorkItem(r * G + m, TRAIN, r + 1, m, 0, batch) for m in range(G)))
        for r in range(ROUNDS)
    ]

    def feed() -> None:
        courier, position = Courier(CPU, CUDA), 0
        with torch.cuda.device(CUDA), torch.no_grad():
            for work in rounds:
                for item in work.items:
                    queue.admit(position)
                    brought, arrived = courier.bring(on_host)
                    queue.put(position, Delivery(item, brought, documents, arrived))
                    position += 1

    threading.Thread(target=feed, daemon=True).start()
    rows, began = [], time.monotonic()
    with torch.cuda.device(CUDA), torch.no_grad():
        for work in rounds:
            result = worker._round(work, queue, hub)
            update = Late(CUDA)
            update.send(replica.step(worker.total, 6e-4, config))
            rows.append((result, update))
            if len(rows) > 1:
                rows[-2][1].wait()
            if len(rows) == WARM:
                update.wait()
                began = time.monotonic()
        rows[-1][1].wait()
    wall_s = time.monotonic() - began
    steady = rows[WARM:]
    steps = [part.late.seconds for result, _ in steady for part in result.parts]
    updates = [update.seconds for _, update in steady]
    assert all(part.sums() is not None for result, _ in rows for part in result.parts)
    return {
        "machine": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "bucket": str(bucket),
        "recompute": recompute,
        "standing_gib": gib(standing),
        "peak_allocated_gib": gib(torch.cuda.max_memory_allocated()),
        "peak_reserved_gib": gib(torch.cuda.max_memory_reserved()),
        "step_in_worker_ms": round(1e3 * statistics.median(steps), 1),
        "update_ms": round(1e3 * statistics.median(updates), 2),
        "ktok_per_s": round(len(steps) * bucket.tokens / wall_s / 1e3, 2),
        "starved": round(1 - (sum(steps) + sum(updates)) / wall_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="reference")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--store", type=Path, default=Path("runs/bench-gpu/store"))
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.shape, arguments.recompute, Store(arguments.store)), indent=1))


if __name__ == "__main__":
    main()
