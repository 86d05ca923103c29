"""The reference bucket on a GPU: gradients by name where all but eight anchors are invalid."""

import os
from pathlib import Path

import pytest
import torch
from bench.gpu_shapes import RECIPE, SHAPES, full_inputs

from aot.compile import BuildRequest, build
from aot.runtime import prepare
from aot.store import Store
from tests.support.oracle import oracle_step, relative_errors

FACTORY = "dflash.drafter.programs:program_set"
DEVICE = torch.device("cuda:0")
SHAPE = SHAPES["reference"]
#: The first and the last anchor, and both sides of a document's edge, are among those that stay.
KEPT = 8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def kept_anchors(inputs: dict[str, torch.Tensor]) -> list[int]:
    """Indices of the anchors that stay valid."""
    documents = inputs["doc_ids"][inputs["anchors"].long()].tolist()
    count = len(documents)
    edge = next(index for index in range(count // 2, count) if documents[index] != documents[index - 1])
    some = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    return sorted([*dict.fromkeys([0, count - 1, edge - 1, edge, *some])][:KEPT])


def with_kept(inputs: dict[str, torch.Tensor], kept: list[int]) -> dict[str, torch.Tensor]:
    """The batch with every other anchor invalid, its context empty."""
    valid = torch.zeros_like(inputs["anchor_valid"])
    valid[kept] = True
    start = torch.where(valid, inputs["context_start"], inputs["anchors"])
    return inputs | {"anchor_valid": valid, "context_start": start}


@pytest.mark.parametrize("recompute", ["none", "activations"])
def test_gradients_of_eight_anchors_equal_the_oracle_by_name(recompute, tmp_path, capsys):
    changes = ("loss.fused=true", f"drafter.recompute={recompute}")
    program = SHAPE.program(*changes)
    store = Store(Path(os.environ.get("DFLASH_AOT_STORE") or tmp_path / "store"))
    overrides = (*SHAPE.overrides, *changes)
    build([BuildRequest(FACTORY, RECIPE, overrides, "train_step", str(SHAPE.bucket))], store)
    inputs = full_inputs(SHAPE, program, 5, DEVICE)
    kept = kept_anchors(inputs)
    batch = with_kept(inputs, kept)

    prepared = prepare(store, [(program, SHAPE.bucket)], run=RECIPE, device=str(DEVICE))
    artifact = prepared[program.name, SHAPE.bucket].load(DEVICE)
    gradients = {name: t.cpu() for name, t in artifact(batch).items() if name.startswith("grad.")}
    torch.cuda.empty_cache()

    # What is invalid adds nothing: the others need only the anchors that stay.
    per_anchor = ("anchors", "context_start", "anchor_valid")
    few = batch | {name: batch[name][kept] for name in per_anchor}
    dense = program.config.model_copy(update={"attention": "sdpa", "recompute": "none"})
    twin = {name: t.cpu() for name, t in program.run(dense, few).items() if name in gradients}
    torch.cuda.empty_cache()
    with torch.device(DEVICE):
        reference, _ = oracle_step(program.config, program.loss, few)
    reference = {name: reference[name].cpu() for name in gradients}

    errors, twin_errors = relative_errors(gradients, reference), relative_errors(twin, reference)
    with capsys.disabled():
        print(f"\n{SHAPE.bucket}, {KEPT} valid anchors of {len(inputs['anchors'])}, recompute {recompute}")
        for name in sorted(errors, key=errors.get, reverse=True):
            print(f"  {name:45s} package {errors[name]:.2e}  bfloat16 dense twin {twin_errors[name]:.2e}")
    for name, error in errors.items():
        assert error <= 1.2 * twin_errors[name], name
