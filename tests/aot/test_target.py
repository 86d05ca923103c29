"""Builds for other CPUs (row 24 of the fault table): a richer machine accepts, a poorer one refuses."""

import dataclasses
import itertools
import subprocess

import pytest

from aot.compile import build
from aot.errors import ConfigError, EnvironmentFault, StaleArtifact
from aot.fingerprint import ISA_FLAG, Fingerprint, cpu_flags
from aot.runtime import Fingerprints, prepare, resolve
from aot.store import Store
from aot.target import X86_LEVELS, Target
from aot.trace import key_inputs
from tests.support.stores import package_bytes
from tests.support.toy import SMALL, ToyStep, requests

LEVELS = list(X86_LEVELS)
NATIVE = " ".join(sorted(X86_LEVELS["x86-64-v4"] | {"amx_tile", "gfni", "sha_ni"}))
HERE = dataclasses.replace(
    Fingerprint(**{field.name: "2.13" for field in dataclasses.fields(Fingerprint)}),
    device_arch="x86_64",
    cpu_isa=NATIVE,
)


def on(flags: str) -> Fingerprint:
    return dataclasses.replace(HERE, cpu_isa=flags)


def test_each_level_contains_the_one_before_and_only_flags_that_are_compared():
    for smaller, larger in itertools.pairwise(LEVELS):
        assert X86_LEVELS[smaller] < X86_LEVELS[larger]
    for flag in X86_LEVELS[LEVELS[-1]]:
        assert ISA_FLAG.match(flag), flag


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("machine", [*LEVELS, "native"])
def test_a_machine_accepts_what_it_can_run_and_refuses_the_rest_by_name(level: str, machine: str):
    """Every pair of an artifact's level and a machine's. Fails when the target's options are compared at load
    (nobody accepts) or when `cpu_isa` is not (SIGILL)."""
    built = key_inputs(ToyStep(), SMALL, HERE, Target(level))
    here = NATIVE if machine == "native" else " ".join(sorted(X86_LEVELS[machine]))
    found = key_inputs(ToyStep(), SMALL, on(here)).differences(built)
    missing = X86_LEVELS[level] - set(here.split())
    assert [difference.field for difference in found] == (["fingerprint.cpu_isa"] if missing else [])
    for flag in missing:
        assert flag in found[0].found
    # A build, unlike a load, wants exactly this target.
    assert key_inputs(ToyStep(), SMALL, HERE).key() != built.key()
    assert key_inputs(ToyStep(), SMALL, HERE).differences(built, at_load=False)


def test_the_key_of_a_target_does_not_depend_on_the_machine_it_was_built_on():
    """Fails when the builder's own instructions stay in the fingerprint."""
    other = on(f"{NATIVE} avx512_fp16")
    keys = {key_inputs(ToyStep(), SMALL, here, Target("x86-64-v3")).key() for here in (HERE, other)}
    assert len(keys) == 1
    assert key_inputs(ToyStep(), SMALL, HERE).key() not in keys


def test_an_option_of_the_program_that_is_no_target_is_still_compared():
    """Fails when `cpp.march` is ignored whatever it says."""
    program = ToyStep(compile_options={"cpp.march": "x86-64-v3"})
    assert "compile_options.cpp.march" in [
        difference.field
        for difference in key_inputs(ToyStep(), SMALL, HERE).differences(key_inputs(program, SMALL, HERE))
    ]


@pytest.mark.parametrize("text", ["x86-64-v3", "cpu:", "cpu:native", "cuda:sm_80", "cpu:x86-64-v9"])
def test_an_unknown_target_is_a_config_error_that_lists_the_known_ones(text: str):
    with pytest.raises(ConfigError, match="unknown target") as caught:
        Target.parse(text)
    assert "cpu:x86-64-v3" in caught.value.hint


@pytest.mark.parametrize(
    ("here", "release", "message"),
    [
        (on("avx avx2"), (2, 13), "lacks abm bmi1"),
        (dataclasses.replace(HERE, device_arch="aarch64"), (2, 13), "is aarch64"),
        (HERE, (2, 11), "always compiles for the machine"),
    ],
)
def test_a_target_that_cannot_be_tried_or_told_here_is_an_environment_fault(here, release, message):
    with pytest.raises(EnvironmentFault, match=message):
        Target("x86-64-v3").fingerprint(here, release)


def test_a_gpu_program_has_no_cpu_target():
    with pytest.raises(ConfigError, match="runs on cuda"):
        key_inputs(ToyStep(device_type="cuda"), SMALL, HERE, Target("x86-64-v3"))


@pytest.mark.parametrize(
    ("mine", "theirs", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_86", "sm_80", True),
        ("sm_89", "sm_86", True),
        ("sm_80", "sm_86", False),
        ("sm_86", "sm_75", False),
        ("sm_90", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("sm_103", "sm_100", False),
        ("sm_120", "sm_12", False),
        ("x86_64", "sm_80", False),
    ],
)
def test_a_later_gpu_of_the_same_line_runs_an_artifact_and_no_other(mine: str, theirs: str, runs: bool):
    """Fails when minors are compared as text of any major, or majors not at all."""
    one, other = (dataclasses.replace(HERE, device_arch=arch) for arch in (mine, theirs))
    assert (one.differences(other, at_load=True) == {}) == runs
    assert (one.differences(other, at_load=False) == {}) == (mine == theirs)


def test_of_several_that_fit_the_richest_is_taken(tmp_path):
    """Fails when the order of keys decides: a machine would run slow code without a word."""
    store, package = Store(tmp_path / "store"), tmp_path / "model.pt2"
    for level in LEVELS:
        package.write_bytes(package_bytes())
        store.publish(package, key_inputs(ToyStep(), SMALL, HERE, Target(level)), "0" * 64, {})
    assert resolve(store, ToyStep(), SMALL, HERE).key_inputs.compile_options["cpp.march"] == "x86-64-v4"
    v3 = on(" ".join(X86_LEVELS["x86-64-v3"]))
    assert resolve(store, ToyStep(), SMALL, v3).key_inputs.compile_options["cpp.march"] == "x86-64-v3"
    with pytest.raises(StaleArtifact, match=r"fingerprint\.cpu_isa: expected a CPU without"):
        resolve(store, ToyStep(), SMALL, on("sse sse2"))


@pytest.mark.xdist_group("toy-build")
@pytest.mark.skipif(not X86_LEVELS["x86-64-v3"] <= cpu_flags(), reason="this CPU is below the target")
def test_a_package_for_a_level_uses_no_instruction_above_it(tmp_path):
    """Fails without `cpp.march` on a machine with AVX-512: its registers are named in the code."""
    store = Store(tmp_path / "store")
    (request,) = requests(SMALL)
    (result,) = build([dataclasses.replace(request, target="cpu:x86-64-v3")], store)
    made = prepare(store, [(ToyStep(), SMALL)], folder=tmp_path / "private")["toy_step", SMALL]
    assert made.manifest == result.manifest
    assert set(made.manifest.key_inputs.fingerprint.cpu_isa.split()) == X86_LEVELS["x86-64-v3"]
    subprocess.run(["unzip", "-qo", made.path, "-d", tmp_path / "members"], check=True)
    (library,) = (tmp_path / "members").rglob("*.so")
    code = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "%ymm" in code
    assert "%zmm" not in code
    poorer = dataclasses.replace(Fingerprints()("cpu"), cpu_isa="sse sse2")
    with pytest.raises(StaleArtifact, match="avx2"):
        resolve(store, ToyStep(), SMALL, poorer)
