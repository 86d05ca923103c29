"""AdamW against torch's, the schedule, the norm, and the gradient sum."""

import itertools
import math

import pytest
import torch

from dflash.config import TrainConfig
from dflash.train.optimizer import ANCHORS, Replica, gradient_norm, learning_rate
from dflash.train.reduce import sum_gradients, uses_nccl

CPU = torch.device("cpu")
SHAPES = {"layer.weight": (7, 5), "norm.weight": (5,), "head.weight": (3, 7)}


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def total(grads, anchors=1.0):
    """Gradient sums over so many anchors, of memory of their own."""
    return {**{name: grad.clone() for name, grad in grads.items()}, ANCHORS: torch.tensor([anchors])}


def test_ten_updates_equal_torch_adamw_with_decay_on_matrices_only():
    config, weights = TrainConfig(weight_decay=0.1, clip=1e9), tensors(0)
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
        replica.step(total(grads), lr, config)
    for name, param in reference.items():
        assert not torch.equal(param, weights[name])
        torch.testing.assert_close(replica.masters[name], param.detach(), rtol=1e-6, atol=1e-7)
    assert replica.updates == 10


def test_the_update_is_that_of_the_mean_gradient_clipped():
    config, grads = TrainConfig(clip=0.5), tensors(1)
    norm = gradient_norm(grads)
    assert norm > config.clip
    ours, expected = (Replica(tensors(0), torch.float32, CPU) for _ in range(2))
    told = ours.step(total({name: 8 * grad for name, grad in grads.items()}, anchors=8.0), 1e-3, config)
    torch.testing.assert_close(told, norm)
    clipped = {name: grad * (config.clip / norm) for name, grad in grads.items()}
    expected.step(total(clipped), 1e-3, TrainConfig(clip=1e9))
    for kind in ("masters", "first", "second"):
        for name, tensor in getattr(ours, kind).items():
            torch.testing.assert_close(tensor, getattr(expected, kind)[name])


@pytest.mark.parametrize("fault", ["not finite", "no anchor"])
def test_an_update_without_a_finite_gradient_changes_nothing_and_is_not_counted(fault):
    replica, twin = (Replica(tensors(0), torch.bfloat16, CPU) for _ in range(2))
    for each in (replica, twin):
        each.step(total(tensors(1)), 1e-3, TrainConfig())
    grads = tensors(2) if fault == "not finite" else {name: torch.zeros(s) for name, s in SHAPES.items()}
    if fault == "not finite":
        grads["norm.weight"][2] = math.inf
    norm = replica.step(total(grads, anchors=float(fault == "not finite")), 1e-3, TrainConfig())
    assert not norm.isfinite()
    for kind in ("params", "masters", "first", "second"):
        for name, tensor in getattr(replica, kind).items():
            assert torch.equal(tensor, getattr(twin, kind)[name])
    assert replica.updates == 1


def test_float32_parameters_are_the_masters_and_bfloat16_ones_follow_them():
    full, half = (Replica(tensors(0), dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
    assert all(full.params[name] is full.masters[name] for name in SHAPES)
    pointers = {name: param.data_ptr() for name, param in half.params.items()}
    tiny = TrainConfig(lr=1e-6, weight_decay=0)
    for _ in range(1, 200):
        half.step(total({name: torch.ones(shape) for name, shape in SHAPES.items()}), tiny.lr, tiny)
    for name, weight in tensors(0).items():
        # A step of 1e-6 is lost in bfloat16; the masters have taken all 199, up to rounding.
        torch.testing.assert_close(half.masters[name], weight - 199e-6, rtol=0, atol=2e-5)
        assert torch.equal(half.params[name], half.masters[name].bfloat16())
        assert half.params[name].data_ptr() == pointers[name]


def test_load_state_restores_masters_moments_and_parameters():
    source, copy = (Replica(tensors(seed), torch.bfloat16, CPU) for seed in (0, 1))
    source.step(total(tensors(2)), 1e-3, TrainConfig())
    copy.load_state(source.masters, source.first, source.second, 1)
    assert copy.updates == 1
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


def test_nccl_serves_workers_on_distinct_cuda_devices_only():
    cuda = [torch.device("cuda", index) for index in range(3)]
    assert uses_nccl(cuda)
    assert not uses_nccl(cuda[:1])
    assert not uses_nccl([cuda[0], cuda[0]])
    assert not uses_nccl([cuda[0], CPU])
