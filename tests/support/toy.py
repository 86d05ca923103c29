"""The smallest honest program: one training step of a two-layer network over gathered rows, on the CPU.

It exercises what a real step has (parameters as inputs, an index input, a loss and gradients as outputs) and
compiles in seconds. `program_set` is its factory: `tests.support.toy:program_set`.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aot.buckets import Bucket, LengthHistogram, parse_buckets
from aot.compile import BuildRequest, build
from aot.errors import ConfigError
from aot.program import CallSpec, Program, ProgramSet, TensorSpec
from aot.store import Store

FACTORY = "tests.support.toy:program_set"
SMALL, LARGE = Bucket(128, 8), Bucket(256, 16)


def toy_loss(w1_HF, w2_FH, features_TH, targets_AH, anchors_A):
    """Summed squared error of the rows that the anchors name."""
    rows_AH = features_TH.index_select(0, anchors_A.long())
    return (torch.tanh(rows_AH @ w1_HF) @ w2_FH - targets_AH).square().sum()


def toy_step(w1_HF, w2_FH, features_TH, targets_AH, anchors_A):
    """Return the loss and its gradient for both weights."""
    w1_HF, w2_FH = (weight.detach().requires_grad_() for weight in (w1_HF, w2_FH))
    loss = toy_loss(w1_HF, w2_FH, features_TH, targets_AH, anchors_A)
    return loss.detach(), *torch.autograd.grad(loss, (w1_HF, w2_FH))


@dataclass(frozen=True)
class ToyStep(Program):
    name: str = "toy_step"
    device_type: str = "cpu"
    hidden: int = 8
    inner: int = 16
    # Skips the probes of what the compiler can vectorise: a third of the build.
    compile_options: Mapping[str, bool | int | str] = field(default_factory=lambda: {"cpp.vec_isa_ok": True})

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"network": {"hidden": self.hidden, "inner": self.inner}}

    @property
    def source_modules(self) -> tuple[str, ...]:
        return ("tests.support.toy",)

    def check_bucket(self, bucket: Bucket) -> None:
        if bucket.anchors > bucket.tokens:
            raise ConfigError(f"bucket {bucket}: more anchors than tokens")

    def call_spec(self, bucket: Bucket) -> CallSpec:
        w1 = (self.hidden, self.inner)
        w2 = (self.inner, self.hidden)
        inputs = (
            TensorSpec("param.w1", w1, "float32"),
            TensorSpec("param.w2", w2, "float32"),
            TensorSpec("features", (bucket.tokens, self.hidden), "float32"),
            TensorSpec("targets", (bucket.anchors, self.hidden), "float32"),
            TensorSpec("anchors", (bucket.anchors,), "int32"),
        )
        outputs = (
            TensorSpec("loss", (), "float32"),
            TensorSpec("grad.w1", w1, "float32"),
            TensorSpec("grad.w2", w2, "float32"),
        )
        return CallSpec(self.device_type, inputs, outputs)

    def function(self, bucket: Bucket) -> Callable[..., tuple[torch.Tensor, ...]]:
        return toy_step

    def example_inputs(self, bucket: Bucket, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        tensors = [
            torch.randn(spec.shape, generator=generator) for spec in self.call_spec(bucket).inputs[:-1]
        ]
        anchors_A = torch.randint(bucket.tokens, (bucket.anchors,), generator=generator, dtype=torch.int32)
        return tuple(tensor.to(device) for tensor in (*tensors, anchors_A))

    def reference(self, bucket: Bucket, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return toy_step(*(t.double() if t.is_floating_point() else t for t in inputs))


def program_set(run_file: str, overrides: Sequence[str] = ()) -> ProgramSet:
    """Ignore `run_file`; overrides are `hidden=INT`, `inner=INT`, `name=TEXT` and `buckets=TxA,...`."""
    values = dict(text.split("=", 1) for text in overrides)
    buckets = parse_buckets(values.pop("buckets", f"{SMALL},{LARGE}"))
    program = ToyStep(**{key: text if key == "name" else int(text) for key, text in values.items()})
    sizes = {(bucket.tokens, bucket.anchors): 3 for bucket in buckets}
    return ProgramSet((program,), buckets, LengthHistogram({program.name: sizes}))


def requests(*buckets: Bucket, overrides: Sequence[str] = ()) -> list[BuildRequest]:
    """Build requests for the toy program."""
    return [BuildRequest(FACTORY, "toy", tuple(overrides), "toy_step", str(bucket)) for bucket in buckets]


def built_store(folder: Path) -> Store:
    """Return a store under `folder` with the toy's SMALL and LARGE artifacts; test processes may share it.

    The first caller builds. Tests that damage a store copy it first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "store")
    with (folder / "toy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(requests(SMALL, LARGE), store, jobs=2)
    return store


def session_store(base: Path) -> Store:
    """The toy's store of a test session, whose processes have their base folders side by side."""
    return built_store((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "toy")


def copied(store: Store, folder: Path) -> Store:
    """A copy of a store that a test may damage."""
    shutil.copytree(store.root, folder, ignore=shutil.ignore_patterns("build"))
    return Store(folder)
