"""Resolving, verifying, loading and calling artifacts on the toy program."""

import ast
import os
import random
import subprocess
import sys
import threading
import timeit
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from aot import runtime
from aot.calls import CallCheck, InputMismatch
from aot.canary import CHECK_INPUTS_VARIABLE, child_environment
from aot.errors import CorruptArtifact, MissingArtifact, StaleArtifact, UntrustedArtifact
from aot.fingerprint import Fingerprint
from aot.lockfile import LockMismatch, lock_of
from aot.program import CallSpec, TensorSpec
from aot.runtime import Fingerprints, LoadedArtifact, PreparedArtifact, prepare, resolve, resolve_all
from aot.store import Store
from tests.support.stores import FINGERPRINT, publish
from tests.support.toy import LARGE, SMALL, ToyStep

CPU = torch.device("cpu")
PROGRAM = ToyStep()
SPEC = PROGRAM.call_spec(SMALL)
Inputs = dict[str, torch.Tensor]


def toy_inputs(bucket=SMALL, seed: int = 0) -> Inputs:
    return dict(zip(SPEC.input_names, PROGRAM.example_inputs(bucket, seed, CPU), strict=True))


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("private")


@pytest.fixture(scope="module")
def prepared(toy_store: Store, private: Path) -> PreparedArtifact:
    return prepare(toy_store, [(PROGRAM, SMALL)], folder=private)["toy_step", SMALL]


