"""Trial runs in a child process: what fails or crashes there is refused by name, and this process goes on."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aot.canary import Trial, plausible_inputs, try_packages
from aot.errors import CorruptArtifact
from aot.program import CallSpec, TensorSpec
from aot.store import Store
from tests.support.toy import SMALL, ToyStep

PROGRAM = ToyStep()


@pytest.fixture(scope="module")
def package(toy_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (manifest,) = toy_store.manifests("toy_step", SMALL)
    path = tmp_path_factory.mktemp("canary") / "toy.pt2"
    path.write_bytes(toy_store.read_package(manifest))
    return path


def trial(path: Path, name: str = "toy") -> Trial:
    return Trial(name, str(path), PROGRAM.call_spec(SMALL), "cpu")


def crashing(package: Path, folder: Path) -> Path:
    """The package with its library's code overwritten by an instruction that traps."""
    path = folder / "crash.pt2"
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(path, "w") as target:
        for member in source.infolist():
            content = source.read(member)
            if member.filename.endswith(".so"):
                content = content[:4096] + b"\xcc" * (len(content) - 4096)
            target.writestr(member, content)
    return path


def test_good_packages_pass_with_more_threads_than_cores(package: Path) -> None:
    try_packages([trial(package), trial(package)], {"OMP_NUM_THREADS": "8"})


def test_a_package_that_crashes_takes_only_the_child_along_and_leaves_nothing(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    crash = crashing(package, tmp_path)
    with pytest.raises(CorruptArtifact, match=r"^second: .* killed by SIG"):
        try_packages([trial(package, "first"), trial(crash, "second"), trial(package, "third")])
    assert list(scratch.iterdir()) == []


def test_outputs_that_are_not_as_declared_are_named(package: Path) -> None:
    spec = PROGRAM.call_spec(SMALL)
    wrong = replace(spec, outputs=(spec.outputs[0], *reversed(spec.outputs[1:])))
    with pytest.raises(CorruptArtifact, match=r"^toy: .*output 'grad\.w2'"):
        try_packages([replace(trial(package), call_spec=wrong)])


def test_a_trial_that_takes_too_long_is_ended(package: Path) -> None:
    with pytest.raises(CorruptArtifact, match=r"^toy: .*ran longer than 0 s"):
        try_packages([trial(package)], timeout_s=0.01)


def test_inputs_follow_the_spec_and_index_nothing_out_of_range() -> None:
    specs = (
        TensorSpec("transposed", (4, 6), "bfloat16", (1, 4)),
        TensorSpec("index", (5,), "int64"),
        TensorSpec("valid", (3,), "bool"),
        TensorSpec("weight", (), "float32"),
    )
    tensors = plausible_inputs(CallSpec("cpu", specs, ()).inputs, torch.device("cpu"))
    for spec, tensor in zip(specs, tensors, strict=True):
        found = TensorSpec(
            spec.name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.stride()
        )
        assert found == spec
    assert tensors[0].float().abs().max() > 0
    assert not tensors[1].any()
    assert tensors[2].all()
