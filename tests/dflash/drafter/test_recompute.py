"""Recomputation changes what is kept for the backward, and nothing else."""

import pytest
import torch

from aot.trace import trace
from dflash.drafter.programs import TrainStep
from dflash.drafter.recompute import recomputed
from tests.support.drafter import BUCKET, LOSS, SLIDING, example, run_eager, tiny_config


@pytest.mark.parametrize("what", ["activations", "layers"])
@pytest.mark.parametrize("sliding", [False, True])
def test_every_output_is_that_of_the_plain_step(what, sliding):
    changes = SLIDING if sliding else {}
    plain = TrainStep(tiny_config(**changes), LOSS)
    inputs = example(plain, seed=1)
    expected = run_eager(plain, inputs, double=True)
    found = run_eager(TrainStep(tiny_config(**changes, recompute=what), LOSS), inputs, double=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def products(what):
    graph = trace(TrainStep(tiny_config(recompute=what), LOSS), BUCKET).graph
    return sum(str(node.target) == "aten.mm.default" for node in graph.nodes)


def test_activations_repeat_no_product_and_layers_repeat_theirs():
    """Without the removal of dead code each recomputed function would end in a second product."""
    assert products("activations") == products("none") < products("layers")


def test_only_the_inputs_are_kept():
    kept = []
    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = recomputed(lambda a, b: torch.sin(torch.exp(a) @ b), x, weight)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr()}
    expected = torch.autograd.grad(torch.sin(torch.exp(x) @ weight).sum(), (x, weight))
    for found, wanted in zip(torch.autograd.grad(y.sum(), (x, weight)), expected, strict=True):
        assert torch.equal(found, wanted)


def test_an_input_without_gradient_gets_none():
    x, fixed = torch.randn(3, requires_grad=True), torch.randn(3)
    recomputed(torch.mul, x, fixed).sum().backward()
    assert torch.equal(x.grad, fixed)