@pytest.fixture(scope="module")
def artifact(prepared: PreparedArtifact) -> LoadedArtifact:
    return prepared.load(CPU)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the packages that would be tried in a child process, and try none."""
    names: list[str] = []
    monkeypatch.setattr(
        runtime, "try_packages", lambda trials, **_: names.extend(trial.name for trial in trials)
    )
    return names


def test_outputs_come_by_name_and_equal_the_float64_twin(artifact: LoadedArtifact) -> None:
    inputs = toy_inputs(seed=3)
    outputs = artifact(inputs)
    assert tuple(outputs) == SPEC.output_names
    for tensor, expected in zip(
        outputs.values(), PROGRAM.reference(SMALL, tuple(inputs.values())), strict=True
    ):
        assert expected.norm() > 0
        assert (tensor.double() - expected).norm() / expected.norm() < 1e-5


def test_inputs_are_matched_by_name_not_by_order(artifact: LoadedArtifact) -> None:
    inputs = toy_inputs()
    shuffled = dict(reversed(inputs.items()))
    assert torch.equal(artifact(shuffled)["loss"], artifact(inputs)["loss"])


def test_weights_that_require_gradients_are_fine(artifact: LoadedArtifact) -> None:
    inputs = toy_inputs()
    parameters = {**inputs, "param.w1": torch.nn.Parameter(inputs["param.w1"])}
    loss = artifact(parameters)["loss"]
    assert torch.equal(loss, artifact(inputs)["loss"])
    assert not loss.requires_grad


def _neighbour(inputs: Inputs, name: str, dice: random.Random) -> object:
    return toy_inputs(LARGE, dice.randrange(100))[name]


def _other_dtype(inputs: Inputs, name: str, dice: random.Random) -> object:
    tensor = inputs[name]
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool]
    return tensor.to(dice.choice([kind for kind in kinds if kind != tensor.dtype]))


def _other_stride(inputs: Inputs, name: str, dice: random.Random) -> object:
    """The same shape and values in another layout: every second element, or a transposed copy."""
    tensor = inputs[name]
    if tensor.dim() == 2 and dice.random() < 0.5:
        return tensor.t().contiguous().t()
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _other_rank(inputs: Inputs, name: str, dice: random.Random) -> object:
    tensor = inputs[name]
    return tensor.unsqueeze(dice.randrange(tensor.dim() + 1)) if dice.random() < 0.5 else tensor.sum()


def _other_size(inputs: Inputs, name: str, dice: random.Random) -> object:
    tensor = inputs[name]
    shape = list(tensor.shape)
    axis = dice.randrange(len(shape))
    shape[axis] = dice.choice([size for size in range(2 * shape[axis] + 1) if size != shape[axis]])
    return tensor.new_zeros(shape)


def _other_device(inputs: Inputs, name: str, dice: random.Random) -> object:
    return inputs[name].to("meta")


def _no_tensor(inputs: Inputs, name: str, dice: random.Random) -> object:
    tensor = inputs[name]
    return dice.choice([None, 1.0, tensor.tolist(), np.asarray(tensor), tensor.to_sparse()])


FAULTS: dict[str, Callable[[Inputs, str, random.Random], object]] = {
    "neighbouring bucket": _neighbour,
    "dtype": _other_dtype,
    "stride": _other_stride,
    "rank": _other_rank,
    "size": _other_size,
    "device": _other_device,
    "no tensor": _no_tensor,
}


def test_a_thousand_random_wrong_calls_are_refused_naming_the_input(
    artifact: LoadedArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NotReached:
        def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            raise AssertionError("a wrong call reached the package")

    monkeypatch.setattr(artifact, "_loader", NotReached())
    dice, drawn = random.Random(0), Counter()
    right = toy_inputs()
    while drawn.total() < 1000:
        fault, name = dice.choice(list(FAULTS)), dice.choice(SPEC.input_names)
        wrong = FAULTS[fault](right, name, dice)
        if fault == "neighbouring bucket" and wrong.shape == right[name].shape:
            # Weights are the same in every bucket.
            continue
        with pytest.raises(InputMismatch, match=rf"toy_step 128x8 .*input '{name}' "):
            artifact({**right, name: wrong})
        drawn[fault] += 1
    assert set(drawn) == set(FAULTS)
    assert min(drawn.values()) > 50


def test_a_whole_batch_of_the_neighbouring_bucket_is_refused(artifact: LoadedArtifact) -> None:
    with pytest.raises(InputMismatch, match=r"input 'features' has shape \(256, 8\), expected \(128, 8\)"):
        artifact(toy_inputs(LARGE))


def test_missing_and_unexpected_inputs_are_named(artifact: LoadedArtifact) -> None:
    inputs = toy_inputs()
    with pytest.raises(InputMismatch, match="unexpected input 'extra'"):
        artifact({**inputs, "extra": torch.ones(1)})
    del inputs["targets"]
    with pytest.raises(InputMismatch, match="input 'targets' is missing"):
        artifact(inputs)


def test_a_call_of_a_real_step_is_checked_within_100_microseconds() -> None:
    # As many inputs as a drafter of five layers has: 58 parameters, embedding, head, batch and weights.
    spec = CallSpec("cpu", tuple(TensorSpec(f"input{i}", (64, 32), "float32") for i in range(75)), ())
    check = CallCheck("step", spec, CPU)
    inputs = {name: torch.zeros(64, 32) for name in spec.input_names}
    # The best of many short batches: other processes of a busy machine are not the check's doing.
    seconds = min(timeit.repeat(lambda: check(inputs), number=10, repeat=300)) / 10
    assert seconds <= 100e-6


def test_a_second_thread_may_not_call_a_loaded_artifact(artifact: LoadedArtifact) -> None:
    caught: list[Exception] = []

    def call() -> None:
        try:
            artifact(toy_inputs())
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=call, name="intruder")
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert "intruder" in str(caught[0])


def test_a_package_is_not_loaded_for_another_kind_of_device(prepared: PreparedArtifact) -> None:
    with pytest.raises(InputMismatch, match="runs on cpu, not on 'cuda:0'"):
        prepared.load(torch.device("cuda:0"))


PRELUDE = """
import sys, torch
from pathlib import Path
from aot.runtime import prepare
from aot.store import Store
from tests.support.toy import LARGE, SMALL, ToyStep
made = prepare(Store(sys.argv[1]), [(ToyStep(), SMALL)], folder=Path(sys.argv[2]))["toy_step", SMALL]
loaded = made.load(torch.device("cpu"))
"""


def in_child(
    code: str, store: Store, private: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process that has loaded the toy artifact."""
    inherited = {name: value for name, value in child_environment().items() if name != CHECK_INPUTS_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code, str(store.root), str(private)],
        capture_output=True,
        text=True,
        env={**inherited, **(environment or {})},
    )


def test_the_package_checks_its_inputs_too(
    toy_store: Store, private: Path, prepared: PreparedArtifact
) -> None:
    """Torch's own check stands behind ours; it has to be asked for before a package's first call."""
    wrong_bucket = 'loaded._loader.run(list(ToyStep().example_inputs(LARGE, 0, torch.device("cpu"))))'
    result = in_child(wrong_bucket, toy_store, private)
    assert result.returncode == 1
    assert "unmatched" in result.stderr


