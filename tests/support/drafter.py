"""A drafter small enough for loops in float64, and its steps by name."""

import fcntl
from pathlib import Path

import torch

from aot.archive import MODEL_NAME
from aot.buckets import Bucket
from aot.compile import BuildRequest, build
from aot.store import Store
from dflash.config import DrafterConfig, LossConfig
from dflash.drafter.programs import DrafterProgram, EvalStep, TrainStep
from tests.support.tiny_run import FACTORY, default_store

CPU = torch.device("cpu")
BUCKET = Bucket(128, 16)
LOSS = LossConfig(kl_weight=0.2, temperature=2.0, cap_weight=0.1, max_chunk_rows=50)

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 12}
VARIANTS = {
    "full": {},
    "sliding": SLIDING,
    "sliding, bidirectional, narrower than a block": SLIDING | {"sliding_window": 5, "is_causal": False},
    "full, causal": {"is_causal": True},
    "all sliding, narrow": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3},
}


def tiny_config(**changes) -> DrafterConfig:
    """Two layers, hidden 64, vocabulary 256, blocks of 8; three tapped layers."""
    values = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "num_target_layers": 8,
        "target_layer_ids": (1, 3, 5),
        "mask_token_id": 9,
        "block_size": 8,
    }
    return DrafterConfig(**(values | changes))


def tiny_programs(loss: LossConfig = LOSS, **changes) -> tuple[TrainStep, EvalStep]:
    config = tiny_config(**changes)
    return TrainStep(config, loss), EvalStep(config, loss)


def example(program: DrafterProgram, seed: int = 0, bucket: Bucket = BUCKET) -> dict[str, torch.Tensor]:
    """The program's example inputs by name."""
    names = program.call_spec(bucket).input_names
    return dict(zip(names, program.example_inputs(bucket, seed, CPU), strict=True))


def run_eager(
    program: DrafterProgram, inputs: dict[str, torch.Tensor], double: bool = False
) -> dict[str, torch.Tensor]:
    """The program's own code without a compiler, in the inputs' precision or in float64."""
    if double:
        inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    return program.run(program.config, inputs)


def package_file(run: str, overrides: tuple[str, ...], program: str, bucket: Bucket, folder: Path) -> Path:
    """Build one program of a run, unless an earlier session has, and return a copy of its package."""
    request = BuildRequest(FACTORY, run, overrides, program, str(bucket))
    store = Store(default_store())
    store.root.mkdir(parents=True, exist_ok=True)
    with (store.root.parent / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        [result] = build([request], store)
    path = folder / f"{program}-{bucket}.pt2"
    path.write_bytes(store.read_package(result.manifest))
    return path


def run_package(
    path: Path, program: DrafterProgram, inputs: dict[str, torch.Tensor], bucket: Bucket
) -> dict[str, torch.Tensor]:
    """Load a package as training does and call it once."""
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), MODEL_NAME, True, 1, -1)
    spec = program.call_spec(bucket)
    return dict(zip(spec.output_names, loader.run([inputs[name] for name in spec.input_names]), strict=True))
