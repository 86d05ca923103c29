import json
import os
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3NextConfig

from aot.errors import ConfigError, EnvironmentFault
from dflash.config import DrafterConfig, TargetConfig
from dflash.target.huggingface import HuggingFaceTarget, check_fast_kernels, length_groups
from tests.support.models import tiny_llama, with_seed

CPU = torch.device("cpu")
LAYER_IDS = (0, 2)
LENGTHS = (5, 17, 1, 11)
DRAFTER = {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "vocab_size": 64, "num_target_layers": 4, "target_layer_ids": LAYER_IDS, "mask_token_id": 1,
}  # fmt: skip


def hybrid_model():
    """Three layers of linear attention and one of full attention, as in Qwen3.5 and Qwen3.6."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    return with_seed(0, lambda: Qwen3_5ForCausalLM(config))


MODELS = {"llama": tiny_llama, "hybrid": hybrid_model}


def make_documents(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def relative_error(a, b):
    assert b.norm() > 0
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def target():
    return HuggingFaceTarget(tiny_llama(), LAYER_IDS, CPU)


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_padded_batch_gives_each_document_the_residual_stream_it_has_alone(make_model):
    model = make_model()
    target = HuggingFaceTarget(model, LAYER_IDS, CPU)
    documents = make_documents()
    results = target.features(documents)
    assert len(results) == len(documents)
    for document, (features_LF, hidden_LH) in zip(documents, results, strict=True):
        with torch.no_grad():
            alone = model(document[None], output_hidden_states=True)
        after_layer = [states[0] for states in alone.hidden_states[1:]]
        assert features_LF.shape == (len(document), 64)
        for part, layer in zip(features_LF.split(32, dim=1), LAYER_IDS, strict=True):
            assert relative_error(part, after_layer[layer]) < 1e-5
            assert relative_error(part, after_layer[layer + 1]) > 1e-2
        assert relative_error(F.linear(hidden_LH, target.lm_head), alone.logits[0]) < 1e-5


def test_head_never_runs_over_the_context_and_nothing_is_trained(target):
    calls = []
    handle = target.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    results = target.features(make_documents())
    handle.remove()
    assert calls == []
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    # Plain tensors: an eager step may save them for its backward pass.
    assert not any(tensor.is_inference() or tensor.requires_grad for pair in results for tensor in pair)


def test_threads_inside_one_model_at_once_do_not_mix_their_features(target):
    batches = [make_documents(seed, lengths) for seed, lengths in enumerate([(20, 19), (4,), (30, 29, 29)])]
    expected = [target.features(batch) for batch in batches]
    barrier = threading.Barrier(len(batches))

    def meet(module, inputs):
        barrier.wait(60)

    # All threads have passed the feature layers before any of them reads what was captured.
    handle = target.model.model.layers[3].register_forward_pre_hook(meet)
    with ThreadPoolExecutor(len(batches)) as pool:
        results = list(pool.map(target.features, batches))
    handle.remove()
    for got, want in zip(results, expected, strict=True):
        for (features, hidden), (wanted_features, wanted_hidden) in zip(got, want, strict=True):
            assert torch.equal(features, wanted_features)
            assert torch.equal(hidden, wanted_hidden)


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_extending_and_rewinding_a_cache_equals_a_fresh_run(make_model):
    target = HuggingFaceTarget(make_model(), LAYER_IDS, CPU)
    prompt, wrong, right = make_documents(1, (7, 5, 4))
    cache, _, _ = target.prefill(prompt, rewind=len(wrong))
    target.extend(torch.cat([right[:2], wrong]), cache)
    target.rewind(cache, len(wrong))
    features_LF, logits_LV = target.extend(right[2:], cache)
    target.rewind(cache, 0)
    fresh_features, fresh_hidden = target.features([torch.cat([prompt, right])])[0]
    assert relative_error(features_LF, fresh_features[-2:]) < 1e-4
    assert relative_error(logits_LV, F.linear(fresh_hidden, target.lm_head)[-2:]) < 1e-4
    assert relative_error(features_LF, fresh_features[-3:-1]) > 1e-2


def test_matching_drafter_passes_the_check(target):
    target.check(DrafterConfig(**DRAFTER))


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 40), ("vocab_size", 65), ("num_target_layers", 5), ("target_layer_ids", (0, 1))],
)
def test_drafter_of_another_shape_is_refused_by_key(target, key, value):
    with pytest.raises(ConfigError, match=rf"drafter\.{key} is"):
        target.check(DrafterConfig(**{**DRAFTER, key: value}))


def test_feature_layer_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="has 4 layers"):
        HuggingFaceTarget(tiny_llama(), (0, 4), CPU)


def test_target_with_scaled_logits_is_refused():
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, logit_scale=0.5,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="changes its logits"):
        HuggingFaceTarget(with_seed(0, lambda: CohereForCausalLM(config)), (0,), CPU)


def test_saved_model_loads_in_the_dtype_asked_for_and_hashes_by_content(tmp_path):
    hashes = {}
    for name, seed in (("a", 0), ("copy of a", 0), ("b", 1)):
        tiny_llama(seed).save_pretrained(tmp_path / name)
        config = TargetConfig(model=str(tmp_path / name), dtype="bfloat16")
        target = HuggingFaceTarget.load(config, LAYER_IDS, CPU)
        assert target.embed_tokens.dtype == target.lm_head.dtype == torch.bfloat16
        assert target.features(make_documents())[0][0].dtype == torch.bfloat16
        hashes[name] = target.model_hash
    assert hashes["a"] == hashes["copy of a"] != hashes["b"]


def test_model_made_in_memory_hashes_by_its_tensors():
    hashes = [HuggingFaceTarget(tiny_llama(seed), LAYER_IDS, CPU).model_hash for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("content", [None, "{}", "{not json"], ids=["absent", "no model type", "bad config"])
def test_model_that_cannot_be_loaded_is_refused_with_its_name(tmp_path, content):
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        HuggingFaceTarget.load(TargetConfig(model=str(folder)), LAYER_IDS, CPU)
    assert str(folder) in caught.value.message
    with pytest.raises(ConfigError, match="is empty"):
        HuggingFaceTarget.load(TargetConfig(), LAYER_IDS, CPU)


def test_linear_attention_on_a_gpu_needs_its_kernels(monkeypatch):
    """Without the check transformers warns once and loops: the run is many times slower."""
    hybrid = Qwen3NextConfig(num_hidden_layers=4)
    assert "linear_attention" in hybrid.layer_types
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(EnvironmentFault, match="fla-core") as caught:
        check_fast_kernels(hybrid, torch.device("cuda", 0))
    assert "dflash-aot[target]" in caught.value.hint
    check_fast_kernels(hybrid, CPU)
    check_fast_kernels(LlamaConfig(), torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    check_fast_kernels(hybrid, torch.device("cuda", 0))


@given(st.lists(st.integers(1, 8192), max_size=64))
def test_batches_hold_every_document_once_and_little_padding(lengths):
    """Without the bound a batch of one long and many short documents is mostly padding."""
    groups = length_groups(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[index] for index in group) * len(group)
        assert sum(lengths[index] for index in group) >= 0.95 * padded
    assert length_groups([100, 7, 99, 98]) == [[0, 2, 3], [1]]


def other_width(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 64}))


DAMAGE = {
    "truncated weights": (lambda folder: os.truncate(folder / "model.safetensors", 1000), "invalid header"),
    "another config.json": (other_width, "other shapes than its config.json says"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "cannot be loaded"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(damage, tmp_path):
    """Uncaught, a SafetensorError or RuntimeError of transformers ends the command with a traceback."""
    tiny_llama().save_pretrained(tmp_path)
    change, reason = DAMAGE[damage]
    change(tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        HuggingFaceTarget.load(TargetConfig(model=str(tmp_path)), LAYER_IDS, CPU)
    assert str(tmp_path) in caught.value.message
    assert "\n" not in caught.value.message
