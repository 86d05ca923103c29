"""An independent training and evaluation step: float64, one document, anchor and slot at a time.

It shares nothing with the drafter but its config and the names of tensors. Layers are transformers' own
Qwen3 modules; a block meets its context as a key/value cache that holds exactly the tokens before its anchor,
so only sliding windows need a mask. Scalars of the loss are rounded to float32, as the programs take them.
"""

import inspect
import math
from collections.abc import Mapping
from types import MethodType

import numpy as np
import torch
from transformers import Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from dflash.config import DrafterConfig, LossConfig

# transformers renamed the argument that carries a layer's cache.
CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(Qwen3Attention.forward).parameters else "past_key_values"
)


def _exact_attention(module, query, key, value, attention_mask, scaling, **_):
    """transformers' eager attention, but for its float32 softmax."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def _exact_norm(self, x):
    """transformers' RMSNorm, but for its float32 square."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


ALL_ATTENTION_FUNCTIONS.register("exact", _exact_attention)


class _Context:
    """Looks like a cache to a Qwen3 layer: one layer's keys and values of the tokens before the anchor."""

    def __init__(self, key, value):
        self.key, self.value = key, value

    def update(self, key, value, layer_idx, **_):
        return torch.cat((self.key, key), dim=2), torch.cat((self.value, value), dim=2)


