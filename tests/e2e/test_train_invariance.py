"""What must not change an update: how many drafters share the work, what a document is packed with."""

import math
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from aot.buckets import Bucket
from aot.errors import EXIT_OK
from aot.lockfile import read_lock
from aot.runtime import LoadedArtifact, PreparedArtifact
from dflash.config import load_config
from dflash.data.dataset import Documents
from dflash.drafter.model import init_parameters
from dflash.drafter.programs import make_programs
from dflash.train import checkpoint, coordinator
from dflash.train.optimizer import ANCHORS
from dflash.train.plan import TRAIN, RunPlan
from dflash.train.run import RunFailed
from tests.support.drafter import run_eager
from tests.support.models import one_thread
from tests.support.oracle import oracle_step, relative_errors
from tests.support.tiny_run import SMALL, TinyRun
from tests.support.training import rows, tiny_config, train_here

Tensors = dict[str, torch.Tensor]
NOISE = ("train.noise_start=0.3", "train.noise_end=0.1")


@dataclass
class Observed:
    """Of each step the gradient sum over all its micro-batches, before scaling; and what the run changed."""

    gradients: list[Tensors]
    update: Tensors


def observe(tiny: TinyRun, output: Path, *overrides: str) -> Observed:
    """Train in this process and keep what the coordinator works with."""
    gradients: list[Tensors] = []
    original = coordinator.sum_gradients

    def recorded(per_worker, devices):
        totals = original(per_worker, devices)
        total = totals[devices[0]]
        gradients.append({name: tensor.clone() for name, tensor in total.items() if name != ANCHORS})
        return totals

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "sum_gradients", recorded)
        assert train_here(tiny, output, *overrides) == EXIT_OK
    config = tiny_config(tiny, output)
    before = init_parameters(config.drafter, config.train.seed, "cpu")
    after = checkpoint.load_masters(checkpoint.folders(output)[-1])
    return Observed(gradients, {name: after[name] - before[name] for name in after})


def beyond(tolerance: float, ours: Tensors, expected: Tensors) -> dict[str, float]:
    """Relative errors `|a-b|/|b|` above the tolerance, by name."""
    return {name: error for name, error in relative_errors(ours, expected).items() if error > tolerance}


@pytest.fixture(scope="module")
def alone(tiny: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """One step of 12 micro-batches by one drafter, with noise."""
    return observe(tiny, tmp_path_factory.mktemp("alone") / "out", *shared_by(1))


def shared_by(drafters: int) -> tuple[str, ...]:
    """12 micro-batches a step, and an Adam whose update is as smooth as the gradient, and large.

    With the usual epsilon a gradient near zero makes a whole step, with the sign of its rounding error; with
    the usual rate the rounding of a weight near 1 is 3e-5 of its update.
    """
    devices = ",".join(['"cpu"'] * drafters)
    return (
        f"topology.drafter_devices=[{devices}]",
        f"train.grad_accum={12 // drafters}",
        "train.max_steps=1",
        "train.adam_eps=1e-2",
        "train.lr=1.0",
        *NOISE,
    )


@pytest.mark.parametrize("drafters", [2, 3])
def test_a_step_is_the_same_whoever_shares_it(
    drafters: int, alone: Observed, tiny: TinyRun, tmp_path: Path
) -> None:
    """Not to the bit: 12 float32 gradients in another order of addition, about 1e-7."""
    together = observe(tiny, tmp_path / "out", *shared_by(drafters))
    assert len(together.gradients) == len(alone.gradients) == 1
    assert beyond(1e-6, together.gradients[0], alone.gradients[0]) == {}
    assert beyond(1e-6, together.update, alone.update) == {}


def test_the_noise_of_that_step_matters(alone: Observed, tiny: TinyRun, tmp_path: Path) -> None:
    """Without it every gradient is another one: what is equal above is equal with noise."""
    quiet = observe(tiny, tmp_path / "out", *shared_by(1), "train.noise_start=0", "train.noise_end=0")
    assert len(beyond(1e-2, quiet.gradients[0], alone.gradients[0])) == len(alone.gradients[0])


#: One step over every document, with as many anchors each whatever the micro-batch's size.
EPOCH = ("train.epochs=1", "train.grad_accum=40", "data.anchors_per_token=0.125", 'data.eval=""', *NOISE)
SMALL_ONLY = ("data.token_budget=128", "data.max_anchors=16")


def packings(tiny: TinyRun, output: Path, *overrides: str) -> set[tuple[int, ...]]:
    """Which documents the run puts together."""
    config = tiny_config(tiny, output, *overrides)
    plan = RunPlan.make(config, Documents.open(config.data.train), None)
    assert plan.total_steps == 1
    return {batch.documents for _, batch in plan.train}


def test_two_packings_of_the_same_documents_give_the_same_gradients(tiny: TinyRun, tmp_path: Path) -> None:
    loose = observe(tiny, tmp_path / "loose", *EPOCH)
    tight = observe(tiny, tmp_path / "tight", *EPOCH, *SMALL_ONLY)
    packed = [packings(tiny, tmp_path, *EPOCH, *more) for more in ((), SMALL_ONLY)]
    assert sorted(sum(packed[0], ())) == sorted(sum(packed[1], ()))
    assert len(packed[0] & packed[1]) < 0.2 * len(packed[0])
    anchors = [rows(tmp_path / name, "train")[0]["anchors"] for name in ("loose", "tight")]
    assert anchors[0] == anchors[1] > 0
    assert beyond(1e-5, tight.gradients[0], loose.gradients[0]) == {}


@dataclass
class Call:
    """One call of an artifact."""

    inputs: Tensors
    outputs: Tensors


def first_call(tiny: TinyRun, output: Path, *overrides: str) -> tuple[str, Call]:
    """Train one step; return the train step's package digest and its first micro-batch's call."""
    calls: dict[str, Call] = {}
    original = LoadedArtifact.__call__

    def recorded(self, inputs):
        outputs = original(self, inputs)
        if self.name.startswith(TRAIN):
            calls[threading.current_thread().name] = Call(
                {name: tensor.clone() for name, tensor in inputs.items()},
                {name: tensor.clone() for name, tensor in outputs.items()},
            )
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedArtifact, "__call__", recorded)
        settings = ("train.max_steps=1", 'data.eval=""', *SMALL_ONLY)
        assert train_here(tiny, output, *settings, *overrides) == EXIT_OK
    lock = read_lock(checkpoint.folders(output)[-1] / "artifacts.lock")
    call = calls["drafter worker 0 (cpu)"]
    return lock[TRAIN, Bucket.parse(SMALL)].package_digest, call


