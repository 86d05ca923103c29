"""Greedy speculative decoding with a linear block, one sequence at a time.

The drafter proposes the B - 1 tokens after the last one, the target checks them all in one pass and adds a
token of its own, so that each pass yields 1..B tokens and the text is exactly the target's own greedy text.
tau is the mean number of tokens per block, the target's own (bonus) token included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from dflash.drafter.model import DrafterCache, draft_block

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from dflash.config import DrafterConfig
    from dflash.data.dataset import Document
    from dflash.drafter.model import Parameters
    from dflash.target.huggingface import HuggingFaceTarget


@dataclass(frozen=True)
class Decoded:
    """New tokens, how many tokens each block yielded (tokens after an end token excluded), target passes."""

    tokens: list[int]
    block_yields: list[int]
    target_passes: int


@dataclass(frozen=True)
class DecodingReport:
    """Decoding over several prompts; `mismatches` lists the prompts whose text is not the target's own."""

    prompts: int
    tokens: int
    target_passes: int
    tau: float
    mismatches: tuple[int, ...]


class Drafter:
    """Proposes blocks for one sequence; lives as long as that sequence."""

    def __init__(self, config: DrafterConfig, params: Parameters, target: HuggingFaceTarget):
        weight = params["fc.weight"]
        self._config, self._params = config, params
        self._embed_VH = target.embed_tokens.to(weight)
        self._head_VH = target.lm_head.to(weight)
        self._cache = DrafterCache.empty(config, weight.device, weight.dtype)

    def propose(self, new_features_NF: Tensor, last_token: int) -> Tensor:
        """Return the B - 1 tokens, int64, drafted after `last_token`, given the features not seen before."""
        masks = [self._config.mask_token_id] * (self._config.block_size - 1)
        block_B = torch.tensor([last_token, *masks], device=self._embed_VH.device)
        hidden_BH = draft_block(
            self._config,
            self._params,
            self._cache,
            new_features_NF.to(self._embed_VH),
            self._cache.length,
            F.embedding(block_B, self._embed_VH),
        )
        return F.linear(hidden_BH[1:], self._head_VH).argmax(dim=-1)


@torch.no_grad()
def speculative_decode(
    target: HuggingFaceTarget,
    config: DrafterConfig,
    params: Parameters,
    prompt_ids: Tensor,
    max_new_tokens: int,
) -> Decoded:
    """Continue `prompt_ids` int64 [L], L >= 1, until an end token or `max_new_tokens` tokens."""
    drafter = Drafter(config, params, target)
    cache, features, logits_LV = target.prefill(prompt_ids, rewind=config.block_size - 1)
    tokens, yields, passes = [int(logits_LV[-1].argmax())], [], 1
    while len(tokens) < max_new_tokens and tokens[-1] not in target.end_ids:
        drafts = drafter.propose(features, tokens[-1]).tolist()
        features_BF, logits_BV = target.extend(torch.tensor([tokens[-1], *drafts]), cache)
        passes += 1
        choices = logits_BV.argmax(dim=-1).tolist()
        accepted = _leading_matches(drafts, choices)
        target.rewind(cache, len(drafts) - accepted)
        features = features_BF[: accepted + 1]
        new = _until_end(choices[: accepted + 1], target.end_ids)
        yields.append(len(new))
        tokens += new
    return Decoded(tokens[:max_new_tokens], yields, passes)


def _leading_matches(drafts: Sequence[int], choices: Sequence[int]) -> int:
    for count, (draft, choice) in enumerate(zip(drafts, choices, strict=False)):
        if draft != choice:
            return count
    return len(drafts)


def _until_end(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in end_ids:
            return tokens[: index + 1]
    return tokens


@torch.no_grad()
def target_decode(target: HuggingFaceTarget, prompt_ids: Tensor, max_new_tokens: int) -> list[int]:
    """Return what transformers' own greedy `generate` adds to the prompt."""
    prompt_1L = prompt_ids[None].to(target.device)
    output_1L = target.model.generate(
        prompt_1L, attention_mask=torch.ones_like(prompt_1L), do_sample=False, max_new_tokens=max_new_tokens
    )
    return output_1L[0, prompt_1L.shape[1] :].tolist()


def prompt_of(document: Document) -> Tensor:
    """Return the tokens before the document's first supervised one, int64: the prompt of its first answer."""
    return torch.from_numpy(document.input_ids[: int(document.loss_mask.argmax())])


def evaluate_decoding(
    target: HuggingFaceTarget,
    config: DrafterConfig,
    params: Parameters,
    prompts: Iterable[Tensor],
    max_new_tokens: int,
    *,
    compare: bool = True,
) -> DecodingReport:
    """Decode every prompt; with `compare`, check each text against the target's own `generate`."""
    decoded, mismatches = [], []
    for index, prompt in enumerate(prompts):
        decoded.append(speculative_decode(target, config, params, prompt, max_new_tokens))
        if compare and decoded[-1].tokens != target_decode(target, prompt, max_new_tokens):
            mismatches.append(index)
    yields = [count for one in decoded for count in one.block_yields]
    return DecodingReport(
        prompts=len(decoded),
        tokens=sum(len(one.tokens) for one in decoded),
        target_passes=sum(one.target_passes for one in decoded),
        tau=sum(yields) / max(1, len(yields)),
        mismatches=tuple(mismatches),
    )