class Oracle(torch.nn.Module):
    """The drafter as transformers modules with the given parameters, in float64."""

    def __init__(self, config: DrafterConfig, inputs: Mapping[str, torch.Tensor]):
        super().__init__()
        self.config = config
        self.qwen = Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_position_embeddings,
        )
        self.qwen._attn_implementation = "exact"
        H = config.hidden_size
        self.fc = torch.nn.Linear(len(config.target_layer_ids) * H, H, bias=False)
        self.hidden_norm = Qwen3RMSNorm(H, config.rms_norm_eps)
        self.layers = torch.nn.ModuleList(Qwen3DecoderLayer(self.qwen, i) for i in range(config.num_layers))
        self.norm = Qwen3RMSNorm(H, config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(self.qwen)
        self.double()
        self.load_state_dict(
            {name[6:]: value.double() for name, value in inputs.items() if name.startswith("param.")}
        )
        for module in self.modules():
            if isinstance(module, Qwen3RMSNorm):
                module.forward = MethodType(_exact_norm, module)

    def context(self, features):
        """Each layer's keys and values [1, kv_heads, tokens, D] of one document."""
        states = self.hidden_norm(self.fc(features))[None]
        cos, sin = self.rotary(states, torch.arange(states.shape[1])[None])
        keys_values = []
        for layer in self.layers:
            attention, shape = layer.self_attn, (1, states.shape[1], -1, self.config.head_dim)
            key = attention.k_norm(attention.k_proj(states).view(shape)).transpose(1, 2)
            key, _ = apply_rotary_pos_emb(key, key, cos, sin)
            keys_values.append((key, attention.v_proj(states).view(shape).transpose(1, 2)))
        return keys_values

    def block(self, context, anchor, embeds):
        """The normed hidden states [B, H] of the block whose anchor is at this position of the document."""
        size = embeds.shape[0]
        rotary = self.rotary(embeds, torch.arange(anchor, anchor + size)[None])
        hidden = embeds[None]
        for i, layer in enumerate(self.layers):
            key, value = context[i]
            hidden = layer(
                hidden,
                attention_mask=self._mask(i, anchor, size),
                position_embeddings=rotary,
                **{CACHE_ARGUMENT: _Context(key[:, :, :anchor], value[:, :, :anchor])},
            )
        return self.norm(hidden)[0]

    def _mask(self, layer, anchor, size):
        """Additive, over positions 0..anchor+size-1; None where all is visible."""
        sliding = self.config.resolved_layer_types[layer] == "sliding_attention"
        causal = self.config.is_causal if self.config.is_causal is not None else sliding
        if not sliding and not causal:
            return None
        mask = torch.zeros(1, 1, size, anchor + size, dtype=torch.float64)
        for slot in range(size):
            for key in range(anchor + size):
                distance = anchor + slot - key
                hidden = (causal and distance < 0) or (
                    sliding and abs(distance) >= self.config.sliding_window
                )
                if hidden:
                    mask[0, 0, slot, key] = -math.inf
        return mask


def _float32(value: float) -> float:
    return float(np.float32(value))


def _slot_weights(loss: LossConfig, ce: list[float | None]) -> list[float]:
    """The weight of slots 1..B-1 of one block; `ce` is None where a slot is not supervised."""
    if loss.weighting == "gamma":
        return [0.0 if value is None else _float32(math.exp(-k / loss.gamma)) for k, value in enumerate(ce)]
    alpha, accepted, reach = _float32(loss.dpace_alpha), 1.0, []
    for value in ce:
        if value is None:
            reach.append(0.0)
        else:
            accepted *= (1 - alpha) * math.exp(-value) + alpha
            reach.append(accepted)
    return [0.0 if value is None else sum(reach[k:]) for k, value in enumerate(ce)]


class _Document:
    """Token ids, loss mask and the target's logits of one document."""

    def __init__(self, ids, mask, teacher):
        self.ids, self.mask, self.teacher = ids, mask, teacher


class _Totals:
    """What a step reports, summed block by block."""

    def __init__(self, slots: int, anchors: int):
        self.scalars = dict.fromkeys(("loss", "ce", "kl", "cap", "anchors", "accept"), 0.0)
        self.vectors = {name: [0.0] * slots for name in ("slot_ce", "slot_correct", "slot_count")}
        self.vectors |= {name: [0.0] * anchors for name in ("block_ce", "block_count")}
        self.gaps: list[float] = []

    def add(self, name, value, index=None):
        if index is None:
            self.scalars[name] += value
        else:
            self.vectors[name][index] += value

    def tensors(self):
        return {
            name: torch.tensor(x, dtype=torch.float64) for name, x in (self.scalars | self.vectors).items()
        }


def _documents(inputs):
    """Yield (first, end) of each document of the packed row."""
    ids = inputs["doc_ids"].tolist()
    for document in sorted(set(ids) - {-1}):
        first = ids.index(document)
        yield first, first + ids.count(document)


def oracle_step(
    config: DrafterConfig, loss: LossConfig, inputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return every output of `train_step` and `eval_step`, and the top-2 gap of each supervised slot."""
    model = Oracle(config, inputs)
    embed, head = inputs["embed_tokens"].double(), inputs["lm_head"].double()
    anchors, valid = inputs["anchors"].tolist(), inputs["anchor_valid"].tolist()
    totals = _Totals(config.block_size - 1, len(anchors))
    for first, end in _documents(inputs):
        document = _Document(
            inputs["input_ids"][first:end].tolist(),
            inputs["loss_mask"][first:end].tolist(),
            inputs["teacher_hidden"][first:end].double() @ head.T,
        )
        context = model.context(inputs["features"][first:end].double())
        # The blocks' gradients meet in the leaves, and go through the context once.
        leaves = [tuple(x.detach().requires_grad_() for x in pair) for pair in context]
        for index, anchor in enumerate(anchors):
            if not valid[index] or not first <= anchor < end:
                continue
            tokens = [document.ids[anchor - first]] + [config.mask_token_id] * (config.block_size - 1)
            hidden = model.block(leaves, anchor - first, torch.stack([embed[token] for token in tokens]))
            block_loss = _score(loss, totals, document, index, anchor - first, (hidden[1:] @ head.T).unbind())
            if block_loss.requires_grad:
                block_loss.backward()
        pairs = [
            both
            for kv, leaf_kv in zip(context, leaves, strict=True)
            for both in zip(kv, leaf_kv, strict=True)
        ]
        reached = [(x, leaf.grad) for x, leaf in pairs if leaf.grad is not None]
        if reached:
            torch.autograd.backward(*zip(*reached, strict=True))
    grads = {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return totals.tensors() | grads, totals.gaps


def _score(loss, totals, document, index, place, logits):
    """Add one block's values to the totals and return its weighted loss; slot k has logits[k - 1]."""
    kl_weight, temperature = _float32(loss.kl_weight), _float32(loss.temperature)
    slots = range(1, len(logits) + 1)
    supervised = [place + k < len(document.ids) and document.mask[place + k] for k in slots]
    ce = [
        torch.logsumexp(logits[k - 1], 0) - logits[k - 1][document.ids[place + k]]
        if supervised[k - 1]
        else None
        for k in slots
    ]
    weights = _slot_weights(loss, [None if value is None else value.item() for value in ce])
    block_loss, leading = torch.zeros((), dtype=torch.float64), True
    totals.add("anchors", 1)
    totals.add("accept", 1)
    for k in slots:
        if not supervised[k - 1]:
            leading = False
            continue
        weight, value = weights[k - 1], ce[k - 1]
        kl, entropy = _kl_and_entropy(temperature, logits[k - 1], document.teacher[place + k - 1])
        best = torch.topk(logits[k - 1], 2)
        hit = best.indices[0].item() == document.ids[place + k]
        leading = leading and hit
        term = (1 - kl_weight) * value + kl_weight * temperature**2 * kl
        if hit:
            term = term + _float32(loss.cap_weight) * entropy
            totals.add("cap", weight * entropy.item())
        block_loss = block_loss + weight * term
        totals.gaps.append((best.values[0] - best.values[1]).item())
        totals.add("ce", weight * value.item())
        totals.add("kl", weight * kl.item())
        totals.add("accept", leading)
        totals.add("slot_ce", value.item(), k - 1)
        totals.add("slot_correct", hit, k - 1)
        totals.add("slot_count", 1, k - 1)
        totals.add("block_ce", value.item(), index)
        totals.add("block_count", 1, index)
    totals.add("loss", block_loss.item())
    return block_loss


def _kl_and_entropy(temperature, logits, teacher_logits):
    """KL(target || drafter), both at temperature, and the entropy of the drafter at temperature 1."""
    target = (teacher_logits / temperature).softmax(-1)
    kl = (target * (target.log() - (logits / temperature).log_softmax(-1))).sum()
    probability = logits.softmax(-1)
    return kl, -(probability * logits.log_softmax(-1)).sum()


def relative_errors(
    outputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return |a-b| / |b| of every output, by name. |b| must be positive: a zero proves nothing."""
    errors = {}
    for name, value in outputs.items():
        expected = reference[name].double()
        size = expected.norm()
        assert size > 0, f"{name} is zero in the reference"
        errors[name] = ((value.double() - expected).norm() / size).item()
    return errors
