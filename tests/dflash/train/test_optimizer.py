"""AdamW against torch's, the schedule, the norm, and the gradient sum."""

import itertools
import math

import pytest
import torch

from dflash.config import TrainConfig
from dflash.train.optimizer import Replica, gradient_norm, learning_rate
from dflash.train.reduce import scale_gradients, sum_gradients, uses_nccl

CPU = torch.device("cpu")
SHAPES = {"layer.weight": (7, 5), "norm.weight": (5,), "head.weight": (3, 7)}


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_ten_updates_equal_torch_adamw_with_decay_on_matrices_only():
    config, weights = TrainConfig(weight_decay=0.1), tensors(0)
    replica = Replica(weights, torch.float32, CPU)
    reference = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    matrices = [p for p in reference.values() if p.ndim >= 2]
    vectors = [p for p in reference.values() if p.ndim < 2]
    adamw = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
    for update in range(1, 11):
        grads = tensors(update)
        lr = config.lr / update
        for group in adamw.param_groups:
            group["lr"] = lr
        for name, param in reference.items():
            param.grad = grads[name].clone()
        adamw.step()
        replica.step(grads, update, lr, config)
    for name, param in reference.items():
        assert not torch.equal(param, weights[name])
        torch.testing.assert_close(replica.masters[name], param.detach(), rtol=1e-6, atol=1e-7)


def test_float32_parameters_are_the_masters_and_bfloat16_ones_follow_them():
    full, half = (Replica(tensors(0), dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
    assert all(full.params[name] is full.masters[name] for name in SHAPES)
    pointers = {name: param.data_ptr() for name, param in half.params.items()}
    tiny = TrainConfig(lr=1e-6, weight_decay=0)
    for update in range(1, 200):
        half.step({name: torch.ones(shape) for name, shape in SHAPES.items()}, update, tiny.lr, tiny)
    for name, weight in tensors(0).items():
        # A step of 1e-6 is lost in bfloat16; the masters have taken all 199, up to rounding.
        torch.testing.assert_close(half.masters[name], weight - 199e-6, rtol=0, atol=2e-5)
        assert torch.equal(half.params[name], half.masters[name].bfloat16())
        assert half.params[name].data_ptr() == pointers[name]


def test_load_state_restores_masters_moments_and_parameters():
    source, copy = (Replica(tensors(seed), torch.bfloat16, CPU) for seed in (0, 1))
    source.step(tensors(2), 1, 1e-3, TrainConfig())
    copy.load_state(source.masters, source.first, source.second)
    for mine, theirs in ((copy.masters, source.masters), (copy.params, source.params)):
        assert all(torch.equal(mine[name], theirs[name]) for name in SHAPES)
    assert all(torch.equal(copy.second[name], source.second[name]) for name in SHAPES)


def test_learning_rate_warms_up_linearly_and_ends_at_the_floor():
    config = TrainConfig(lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.1)
    rates = [learning_rate(step, 99, config) for step in range(1, 100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize(("total", "warmup"), [(1, 0.0), (1, 1.0), (2, 0.04), (3, 1.0)])
def test_learning_rate_of_short_runs_is_positive_in_every_step(total, warmup):
    config = TrainConfig(lr=1.0, warmup_ratio=warmup, min_lr_ratio=0.0)
    assert all(0 < learning_rate(step, total, config) <= 1 for step in range(1, total + 1))


def test_gradient_norm_is_over_all_tensors_and_shows_what_is_not_finite():
    grads = tensors(0)
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    torch.testing.assert_close(gradient_norm(grads), flat.norm())
    grads["norm.weight"][2] = math.nan
    assert not gradient_norm(grads).isfinite()


def test_sum_is_taken_in_worker_order():
    """In float32 (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1."""
    values = (1e8, 1.0, -1e8)
    totals = sum_gradients([{"w": torch.tensor([value])} for value in values], [CPU] * 3)
    assert totals[CPU]["w"].item() == 0.0
    values = (1e8, -1e8, 1.0)
    totals = sum_gradients([{"w": torch.tensor([value])} for value in values], [CPU] * 3)
    assert totals[CPU]["w"].item() == 1.0


def test_scale_applies_to_every_total():
    totals = {CPU: {"w": torch.ones(2)}}
    scale_gradients(totals, 0.25)
    assert totals[CPU]["w"].tolist() == [0.25, 0.25]


def test_nccl_serves_workers_on_distinct_cuda_devices_only():
    cuda = [torch.device("cuda", index) for index in range(3)]
    assert uses_nccl(cuda)
    assert not uses_nccl(cuda[:1])
    assert not uses_nccl([cuda[0], cuda[0]])
    assert not uses_nccl([cuda[0], CPU])