def test_noise_and_weights_of_the_loss_are_inputs_of_one_artifact(tiny: TinyRun, tmp_path: Path) -> None:
    """Each setting matches the float64 oracle on what the artifact was given; the noise is what was asked."""
    quiet_package, quiet = first_call(tiny, tmp_path / "quiet", "train.noise_start=0", "train.noise_end=0")
    packages, losses = {quiet_package}, set()
    for amplitude, cap_weight in ((0.05, 0.1), (0.3, 1.5)):
        change = (f"train.noise_start={amplitude}", f"loss.cap_weight={cap_weight}")
        package, call = first_call(tiny, tmp_path / f"noise-{amplitude}", *change)
        packages.add(package)
        losses.add(call.outputs["loss"].item())
        used = call.inputs["doc_ids"] >= 0
        noise = (call.inputs["features"] - quiet.inputs["features"])[used]
        assert noise.abs().max() <= amplitude * 1.0001
        assert noise.std().item() == pytest.approx(amplitude / math.sqrt(3), rel=0.02)
        assert torch.equal(call.inputs["teacher_hidden"], quiet.inputs["teacher_hidden"])

        config = load_config(tiny.run_file, change)
        program = next(program for program in make_programs(config) if program.name == TRAIN)
        with one_thread():
            expected, gaps = oracle_step(config.drafter, config.loss, call.inputs)
        assert min(gaps) > 1e-5, "an argmax too close to call"
        # A drafter without a hit has no confidence term and no accuracy: zero is what both must say.
        zeros = {name for name in call.outputs if not expected[name].any()}
        assert all(not call.outputs[name].any() for name in zeros)
        shown = {name: tensor for name, tensor in call.outputs.items() if name not in zeros}
        eager = run_eager(program, call.inputs)
        twin = relative_errors({name: eager[name] for name in shown}, expected)
        for name, error in relative_errors(shown, expected).items():
            assert error <= max(1e-5, 1.5 * twin[name]), name
    assert len(packages) == 1
    assert len(losses) == 2


def test_three_workers_on_one_device_never_share_a_loader(tiny: TinyRun, tmp_path: Path, monkeypatch) -> None:
    callers: dict[int, set[str]] = defaultdict(set)
    loaders = []  # kept, so that no two have one id
    original = LoadedArtifact.__call__

    def recorded(self, inputs):
        loaders.append(self._loader)
        callers[id(self._loader)].add(threading.current_thread().name)
        return original(self, inputs)

    monkeypatch.setattr(LoadedArtifact, "__call__", recorded)
    assert train_here(tiny, tmp_path / "out", "train.max_steps=4") == EXIT_OK
    assert {len(names) for names in callers.values()} == {1}
    assert {name for names in callers.values() for name in names} == {
        f"drafter worker {index} (cpu)" for index in range(3)
    }


def test_a_shared_loader_ends_the_run(tiny: TinyRun, tmp_path: Path, monkeypatch) -> None:
    shared: dict[str, LoadedArtifact] = {}
    load, lock = PreparedArtifact.load, threading.Lock()

    def once(self, device):
        with lock:
            if self.name not in shared:
                shared[self.name] = load(self, device)
            return shared[self.name]

    monkeypatch.setattr(PreparedArtifact, "load", once)
    with pytest.raises(RunFailed, match=r"drafter worker \d .* each worker loads its own"):
        train_here(tiny, tmp_path / "out")
