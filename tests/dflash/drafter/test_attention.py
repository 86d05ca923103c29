"""Both attention backends against a softmax written out, forward and gradients."""

import pytest
import torch

from aot.buckets import Bucket
from dflash.drafter.attention import make_attend
from dflash.drafter.block_mask import MaskRule
from dflash.drafter.programs import example_layout

BUCKET = Bucket(128, 16)
RULES = {
    "bidirectional": MaskRule(128, 8),
    "causal": MaskRule(128, 8, causal=True),
    "sliding": MaskRule(128, 8, causal=True, window=12),
    "sliding, bidirectional, narrower than a block": MaskRule(128, 8, window=5),
}


def naive(query, key, value, mask):
    """Grouped heads by index, softmax over what the mask lets through."""
    group = query.shape[0] // key.shape[0]
    heads = []
    for head in range(query.shape[0]):
        scores = query[head] @ key[head // group].T / query.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value[head // group])
    return torch.stack(heads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_output_and_gradients_equal_a_naive_softmax(backend, rule, dtype):
    """The FlexAttention operator runs densely on a CPU, with the same `mask_mod` that a GPU compiles."""
    layout = example_layout(BUCKET, 8, seed=1)
    masks = torch.from_numpy(layout["context_start"]), torch.from_numpy(layout["anchors"])
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 128, 16), (2, 256, 16), (2, 256, 16), (4, 128, 16))
    *inputs, upstream = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)

    def run(attend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, upstream.to(dtype))

    results = run(make_attend(backend, rule, *masks), dtype)
    expected = run(lambda *qkv: naive(*qkv, rule.dense(*masks)), torch.float64)
    for name, got, want in zip(("out", "query", "key", "value"), results, expected, strict=True):
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < (1e-14 if dtype == torch.float64 else 1e-6), name
