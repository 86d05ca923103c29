"""The DFlash drafter: a Qwen3-style decoder whose every layer attends to the target's features.

Parameters are a dict of tensors under their published checkpoint names; the functions are pure. The training
forward (all blocks of a packed row under a mask) and the decoding forward (one block over a key/value cache)
share every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.drafter.attention import Attend, sdpa
from dflash.drafter.block_mask import mask_rule
from dflash.drafter.recompute import called, recomputed

if TYPE_CHECKING:
    from dflash.config import DrafterConfig

Parameters = Mapping[str, Tensor]
Rope = tuple[Tensor, Tensor]


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the 3 + 11 per layer trained tensors, in the order of the programs' inputs."""
    H, D, ffn = config.hidden_size, config.head_dim, config.intermediate_size
    queries, keys = config.num_heads * D, config.num_kv_heads * D
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(config.target_layer_ids) * H),
        "hidden_norm.weight": (H,),
    }
    for i in range(config.num_layers):
        layer = {
            "input_layernorm": (H,),
            "self_attn.q_proj": (queries, H),
            "self_attn.k_proj": (keys, H),
            "self_attn.v_proj": (keys, H),
            "self_attn.o_proj": (H, queries),
            "self_attn.q_norm": (D,),
            "self_attn.k_norm": (D,),
            "post_attention_layernorm": (H,),
            "mlp.gate_proj": (ffn, H),
            "mlp.up_proj": (ffn, H),
            "mlp.down_proj": (H, ffn),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (H,)
    return shapes


def init_parameters(
    config: DrafterConfig, seed: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return fresh parameters: norms at one, matrices normal with `initializer_range`.

    Drawn in float32 on the host, so that one seed gives the same values on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            value = torch.ones(shape)
        else:
            value = torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)
        parameters[name] = value.to(device=device, dtype=dtype)
    return parameters


def at_least_float32(x: Tensor) -> Tensor:
    """Raise bfloat16 to float32 and leave float64 alone."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(x)
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def rope(config: DrafterConfig, position_S: Tensor, dtype: torch.dtype) -> Rope:
    """Return cosines and signed sines [S, D]. Angles are float32 whatever the dtype, as in the served model.

    Every element is computed for itself and the first half of the sines is negated, so that rotating needs no
    concatenation. One would put the sine under a mask in compiled CPU code, whose idle lanes hold stack
    garbage; a vector sine takes its slow path when any lane is large, and the others' last bit came to depend
    on it: two equal runs parted.
    """
    lane_D = torch.arange(config.head_dim, device=position_S.device)
    half = config.head_dim // 2
    frequency_D = 1.0 / config.rope_theta ** ((lane_D % half).float() * 2 / config.head_dim)
    angle_SD = position_S.float()[:, None] * frequency_D
    sign_D = torch.where(lane_D < half, -1.0, 1.0)
    return angle_SD.cos().to(dtype), (angle_SD.sin() * sign_D).to(dtype)


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, signed_sin = rope
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * signed_sin


def layer_weights(params: Parameters, layer: int) -> dict[str, Tensor]:
    """Return one layer's parameters, by the name inside the layer: `self_attn.q_proj`, `mlp.up_proj`, ..."""
    prefix = f"layers.{layer}."
    return {
        name.removeprefix(prefix).removesuffix(".weight"): tensor
        for name, tensor in params.items()
        if name.startswith(prefix)
    }


def _heads(config: DrafterConfig, x_SN: Tensor) -> Tensor:
    """[S, heads * D] -> [heads, S, D]."""
    return x_SN.view(x_SN.shape[0], -1, config.head_dim).transpose(0, 1)


def _placed(config: DrafterConfig, x_SN: Tensor, norm_weight_D: Tensor, rope_S: Rope) -> Tensor:
    """Split queries or keys into heads, norm each and rotate it to its position: [heads, S, D]."""
    return _rotate(rms_norm(_heads(config, x_SN), norm_weight_D, config.rms_norm_eps), rope_S)


def keys_values(
    config: DrafterConfig, weight: Parameters, states_SH: Tensor, rope_S: Rope
) -> tuple[Tensor, Tensor]:
    """Return one layer's keys and values [kv_heads, S, D]; the same weights serve context and block."""
    key_SN = F.linear(states_SH, weight["self_attn.k_proj"])
    value_SN = F.linear(states_SH, weight["self_attn.v_proj"])
    return _placed(config, key_SN, weight["self_attn.k_norm"], rope_S), _heads(config, value_SN)


def context_states(config: DrafterConfig, params: Parameters, features_TF: Tensor) -> Tensor:
    """Fuse the concatenated target features [T, n*H] into the context [T, H] that every layer uses."""
    fused_TH = F.linear(features_TF, params["fc.weight"])
    return rms_norm(fused_TH, params["hidden_norm.weight"], config.rms_norm_eps)


def _norm_linear(eps: float, x: Tensor, norm_weight: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    normed = rms_norm(x, norm_weight, eps)
    return tuple(F.linear(normed, weight) for weight in weights)


def _swiglu(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.silu(gate) * up, weight)


def decoder_layer(
    config: DrafterConfig,
    weight: Parameters,
    hidden_QH: Tensor,
    rope_Q: Rope,
    context_kv: tuple[Tensor, Tensor],
    attend: Attend,
) -> Tensor:
    """Run one layer on the block slots; the context enters through its keys and values only.

    `weight` is what `layer_weights` returns.
    """
    run = recomputed if config.recompute == "activations" else called
    norm_linear = partial(_norm_linear, config.rms_norm_eps)
    projections = [weight[f"self_attn.{name}_proj"] for name in "qkv"]
    query_QN, key_QN, value_QN = run(norm_linear, hidden_QH, weight["input_layernorm"], *projections)
    block_kv = (_placed(config, key_QN, weight["self_attn.k_norm"], rope_Q), _heads(config, value_QN))
    key, value = (torch.cat(pair, dim=1) for pair in zip(context_kv, block_kv, strict=True))
    query = _placed(config, query_QN, weight["self_attn.q_norm"], rope_Q)
    mixed_QN = attend(query, key, value).transpose(0, 1).reshape(hidden_QH.shape[0], -1)
    hidden_QH = hidden_QH + F.linear(mixed_QN, weight["self_attn.o_proj"])

    projections = [weight["mlp.gate_proj"], weight["mlp.up_proj"]]
    gate_QF, up_QF = run(norm_linear, hidden_QH, weight["post_attention_layernorm"], *projections)
    return hidden_QH + run(_swiglu, gate_QF, up_QF, weight["mlp.down_proj"])


def forward(
    config: DrafterConfig,
    params: Parameters,
    features_TF: Tensor,
    block_embeds_QH: Tensor,
    position_T: Tensor,
    position_Q: Tensor,
    attend: Mapping[str, Attend],
) -> Tensor:
    """Run all blocks of a packed row at once and return their normed hidden states [Q, H].

    `attend` maps each layer type to its attention over keys [context T, blocks Q]; positions are absolute,
    within the document. `lm_head` of a slot's hidden state gives the token at that slot's own position.
    """
    context_TH = context_states(config, params, features_TF)
    rope_T = rope(config, position_T, context_TH.dtype)
    rope_Q = rope(config, position_Q, context_TH.dtype)
    run = recomputed if config.recompute == "layers" else called
    hidden_QH = block_embeds_QH
    for i, layer_type in enumerate(config.resolved_layer_types):
        weight = layer_weights(params, i)

        def layer(hidden_QH, context_TH, *weights, names=tuple(weight), attend=attend[layer_type]):
            weight = dict(zip(names, weights, strict=True))
            context_kv = keys_values(config, weight, context_TH, rope_T)
            return decoder_layer(config, weight, hidden_QH, rope_Q, context_kv, attend)

        hidden_QH = run(layer, hidden_QH, context_TH, *weight.values())
    return rms_norm(hidden_QH, params["norm.weight"], config.rms_norm_eps)


@dataclass
class DrafterCache:
    """Keys and values [kv_heads, S, D] of the S context tokens seen so far, one pair per layer."""

    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def empty(cls, config: DrafterConfig, device: torch.device | str, dtype: torch.dtype) -> DrafterCache:
        nothing = torch.empty(config.num_kv_heads, 0, config.head_dim, device=device, dtype=dtype)
        return cls([(nothing, nothing)] * config.num_layers)

    @property
    def length(self) -> int:
        """How many context tokens are cached; the next new feature is at this position."""
        return self.layers[0][0].shape[1]

    def append(self, layer: int, new_kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Add one layer's new context and return all of it."""
        old_kv = self.layers[layer]
        key, value = (torch.cat(pair, dim=1) for pair in zip(old_kv, new_kv, strict=True))
        self.layers[layer] = (key, value)
        return key, value


def draft_block(
    config: DrafterConfig,
    params: Parameters,
    cache: DrafterCache,
    new_features_NF: Tensor,
    first_position: int,
    block_embeds_BH: Tensor,
) -> Tensor:
    """Append N new context features to the cache and draft one block after them: hidden states [B, H].

    `first_position` is the absolute position of the first new feature, which must be `cache.length`; the
    anchor (slot 0 of the block) is at `first_position + N`. The block itself never enters the cache.
    """
    assert first_position == cache.length, (
        f"new features start at {first_position}, the cache holds {cache.length}"
    )
    anchor, size = first_position + new_features_NF.shape[0], block_embeds_BH.shape[0]
    position = torch.arange(first_position, anchor + size, device=block_embeds_BH.device)
    context_NH = context_states(config, params, new_features_NF)
    rope_N = rope(config, position[:-size], context_NH.dtype)
    rope_B = rope(config, position[-size:], context_NH.dtype)
    start_A = torch.zeros(1, dtype=torch.int32, device=position.device)
    attend = {
        layer_type: sdpa(mask_rule(config, layer_type, anchor, size).dense(start_A, start_A + anchor))
        for layer_type in set(config.resolved_layer_types)
    }
    hidden_BH = block_embeds_BH
    for i, layer_type in enumerate(config.resolved_layer_types):
        weight = layer_weights(params, i)
        context_kv = cache.append(i, keys_values(config, weight, context_NH, rope_N))
        hidden_BH = decoder_layer(config, weight, hidden_BH, rope_B, context_kv, attend[layer_type])
    return rms_norm(hidden_BH, params["norm.weight"], config.rms_norm_eps)
