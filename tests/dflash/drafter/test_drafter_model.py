"""Parameter names and shapes, and decoding against training: the same hidden states block by block."""

import pytest
import torch
import torch.nn.functional as F

from dflash.config import load_config
from dflash.drafter.model import DrafterCache, draft_block, init_parameters, parameter_shapes
from dflash.drafter.step import block_hidden, parameters_of
from tests.support.drafter import VARIANTS, example, run_eager, tiny_config, tiny_programs


def test_names_and_shapes_are_those_of_published_checkpoints():
    config = load_config("qwen3.6-27b-5x3").drafter
    shapes = parameter_shapes(config)
    assert len(shapes) == 58
    assert shapes["fc.weight"] == (5120, 25600)
    assert shapes["layers.4.self_attn.k_proj.weight"] == (1024, 5120)
    assert shapes["layers.0.self_attn.q_norm.weight"] == (128,)
    assert {name.split(".")[0] for name in shapes} == {"fc", "hidden_norm", "norm", "layers"}
    per_layer = {name.removeprefix("layers.2.") for name in shapes if name.startswith("layers.2.")}
    assert per_layer == {
        *(
            f"self_attn.{name}.weight"
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        ),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }


def test_fresh_parameters_follow_the_seed_and_the_config():
    config = tiny_config(initializer_range=0.5)
    one, again, other = (init_parameters(config, seed, "cpu") for seed in (1, 1, 2))
    assert {name: tuple(value.shape) for name, value in one.items()} == parameter_shapes(config)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert one["fc.weight"].std().item() == pytest.approx(0.5, rel=0.05)
    assert torch.equal(one["layers.1.self_attn.k_norm.weight"], torch.ones(config.head_dim))
    half = init_parameters(config, 1, "cpu", torch.bfloat16)
    assert torch.equal(half["fc.weight"], one["fc.weight"].bfloat16())


def decoded_blocks(config, inputs, document, shift=0):
    """Draft at each anchor of one document as decoding does, the cache growing from anchor to anchor."""
    params = parameters_of(inputs)
    first = int((inputs["doc_ids"] == document).nonzero()[0])
    cache = DrafterCache.empty(config, "cpu", torch.float64)
    for index, anchor in enumerate(inputs["anchors"].tolist()):
        if inputs["anchor_valid"][index] and inputs["doc_ids"][anchor] == document:
            tokens = [int(inputs["input_ids"][anchor])] + [config.mask_token_id] * (config.block_size - 1)
            embeds = F.embedding(torch.tensor(tokens), inputs["embed_tokens"])
            new = inputs["features"][first + cache.length + shift : anchor + shift]
            yield index, draft_block(config, params, cache, new, cache.length, embeds)
            assert cache.length == anchor - first


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_masked_training_forward_equals_cached_decoding(changes):
    program, _ = tiny_programs(**changes)
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in example(program, seed=4).items()}
    trained = block_hidden(program.config, parameters_of(inputs), inputs)
    compared, beyond_window = 0, 0
    for document in range(4):
        for index, hidden in decoded_blocks(program.config, inputs, document):
            torch.testing.assert_close(hidden, trained[index], rtol=1e-11, atol=1e-11)
            compared += 1
            place = int(inputs["position_ids"][inputs["anchors"][index]])
            beyond_window += place > (program.config.sliding_window or 0)
    assert compared == int(inputs["anchor_valid"].sum()) >= 12
    assert beyond_window >= 4


def test_decoding_from_features_one_position_late_is_noticed():
    program, _ = tiny_programs()
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in example(program, seed=4).items()}
    trained = block_hidden(program.config, parameters_of(inputs), inputs)
    for index, hidden in decoded_blocks(program.config, inputs, document=1, shift=1):
        assert (hidden - trained[index]).norm() > 0.01 * trained[index].norm()


def test_features_must_continue_the_cache():
    config = tiny_config()
    params = init_parameters(config, 0, "cpu")
    cache = DrafterCache.empty(config, "cpu", torch.float32)
    with pytest.raises(AssertionError, match="the cache holds 0"):
        draft_block(config, params, cache, torch.zeros(3, 192), 3, torch.zeros(8, 64))


def test_bfloat16_stays_near_float64():
    program, _ = tiny_programs(dtype="bfloat16")
    inputs = example(program)
    outputs, exact = run_eager(program, inputs), run_eager(program, inputs, double=True)
    for name in ("loss", "ce", "kl"):
        assert outputs[name].dtype == torch.float32
        assert outputs[name].item() == pytest.approx(exact[name].item(), rel=0.02), name
    for name in parameter_shapes(program.config):
        grad, expected = outputs[f"grad.{name}"], exact[f"grad.{name}"]
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - expected).norm() < 0.05 * expected.norm(), name
