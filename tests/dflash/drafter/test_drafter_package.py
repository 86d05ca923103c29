"""Compiled packages against the oracle: every output and every gradient by name."""

import os
import subprocess
import sys
import zipfile

import pytest
import torch
from torch._inductor import aoti_compile_and_package

from aot.buckets import Bucket
from aot.trace import effective_options, trace
from dflash.config import TrainConfig, load_config
from dflash.drafter import step
from dflash.drafter.programs import make_programs
from dflash.train.optimizer import ANCHORS, Replica
from tests.support.drafter import BUCKET, example, package_file, run_eager, run_package
from tests.support.oracle import oracle_step, relative_errors
from tests.support.tiny_run import RUN_FILE

RECIPE = "smollm2-cpu"
SLIDING = (
    'drafter.layer_types=["sliding_attention", "full_attention"]',
    "drafter.sliding_window=12",
    "loss.weighting=dpace",
    "loss.max_chunk_rows=64",
)


@pytest.fixture
def tiny(tmp_path):
    """The tiny run's file; its artifacts are shared with the tests that train."""
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(root=tmp_path))
    return str(path)


def programs(run, *overrides):
    return {program.name: program for program in make_programs(load_config(run, overrides))}


def assert_near_oracle(path, program, inputs, bucket, capsys, loss=None):
    """Each output within max(1e-5, 1.5 x the float32 twin's own error), both printed."""
    reference, gaps = oracle_step(program.config, loss or program.loss, inputs)
    close_calls = sum(gap < 1e-5 for gap in gaps)
    errors = relative_errors(run_package(path, program, inputs, bucket), reference)
    twin = relative_errors(run_eager(program, inputs), reference)
    worst = max(errors, key=errors.get)
    with capsys.disabled():
        print(f"\n{program.name} {bucket}: {close_calls} of {len(gaps)} argmax too close to call; worst of")
        print(f"{len(errors)} outputs {worst}: package {errors[worst]:.1e}, float32 twin {twin[worst]:.1e}")
    assert close_calls == 0, "terms that depend on an argmax cannot be compared"
    for name, error in errors.items():
        assert error <= max(1e-5, 1.5 * twin[name]), name


def trained(path, program, bucket, steps):
    """Parameters after some AdamW steps of the package on one batch."""
    config = TrainConfig(lr=3e-3, clip=1e9)
    inputs = example(program, 1, bucket)
    replica = Replica(step.parameters_of(inputs), torch.float32, torch.device("cpu"))
    losses = []
    for _ in range(steps):
        outputs = run_package(path, program, inputs | with_parameters(replica.params), bucket)
        grads = {name: outputs[f"grad.{name}"] for name in replica.params}
        replica.step({**grads, ANCHORS: outputs["anchors"][None]}, config.lr, config)
        losses.append((outputs["loss"] / outputs["anchors"]).item())
    assert losses[-1] < losses[0]
    return replica.params


def with_hits(program, inputs):
    """The batch with every other slot labelled as the drafter says, but where that changes an anchor."""
    hidden_ASH = step.block_hidden(program.config, step.parameters_of(inputs), inputs)[:, 1:]
    said_AS = (hidden_ASH @ inputs["lm_head"].T).argmax(-1)
    slot_S = torch.arange(1, program.config.block_size)
    position_AS = (inputs["anchors"].long()[:, None] + slot_S).clamp(max=len(inputs["input_ids"]) - 1)
    chosen_AS = (slot_S % 2 == 0) & ~torch.isin(position_AS, inputs["anchors"].long())
    input_ids = inputs["input_ids"].clone()
    input_ids[position_AS[chosen_AS]] = said_AS[chosen_AS]
    return inputs | {"input_ids": input_ids}


def with_parameters(params):
    return {f"{step.PARAMETER_PREFIX}{name}": tensor for name, tensor in params.items()}