def test_loading_and_calling_imports_no_compiler_and_runs_none(
    toy_store: Store, private: Path, prepared: PreparedArtifact, tmp_path: Path
) -> None:
    trap, log = tmp_path / "bin", tmp_path / "log"
    trap.mkdir()
    for name in ("gcc", "g++", "cc", "c++", "nvcc"):
        (trap / name).write_text(f"#!/bin/sh\necho {name} >> {log}\nexit 1\n")
        (trap / name).chmod(0o755)
    caches = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    code = """
names = ToyStep().call_spec(SMALL).input_names
loaded(dict(zip(names, ToyStep().example_inputs(SMALL, 0, torch.device("cpu")))))
print([name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo", "triton"))])
"""
    environment = {**caches, "PATH": f"{trap}:{os.environ['PATH']}"}
    result = in_child(code, toy_store, private, environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
    assert not log.exists()
    assert not any(Path(folder).exists() for folder in caches.values())


def test_nothing_is_left_in_the_temporary_folder_not_even_by_a_killed_process(
    toy_store: Store, private: Path, prepared: PreparedArtifact, tmp_path: Path
) -> None:
    """Fails without `unpacking_in`: torch unpacks into TMPDIR, and nobody can tell later whose that was."""
    code = """
import os, signal
print([str(path) for path in made.path.parent.glob("aotinductor_*")], flush=True)
names = ToyStep().call_spec(SMALL).input_names
loaded(dict(zip(names, ToyStep().example_inputs(SMALL, 0, torch.device("cpu")))))
if os.environ.get("KILL"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    for extra in ({}, {"KILL": "1"}):
        result = in_child(code, toy_store, private, {"TMPDIR": str(tmp_path), **extra})
        assert (result.returncode, result.stderr) == (-9 if extra else 0, "")
        (unpacked,) = ast.literal_eval(result.stdout)
        assert Path(unpacked).exists() == bool(extra)
        assert list(tmp_path.iterdir()) == []
    in_child("", toy_store, private)
    assert not Path(unpacked).parent.exists()


def test_a_missing_artifact_is_named_with_the_command_that_builds_it(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifact, match="toy_step 128x8: no artifact") as caught:
        resolve(Store(tmp_path), PROGRAM, SMALL, Fingerprints()("cpu"), "run.toml --set a=1")
    assert caught.value.hint == f"`dflash-aot build run.toml --set a=1 --buckets 128x8 --store {tmp_path}`"


def test_all_that_cannot_be_used_is_one_error(toy_store: Store) -> None:
    other = ToyStep(inner=32)
    needs = [(PROGRAM, SMALL), (other, SMALL), (other, LARGE), (ToyStep(name="absent"), LARGE)]
    with pytest.raises(MissingArtifact) as caught:
        resolve_all(toy_store, needs, Fingerprints(), "run.toml")
    assert caught.value.message.startswith("3 of 4 artifacts cannot be used: toy_step 128x8: ")
    assert "identity.network.inner: expected 32, found 16" in caught.value.message
    assert "absent 256x16: no artifact" in caught.value.message
    assert caught.value.hint is not None
    assert "dflash-aot build run.toml --buckets 128x8,256x16" in caught.value.hint


def test_a_damaged_manifest_of_another_key_stops_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when `resolve` reads with `Store.manifests`, says nothing, or calls the damaged one missing."""
    store, package = Store(tmp_path / "store"), tmp_path / "model.pt2"
    package.write_bytes(b"package")
    good, other = publish(store, package), publish(store, package, inner=32)
    path = store.manifest_path("toy_step", SMALL, other.key)
    path.write_bytes(b"{}")
    locked = lock_of([other])
    assert resolve(store, PROGRAM, SMALL, FINGERPRINT) == good
    assert f"warning: {path}: " in capsys.readouterr().err
    with pytest.raises(LockMismatch, match="does not name it"):
        resolve(store, PROGRAM, SMALL, FINGERPRINT, lock={})
    with pytest.raises(CorruptArtifact, match=other.key):
        resolve(store, PROGRAM, SMALL, FINGERPRINT, lock=locked)
    store.manifest_path("toy_step", SMALL, good.key).unlink()
    with pytest.raises(CorruptArtifact, match=other.key) as caught:
        resolve(store, PROGRAM, SMALL, FINGERPRINT)
    assert "dflash-aot build RUN --buckets 128x8" in caught.value.hint


def on_other_machine(**changed: str) -> Fingerprint:
    return replace(Fingerprints()("cpu"), **changed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("torch_git", "0" * 40),
        ("torch_version", "2.12.0"),
        ("cuda", "13.0"),
        ("triton", "3.6.0"),
        ("device_arch", "aarch64"),
        ("glibc", "2.17"),
        ("cpu_isa", "sse"),
    ],
)
def test_an_artifact_of_another_environment_is_stale_naming_the_field(
    toy_store: Store, field: str, value: str
) -> None:
    with pytest.raises(StaleArtifact, match=rf"toy_step 128x8: .*fingerprint\.{field}: ") as caught:
        resolve(toy_store, PROGRAM, SMALL, on_other_machine(**{field: value}))
    assert caught.value.hint is not None
    assert "dflash-aot build RUN --buckets 128x8" in caught.value.hint


