"""The update depends on the micro-batches alone, not on who ran them or how documents were packed."""

import threading

import pytest
import torch
from safetensors.torch import load_file

from aot import runtime
from aot.buckets import Bucket
from aot.errors import EXIT_OK
from aot.store import Store
from dflash.config import load_config
from dflash.data.anchors import draw_anchors
from dflash.data.dataset import Documents
from dflash.data.packing import pack
from dflash.drafter.model import init_parameters
from dflash.drafter.programs import make_programs, weights
from dflash.target.huggingface import HuggingFaceTarget
from dflash.train import checkpoint
from dflash.train.noise import add_noise
from dflash.train.plan import TRAIN, RunPlan
from dflash.train.target_worker import packed_features, spans
from tests.support.oracle import oracle_step, relative_errors
from tests.support.training import rows, tiny_config, train_here

CPU = torch.device("cpu")
BUCKET = Bucket(256, 32)


def drafters(count, group=12):
    devices = ", ".join(['"cpu"'] * count)
    return f"topology.drafter_devices=[{devices}]", f"train.grad_accum={group // count}"


def relative(a, b):
    return {name: ((a[name] - b[name]).norm() / b[name].norm()).item() for name in b}


def test_one_two_and_three_drafters_make_equal_updates(tiny, tmp_path):
    """Twelve micro-batches a step, noise on; weights and both moments are compared by name."""
    results = {}
    for count in (1, 2, 3):
        output = tmp_path / str(count)
        assert train_here(tiny, output, *drafters(count), "train.epochs=3", "train.max_steps=4") == EXIT_OK
        folder = checkpoint.folders(output)[-1]
        results[count] = load_file(folder / checkpoint.MASTERS) | load_file(folder / checkpoint.MOMENTS)
        assert [row["anchors"] for row in rows(output)] == [row["anchors"] for row in rows(tmp_path / "1")]
    for count in (2, 3):
        for name, error in relative(results[count], results[1]).items():
            assert error <= 1e-5, f"{count} drafters, {name}: {error:.1e}"


def test_three_workers_on_one_device_never_share_a_loader(tiny, tmp_path, monkeypatch):
    loaded, called = [], []
    load, call = runtime.PreparedArtifact.load, runtime.LoadedArtifact.__call__

    def recording_load(self, device):
        artifact = load(self, device)
        loaded.append((threading.current_thread().name, self.name, artifact._loader))
        return artifact

    def recording_call(self, inputs):
        called.append((threading.current_thread().name, self._loader))
        return call(self, inputs)

    monkeypatch.setattr(runtime.PreparedArtifact, "load", recording_load)
    monkeypatch.setattr(runtime.LoadedArtifact, "__call__", recording_call)
    train_here(tiny, tmp_path / "out")
    assert len({thread for thread, _, _ in loaded}) == 3
    assert len(loaded) == len({(thread, name) for thread, name, _ in loaded}) == 9
    owners = {id(loader): thread for thread, _, loader in loaded}
    assert len(owners) == 9
    assert {(thread, id(loader)) for thread, loader in called} <= {(t, i) for i, t in owners.items()}
    assert len(called) == 36 + 3


class OneStep:
    """The tiny run's train step on chosen documents, outside of any run."""

    def __init__(self, tiny, tmp_path, *overrides):
        self.config = tiny_config(tiny, tmp_path, *overrides)
        self.program = make_programs(self.config)[0]
        store = Store(tiny.store)
        prepared = runtime.prepare(store, [(self.program, BUCKET)])[TRAIN, BUCKET]
        self.artifact, self.call = prepared.manifest, prepared.load(CPU)
        self.documents = Documents.open(self.config.data.train)
        drafter = self.config.drafter
        self.target = HuggingFaceTarget.load(self.config.target, drafter.target_layer_ids, CPU)
        self.fixed = {
            **{f"param.{name}": value for name, value in init_parameters(drafter, 3, CPU).items()},
            "embed_tokens": self.target.embed_tokens,
            "lm_head": self._head(),
            **weights(self.config.loss, drafter.block_size, CPU),
        }

    def _head(self):
        """The target's head, shouting for words of the first documents, so that some guesses are right."""
        head = self.target.lm_head.clone()
        words = {int(word) for index in range(2) for word in self.documents[index].input_ids}
        head[sorted(words)] *= 6
        return head

    def inputs(self, members, amplitude=0.05):
        """One packed micro-batch of these documents with noise of epoch 0."""
        config = self.config
        documents = [self.documents[index] for index in members]
        rate, limit = config.data.resolved_anchors_per_token, config.data.max_anchors
        anchors = [draw_anchors(0, 0, d.id, d.loss_mask, rate, limit) for d in documents]
        packed = pack(documents, anchors, BUCKET)
        tensors = packed_features(self.target.features(packed.token_ids), BUCKET.tokens, torch.float32)
        add_noise(tensors["features"], spans(packed), amplitude, 0, config.train)
        return {**self.fixed, **tensors, **packed.tensors}

    def gradients(self, *micro_batches):
        """Gradient sums over the micro-batches, by name."""
        total = {}
        for members in micro_batches:
            for name, value in self.call(self.inputs(members)).items():
                if name.startswith("grad.") or name in ("loss", "anchors"):
                    total[name] = total.get(name, 0) + value
        return total


def test_two_packings_of_the_same_documents_have_equal_gradients(tiny, tmp_path):
    step = OneStep(tiny, tmp_path)
    members = sorted(range(8), key=lambda index: len(step.documents[index].input_ids))
    packings = ([0, 1, 2, 3], [4, 5], [6, 7]), ([7, 0], [3, 6], [5, 1, 2, 4])
    first, second = (
        step.gradients(*([members[i] for i in group] for group in packing)) for packing in packings
    )
    assert first["anchors"] == second["anchors"]
    for name, error in relative(second, first).items():
        assert error <= 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("amplitude", [0.01, 0.2])
@pytest.mark.parametrize("cap_weight", [0.1, 0.7])
def test_noise_and_cap_weight_are_inputs_of_one_artifact_that_matches_the_oracle(
    tiny, tmp_path, amplitude, cap_weight
):
    step = OneStep(tiny, tmp_path, f"loss.cap_weight={cap_weight}")
    assert step.artifact.key == OneStep(tiny, tmp_path).artifact.key
    inputs = step.inputs(range(2), amplitude)
    outputs = step.call(inputs)
    reference, gaps = oracle_step(step.config.drafter, step.config.loss, inputs)
    twin = step.program.run(step.config.drafter, inputs)
    assert min(gaps) > 1e-5
    names = [name for name, value in outputs.items() if reference[name].norm() > 0]
    assert "cap" in names
    errors, own = (relative_errors({n: o[n] for n in names}, reference) for o in (outputs, twin))
    for name in names:
        assert errors[name] <= max(1e-5, 1.5 * own[name]), f"{name}: {errors[name]:.1e}"


def test_the_plan_is_the_same_for_every_number_of_workers(tiny, tmp_path):
    train = Documents.open(load_config(tiny.run_file).data.train)
    digests = {
        RunPlan.make(tiny_config(tiny, tmp_path, *drafters(n)), train, None).digest() for n in (1, 2, 3)
    }
    assert len(digests) == 1