@pytest.mark.parametrize("overrides", [(), SLIDING], ids=["full, gamma", "sliding, dpace"])
def test_tiny_train_step_equals_the_oracle(overrides, tiny, tmp_path, capsys):
    program = programs(tiny, *overrides)["train_step"]
    path = package_file(tiny, overrides, "train_step", BUCKET, tmp_path)
    for seed in (1, 2):
        assert_near_oracle(path, program, example(program, seed), BUCKET, capsys)
    fresh = example(program, 3) | with_parameters(trained(path, program, BUCKET, steps=30))
    assert_near_oracle(path, program, with_hits(program, fresh), BUCKET, capsys)


def test_one_package_serves_every_weighting_of_the_loss(tiny, tmp_path, capsys):
    program = programs(tiny)["train_step"]
    path = package_file(tiny, (), "train_step", BUCKET, tmp_path)
    for change in ("loss.cap_weight=0.7", "loss.kl_weight=0.6", "loss.temperature=0.7", "loss.gamma=3.0"):
        other = programs(tiny, change)["train_step"]
        assert_near_oracle(path, program, example(other, seed=1), BUCKET, capsys, other.loss)


def test_tiny_eval_step_equals_the_oracle(tiny, tmp_path, capsys):
    program = programs(tiny)["eval_step"]
    path = package_file(tiny, (), "eval_step", BUCKET, tmp_path)
    assert_near_oracle(path, program, example(program, seed=1), BUCKET, capsys)


RUN = """
import sys, torch
from aot.archive import MODEL_NAME
package, inputs, outputs = sys.argv[1:]
loader = torch._C._aoti.AOTIModelPackageLoader(package, MODEL_NAME, True, 1, -1)
torch.save(loader.run(torch.load(inputs)), outputs)
"""


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_package_runs_with_any_number_of_threads(threads, tiny, tmp_path):
    program = programs(tiny)["train_step"]
    path = package_file(tiny, (), "train_step", BUCKET, tmp_path)
    inputs = example(program, seed=1)
    torch.save(list(inputs.values()), tmp_path / "inputs.pt")
    subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt")],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        check=True,
    )
    outputs = dict(
        zip(program.call_spec(BUCKET).output_names, torch.load(tmp_path / "outputs.pt"), strict=True)
    )
    reference, _ = oracle_step(program.config, program.loss, inputs)
    assert max(relative_errors(outputs, reference).values()) < 1e-5


DEMO_CASES = [
    (name, str(bucket))
    for name in ("train_step", "eval_step")
    for bucket in load_config(RECIPE).data.resolved_buckets
]


@pytest.mark.parametrize(
    ("name", "bucket"),
    [DEMO_CASES[0], *(pytest.param(*case, marks=pytest.mark.long) for case in DEMO_CASES[1:])],
)
def test_demo_bucket_equals_the_oracle(name, bucket, tmp_path, capsys):
    bucket, program = Bucket.parse(bucket), programs(RECIPE)[name]
    path = package_file(RECIPE, (), name, bucket, tmp_path)
    assert_near_oracle(path, program, example(program, 1, bucket), bucket, capsys)
    if name == "train_step":
        fresh = example(program, 2, bucket) | with_parameters(trained(path, program, bucket, steps=10))
        assert_near_oracle(path, program, with_hits(program, fresh), bucket, capsys)


def test_no_kernel_computes_under_a_mask(tiny, tmp_path):
    """Inductor leaves idle lanes of masked vectors unwritten; a vector sine of them parts equal runs.

    Compiled here, because a published package has no sources.
    """
    program = programs(tiny)["train_step"]
    path = tmp_path / "raw.pt2"
    options = effective_options(program)
    aoti_compile_and_package(trace(program, BUCKET), package_path=str(path), inductor_configs=options)
    with zipfile.ZipFile(path) as package:
        kernels = [package.read(name) for name in package.namelist() if name.endswith(".kernel.cpp")]
    assert kernels
    assert not any(b"is_masked(" in kernel for kernel in kernels)
