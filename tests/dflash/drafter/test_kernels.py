"""The Triton operators against float64, in Triton's interpreter; and their place in a traced program.

The interpreter is chosen when a kernel is defined, and an interpreted kernel cannot be traced: the
interpreted tests run in a child process, which `test_interpreted` starts.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aot.trace import torch_release, trace
from dflash.config import LossConfig
from dflash.drafter.loss import Slots, fused_loss_and_gradient, loss_and_gradient
from dflash.drafter.programs import TrainStep
from tests.support.drafter import BUCKET, LOSS, tiny_config

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run in a child process by test_interpreted")
cases = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(
    torch_release(torch.__version__) < (2, 12), reason="torch 2.11 refuses interpreted kernels"
)
def test_interpreted():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "interpreted_", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


def operators(program):
    return {
        str(node.target) for node in trace(program, BUCKET, "cpu").graph.nodes if "dflash" in str(node.target)
    }


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
def test_only_a_flex_program_with_the_fused_loss_has_the_operators():
    flex = tiny_config(attention="flex")
    fused = LOSS.model_copy(update={"fused": True})
    assert operators(TrainStep(flex, fused)) == {
        "dflash_aot.row_statistics.default",
        "dflash_aot.logit_gradient.default",
    }
    assert operators(TrainStep(flex, LOSS)) == set()
    assert operators(TrainStep(tiny_config(), fused)) == set()


@st.composite
def logits(draw):
    """Rows of drafter and target logits with ties, shared and lone -inf, extremes; labels anywhere."""
    rows = draw(st.integers(1, 4))
    columns = draw(st.sampled_from([1, 2, 7, 1023, 1024, 1025, 2048, 2049, 5003]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.1, 3.0, 60.0]))
    z, y = (torch.randn(rows, columns, generator=generator) * scale for _ in range(2))
    if draw(st.booleans()):
        z, y = z.round(), y.round()
    z += draw(st.sampled_from([0.0, 300.0, -300.0]))
    if draw(st.booleans()) and columns > 2:
        hidden = torch.rand(columns, generator=generator) < 0.3
        hidden[int(torch.randint(columns, (), generator=generator))] = False
        z[:, hidden], y[:, hidden] = -torch.inf, -torch.inf
    label = torch.randint(0, columns, (rows,), generator=generator)
    best = torch.rand(rows, generator=generator) < 0.5
    label[best] = z.argmax(-1)[best]
    # A label that the drafter rules out costs infinitely much: that is the caller's affair.
    label = torch.where(z.gather(1, label[:, None])[:, 0].isinf(), z.argmax(-1), label)
    supervised = torch.rand(rows, generator=generator) < 0.8
    return z, y, label, supervised, torch.tensor(draw(st.sampled_from([0.5, 1.0, 2.0])))


def exact(z, y, label, temperature):
    """CE, KL, entropy and whether the label wins, of float64 rows; -inf as -1e30."""
    z, y = (x.clamp(min=-1e30) for x in (z, y))
    log_p, log_q, log_t = (
        z.log_softmax(-1),
        (z / temperature).log_softmax(-1),
        (y / temperature).log_softmax(-1),
    )
    ce = -log_p.gather(1, label[:, None])[:, 0]
    kl = (log_t.exp() * (log_t - log_q)).sum(-1)
    return ce, kl, -(log_p.exp() * log_p).sum(-1), z.argmax(-1) == label


def close(found, expected, name):
    error = (found.double() - expected).abs().max()
    assert error <= 3e-5 * (1 + expected.abs().max()), f"{name}: {error}"


@interpreted
@cases
@given(logits())
@example((torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([1]), torch.tensor([True]), torch.tensor(1.0)))
def test_interpreted_statistics_equal_float64(case):
    from dflash.drafter.kernels import STATISTICS, row_statistics

    z, y, label, supervised, temperature = case
    found = dict(zip(STATISTICS, row_statistics(z, y, label, supervised, temperature), strict=True))
    for name, expected in zip(STATISTICS, exact(z.double(), y.double(), label, temperature), strict=False):
        close(found[name], torch.where(supervised, expected.double(), 0.0), name)


@interpreted
@cases
@given(logits(), st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 3))
def test_interpreted_gradient_equals_autograd_in_float64(case, scales):
    from dflash.drafter.kernels import logit_gradient, row_statistics

    z, y, label, supervised, temperature = case
    scales_3R = torch.tensor(scales)[:, None] * torch.rand(3, len(label))
    scales_3R[:, ~supervised] = 0.0
    statistics = row_statistics(z, y, label, supervised, temperature)
    found = logit_gradient(z, y, label, temperature, statistics, scales_3R)

    wide = z.double().clamp(min=-1e30).requires_grad_()
    ce, kl, entropy, _ = exact(wide, y.double(), label, temperature)
    wanted = scales_3R.double()
    loss = wanted[0] * ce + wanted[1] * temperature.double() * kl + wanted[2] * entropy
    [expected] = torch.autograd.grad(torch.where(supervised, loss, 0.0).sum(), wide)
    close(found, expected, "gradient")


@interpreted
@pytest.mark.parametrize("weighting", ["gamma", "dpace"])
def test_interpreted_loss_and_gradient_equal_the_twin(weighting):
    generator = torch.Generator().manual_seed(0)
    A, S, H, V, T = 4, 7, 32, 3001, 64
    hidden, teacher, head = (torch.randn(shape, generator=generator) for shape in ((A, S, H), (T, H), (V, H)))
    head *= 0.3
    label = torch.randint(0, V, (A, S), generator=generator)
    label[:2] = (hidden @ head.T).argmax(-1)[:2]
    supervised = torch.rand(A, S, generator=generator) < 0.8
    slots = Slots(label, supervised, torch.randint(0, T, (A, S), generator=generator))
    scalars = {"dpace_alpha": 0.5, "kl_weight": 0.3, "temperature": 2.0, "cap_weight": 0.4}
    weights = {name: torch.tensor(value) for name, value in scalars.items()}
    weights["slot_weights"] = torch.rand(S, generator=generator)
    config = LossConfig(weighting=weighting)

    part, gradient = fused_loss_and_gradient(config, hidden, teacher, head, slots, weights)
    wide = {name: value.double() for name, value in weights.items()}
    tensors = (hidden.double(), teacher.double(), head.double())
    expected, expected_gradient = loss_and_gradient(config, *tensors, slots, wide)
    for name in ("loss", "ce", "kl", "cap", "slot_ce_AS"):
        torch.testing.assert_close(
            getattr(part, name).double(), getattr(expected, name).detach(), rtol=1e-5, atol=1e-5, msg=name
        )
    assert torch.equal(part.correct_AS, expected.correct_AS)
    assert expected.correct_AS.any()
    error = (gradient.double() - expected_gradient).norm() / expected_gradient.norm()
    assert error < 1e-5


@interpreted
def test_interpreted_bfloat16_keeps_its_dtype_and_a_row_without_loss_is_not_read():
    from dflash.drafter.kernels import logit_gradient, row_statistics

    z, y = (torch.randn(3, 2500).bfloat16() for _ in range(2))
    z[1] = torch.nan
    label, supervised = torch.tensor([1, 2, 3]), torch.tensor([True, False, True])
    statistics = row_statistics(z, y, label, supervised, torch.tensor(1.0))
    gradient = logit_gradient(z, y, label, torch.tensor(1.0), statistics, torch.ones(3, 3) * supervised)
    assert gradient.dtype == torch.bfloat16
    assert (gradient[1] == 0).all()
    assert gradient.isfinite().all()
    assert (statistics[:, 1] == 0).all()
