"""Feature noise: stateless, per document, of the right size, the same however documents are packed."""

import numpy as np
import pytest
import torch

from dflash.config import TrainConfig
from dflash.train.noise import Span, add_noise, amplitude, uniform

CPU = torch.device("cpu")


def noise_of(spans, tokens, seed=0, epoch=0, scale="absolute", features=None):
    features = torch.zeros(tokens, 6) if features is None else features
    before = features.clone()
    add_noise(features, spans, 0.05, epoch, TrainConfig(seed=seed, noise_scale=scale))
    return features - before


def test_a_document_gets_the_same_noise_wherever_it_lies():
    alone = noise_of([Span("a", 0, 10)], 16)
    packed = noise_of([Span("b", 0, 5), Span("a", 5, 10)], 32)
    assert torch.equal(alone[:10], packed[5:15])
    assert not torch.equal(alone[:5], packed[:5])


def test_padding_rows_stay_untouched():
    noise = noise_of([Span("a", 0, 10)], 16)
    assert noise[:10].abs().min() > 0
    assert torch.equal(noise[10:], torch.zeros(6, 6))


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"seed": 2**32}, {"document": "b"}])
def test_seed_epoch_and_document_each_change_the_draw(change):
    base = {"seed": 0, "epoch": 0, "document": "a"}
    first, second = (uniform((40, 6), device=CPU, **values) for values in (base, {**base, **change}))
    assert (first == second).float().mean() < 0.01


def test_draws_are_uniform_in_plus_minus_one():
    values = uniform((1000, 101), 0, 0, "a", CPU).numpy().ravel()
    assert values.min() >= -1
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(-1, 1))
    # Pearson's statistic over 19 degrees of freedom passes 43.8 once in a thousand seeds; this seed is fixed.
    expected = values.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8


def test_rms_scale_follows_the_document():
    features = torch.ones(10, 6)
    features[5:] = 100
    noise = noise_of([Span("a", 0, 5), Span("b", 5, 5)], 10, scale="rms", features=features)
    assert noise[:5].abs().max() <= 0.05 + 1e-6
    assert 1 < noise[5:].abs().max() <= 5 + 1e-4


def test_bfloat16_features_are_noised_in_float32():
    features = torch.full((10, 6), 1.0, dtype=torch.bfloat16)
    expected = (1.0 + 0.05 * uniform((10, 6), 0, 0, "a", CPU)).bfloat16()
    add_noise(features, [Span("a", 0, 10)], 0.05, 0, TrainConfig())
    torch.testing.assert_close(features, expected)


def test_amplitude_falls_linearly_from_the_first_to_the_last_step():
    config = TrainConfig(noise_start=0.05, noise_end=0.01)
    assert [amplitude(step, 5, config) for step in range(1, 6)] == pytest.approx(
        [0.05, 0.04, 0.03, 0.02, 0.01]
    )
    assert amplitude(1, 1, config) == 0.05


def test_zero_amplitude_draws_nothing(monkeypatch):
    monkeypatch.setattr("dflash.train.noise.uniform", lambda *args: pytest.fail("drew"))
    add_noise(torch.zeros(4, 6), [Span("a", 0, 4)], 0.0, 0, TrainConfig())