def test_another_python_and_a_richer_cpu_are_no_reason_to_refuse(toy_store: Store) -> None:
    here = Fingerprints()("cpu")
    richer = replace(here, python="3.13.0", cpu_isa=f"{here.cpu_isa} zz_new_instructions")
    assert resolve(toy_store, PROGRAM, SMALL, richer).program == "toy_step"


def test_a_package_is_tried_once_per_machine(toy_store: Store, tmp_path: Path, untried: list[str]) -> None:
    needs = [(PROGRAM, SMALL), (PROGRAM, LARGE)]
    prepare(toy_store, needs, folder=tmp_path)
    assert len(untried) == 2
    prepare(toy_store, needs, folder=tmp_path)
    assert len(untried) == 2


def test_a_failed_trial_is_no_trial(
    toy_store: Store, tmp_path: Path, untried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(trials: object, **_: object) -> None:
        raise CorruptArtifact("crashed")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "try_packages", crash)
        with pytest.raises(CorruptArtifact, match="crashed"):
            prepare(toy_store, [(PROGRAM, SMALL)], folder=tmp_path)
    prepare(toy_store, [(PROGRAM, SMALL)], folder=tmp_path)
    assert len(untried) == 1


def test_a_damaged_private_copy_is_replaced(toy_store: Store, tmp_path: Path, untried: list[str]) -> None:
    path = prepare(toy_store, [(PROGRAM, SMALL)], folder=tmp_path)["toy_step", SMALL].path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert (
        prepare(toy_store, [(PROGRAM, SMALL)], folder=tmp_path)["toy_step", SMALL].path.read_bytes() == whole
    )


def test_a_private_folder_that_others_can_write_is_refused(toy_store: Store, tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(UntrustedArtifact, match="may be written by") as caught:
        prepare(toy_store, [(PROGRAM, SMALL)], folder=tmp_path)
    assert "DFLASH_AOT_PRIVATE_DIR" in (caught.value.hint or "")


def damaged_blob(store: Store, damage: Callable[[bytearray], bytes | bytearray]) -> Path:
    manifest = store.manifests("toy_step", SMALL)[0]
    path = store.blob_path(manifest)
    path.write_bytes(damage(bytearray(path.read_bytes())))
    return path


def flip_one_bit(content: bytearray) -> bytearray:
    content[len(content) // 2] ^= 1
    return content


@pytest.mark.parametrize(
    "damage", [flip_one_bit, lambda content: content[:-1]], ids=["flipped bit", "truncated"]
)
def test_a_damaged_artifact_is_refused_before_anything_is_tried(
    own_store: Store, tmp_path: Path, untried: list[str], damage: Callable[[bytearray], bytearray]
) -> None:
    blob = damaged_blob(own_store, damage)
    with pytest.raises(CorruptArtifact, match=blob.name) as caught:
        prepare(own_store, [(PROGRAM, SMALL)], run="run.toml", folder=tmp_path)
    assert "dflash-aot build run.toml" in (caught.value.hint or "")
    assert untried == []


def test_an_edited_manifest_is_refused(own_store: Store, tmp_path: Path, untried: list[str]) -> None:
    (path,) = own_store.manifest_paths("toy_step", SMALL)
    path.write_bytes(path.read_bytes().replace(b'"inner":16', b'"inner":17'))
    with pytest.raises(CorruptArtifact, match=path.name) as caught:
        prepare(own_store, [(PROGRAM, SMALL)], run="run.toml", folder=tmp_path)
    assert "dflash-aot build run.toml" in (caught.value.hint or "")
    assert untried == []
