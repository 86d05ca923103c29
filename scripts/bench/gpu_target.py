"""How fast the frozen target runs on this GPU: a cut of the Qwen3.6-27B shape, random weights.

Prints the forward's milliseconds, its share of the matrix rate measured in the same run, milliseconds per
layer type, the time Python needs to enqueue one forward (it holds the GIL for that long), the padding of
length-sorted batches, and, with --drafter-ms, the predicted throughput of 8 GPUs by split.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash.config import load_config
from dflash.target.huggingface import HuggingFaceTarget, check_fast_kernels, length_groups

RECIPE = "qwen3.6-27b-5x3"
LAYERS, CUT = 64, 8
#: The shape of Qwen3.6-27B: three linear-attention layers, then one of full attention.
SHAPE = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
DRAFTERS = (1, 2, 3)
GPUS = 8


def matmul_tflops(device: torch.device) -> float:
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_ms(lambda: a @ b, 50) / 1e9


def median_ms(call: Any, rounds: int) -> float:
    times = []
    for turn in range(rounds + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def layer_tflop(kind: str, lengths: Sequence[int], shape: dict[str, int] = SHAPE) -> float:
    """Matrix arithmetic of one layer over documents of these lengths, in 1e12 operations."""
    H, tokens = shape["hidden_size"], sum(lengths)
    per_token = 3 * H * shape["intermediate_size"]
    pairs = 0.0
    if kind == "linear_attention":
        keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
        values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
        per_token += H * (2 * keys + values) + H * values + values * H
    else:
        queries = shape["num_attention_heads"] * shape["head_dim"]
        keys = shape["num_key_value_heads"] * shape["head_dim"]
        # The query projection is twice as wide: it carries the output gate.
        per_token += H * 2 * queries + 2 * H * keys + queries * H
        pairs = sum(length * (length + 1) / 2 for length in lengths) * 2 * queries
    return 2 * (per_token * tokens + pairs) / 1e12


def make_target(device: torch.device) -> HuggingFaceTarget:
    config = Qwen3_5TextConfig(num_hidden_layers=CUT, **SHAPE)
    check_fast_kernels(config, device)
    torch.manual_seed(0)
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3_5ForCausalLM(config)
        torch.set_default_dtype(before)
    return HuggingFaceTarget(model, tuple(range(0, CUT, 2)), device)


def document_lengths(tokens: int, longest: int) -> list[int]:
    """Lengths of `tokens` tokens in all, log-uniform from 512 up."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        share = torch.rand((), generator=generator).item()
        lengths.append(min(int(512 * (longest / 512) ** share), tokens - sum(lengths)))
    return lengths


def layer_ms(target: HuggingFaceTarget, documents: list[torch.Tensor]) -> dict[str, float]:
    """Median milliseconds of one layer by type, from events around every layer."""
    layers = target.model.get_decoder().layers
    kinds = target.model.config.layer_types
    events: list[list[torch.cuda.Event]] = [[] for _ in kinds]

    def record(index: int) -> None:
        events[index].append(torch.cuda.Event(enable_timing=True))
        events[index][-1].record()

    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(lambda *_, index=index: record(index)))
        handles.append(layer.register_forward_hook(lambda *_, index=index: record(index)))
    found: dict[str, list[float]] = {}
    for turn in range(7):
        target.features(documents)
        torch.cuda.synchronize()
        for kind, marks in zip(kinds, events, strict=True):
            spent = sum(begin.elapsed_time(end) for begin, end in zip(marks[::2], marks[1::2], strict=True))
            if turn >= 2:
                found.setdefault(kind, []).append(spent)
            marks.clear()
    for handle in handles:
        handle.remove()
    return {kind: statistics.median(times) for kind, times in found.items()}


def measure(tokens: int, longest: int) -> dict[str, Any]:
    device = torch.device("cuda:0")
    rate = matmul_tflops(device)
    target = make_target(device)
    lengths = document_lengths(tokens, longest)
    documents = [torch.randint(0, SHAPE["vocab_size"], (length,), device=device) for length in lengths]
    padded = sum(lengths[group[0]] * len(group) for group in length_groups(lengths))

    def forward() -> None:
        target.features(documents)

    ms = median_ms(forward, 8)
    enqueue = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        forward()
        enqueue.append(1e3 * (time.perf_counter() - begun))
    kinds = target.model.config.layer_types
    tflop = sum(layer_tflop(kind, lengths) for kind in kinds)
    per_layer = layer_ms(target, documents)
    rest_ms = ms - sum(per_layer[kind] for kind in kinds)
    whole_ms = rest_ms + LAYERS / CUT * sum(per_layer[kind] for kind in kinds)
    return {
        "tokens": sum(lengths),
        "padding": 1 - sum(lengths) / padded,
        "matmul_tflops": rate,
        "cut_ms": ms,
        "share_of_matmul": tflop / ms * 1e3 / rate,
        "layer_ms": per_layer,
        "enqueue_ms": statistics.median(enqueue),
        "whole_ms": whole_ms,
        "ktok_per_s": sum(lengths) / whole_ms,
    }


def prediction(target_ktok: float, drafter_ktok: float) -> list[dict[str, float]]:
    """Throughput and idle share of the drafters on 8 GPUs, by split; copies are not counted."""
    rows = []
    for drafters in DRAFTERS:
        targets = GPUS - drafters
        ktok = min(targets * target_ktok, drafters * drafter_ktok)
        rows.append(
            {
                "targets": targets,
                "drafters": drafters,
                "ktok_per_s": ktok,
                "drafter_idle": 1 - ktok / (drafters * drafter_ktok),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--drafter-ms", type=float, help="the drafter step at the reference bucket, milliseconds"
    )
    parser.add_argument("--batch", type=int, default=4, help="documents of a target batch")
    arguments = parser.parse_args()
    data = load_config(RECIPE).data
    report = measure(data.token_budget, data.max_seq_len)
    if arguments.drafter_ms:
        report["splits"] = prediction(report["ktok_per_s"], data.token_budget / arguments.drafter_ms)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
