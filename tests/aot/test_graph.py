import difflib
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop

from aot.graph import graph_hash, graph_lines
from aot.program import CallSpec, TensorSpec
from aot.trace import trace
from tests.support.toy import LARGE, SMALL, ToyStep

INPUTS = (TensorSpec("x", (4, 8), "float32"), TensorSpec("w", (8, 8), "float32"))


class Formula(ToyStep):
    """Any function of tensors; its outputs' specs are found by running it."""

    def __init__(self, function, inputs=INPUTS):
        super().__init__()
        object.__setattr__(self, "formula", lambda *tensors: (function(*tensors),))
        object.__setattr__(self, "inputs", tuple(inputs))

    def call_spec(self, bucket):
        tensors = [
            torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)).as_strided(spec.shape, spec.stride)
            for spec in self.inputs
        ]
        outputs = tuple(
            TensorSpec(f"y{i}", tuple(y.shape), str(y.dtype).removeprefix("torch."), y.stride())
            for i, y in enumerate(self.formula(*tensors))
        )
        return CallSpec("cpu", self.inputs, outputs)

    def function(self, bucket):
        return self.formula


def lines_of(function, inputs=INPUTS):
    return graph_lines(trace(Formula(function, inputs), SMALL))


def base(x, w):
    return (x @ w).softmax(-1) * 0.5 + x


EDITS = {
    "term dropped": lambda x, w: (x @ w).softmax(-1) * 0.5,
    "constant in its last bit": lambda x, w: (x @ w).softmax(-1) * 0.5000000000000001 + x,
    "integer argument": lambda x, w: (x @ w).softmax(-2) * 0.5 + x,
    "operand order": lambda x, w: x + (x @ w).softmax(-1) * 0.5,
    "operator": lambda x, w: (x @ w).log_softmax(-1) * 0.5 + x,
    "dtype inside": lambda x, w: (x @ w).softmax(-1, torch.float64).float() * 0.5 + x,
    "keyword argument": lambda x, w: torch.add((x @ w).softmax(-1) * 0.5, x, alpha=2),
    "added constant tensor": lambda x, w: (x @ w).softmax(-1) * 0.5 + x + torch.tensor([1.0] * 8),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_an_edit_of_the_computation_is_a_small_readable_difference(edit):
    before, after = lines_of(base), lines_of(edit)
    assert before == lines_of(base)
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert changed
    assert all("%" in line or "constant" in line or "signature" in line for line in changed)


@pytest.mark.parametrize(
    "inputs",
    [
        (INPUTS[0], TensorSpec("w", (8, 8), "float32", (1, 8))),
        (TensorSpec("x", (5, 8), "float32"), INPUTS[1]),
        tuple(TensorSpec(spec.name, spec.shape, "float64") for spec in INPUTS),
        (*INPUTS, TensorSpec("unused", (1,), "int64")),
    ],
    ids=["stride", "shape", "dtype", "input added"],
)
def test_other_inputs_are_another_graph(inputs):
    assert lines_of(lambda x, w, *rest: base(x, w), inputs) != lines_of(base)


def test_the_value_of_a_constant_tensor_counts():
    one, other = (lines_of(lambda x, w, v=v: x + torch.tensor([v] * 8)) for v in (1.0, 2.0))
    assert one != other
    assert [line for line in one if "[8]" not in line] == [line for line in other if "[8]" not in line]


def test_the_name_of_a_python_function_or_argument_does_not_count():
    def renamed(first, second):
        scaled = (first @ second).softmax(-1) * 0.5
        return scaled + first

    assert lines_of(renamed) == lines_of(base)


def test_the_hash_is_that_of_the_lines_and_differs_by_bucket():
    exported = trace(ToyStep(), SMALL)
    assert graph_hash(exported) == hashlib.sha256("\n".join(graph_lines(exported)).encode()).hexdigest()
    assert graph_hash(trace(ToyStep(), LARGE)) != graph_hash(exported)


QKV = tuple(TensorSpec(name, (1, 2, 128, 16), "float32") for name in "qkv")
START = TensorSpec("start", (128,), "int32")


def attend(mask_mod, scale=0.25):
    """FlexAttention with a captured buffer, forward and backward, as one graph."""
    from torch.nn.attention.flex_attention import BlockMask, _identity

    options = {"PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False}
    options |= {"WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}

    def function(q, k, v, start):
        counts = torch.ones(1, 1, 1, dtype=torch.int32)
        indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        tables = (counts, indices, None, None, counts, indices, None, None)
        mask = BlockMask((128, 128), *tables, (128, 128), mask_mod).as_tuple()
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = flex_attention_hop(*leaves, _identity, mask, scale, options, (), (start,))[0]
        return torch.autograd.grad(out.sum(), leaves)[1]

    return function


def test_what_a_subgraph_computes_counts():
    def lines(mask_mod, scale=0.25):
        program = Formula(lambda q, k, v, start: q, (*QKV, START))
        object.__setattr__(program, "formula", lambda *tensors: (attend(mask_mod, scale)(*tensors),))
        spec = CallSpec("cpu", program.inputs, (TensorSpec("dk", (1, 2, 128, 16), "float32"),))
        object.__setattr__(program, "call_spec", lambda bucket: spec)
        return graph_lines(trace(program, SMALL))

    causal = lines(lambda b, h, q, k, start: (k >= start[q]) & (k <= q))
    assert any("flex_attention_backward" in line for line in causal)
    assert causal == lines(lambda b, h, q, k, start: (k >= start[q]) & (k <= q))
    strict = lines(lambda b, h, q, k, start: (k >= start[q]) & (k < q))
    changed = [line[2:] for line in difflib.ndiff(causal, strict) if line[0] in "+-"]
    assert {line.split(" call_function ")[1].split("(")[0] for line in changed} == {
        "aten.le.Tensor",
        "aten.lt.Tensor",
    }
    assert causal != lines(lambda b, h, q, k, start: (k >= start[q]) & (k <= q), scale=0.5)


HASH_TOY = "from aot.graph import *; from aot.trace import trace; from tests.support.toy import *\n"
HASH_TOY += "print(graph_hash(trace(ToyStep(), SMALL)))"


def test_the_hash_is_the_same_in_another_process_folder_and_hash_seed(tmp_path):
    root = Path(__file__).parents[2]
    for name in ("aot", "tests/support"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    toy = tmp_path / "tests" / "support" / "toy.py"
    toy.write_text("# moved\n\n\n" + toy.read_text())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, "-c", HASH_TOY],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.strip() == graph_hash(trace(ToyStep(), SMALL))
