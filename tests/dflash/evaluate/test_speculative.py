import numpy as np
import pytest
import torch

from dflash.config import DrafterConfig
from dflash.data.dataset import Document
from dflash.drafter.model import init_parameters
from dflash.evaluate import speculative
from dflash.evaluate.speculative import evaluate_decoding, prompt_of, speculative_decode, target_decode
from dflash.target.huggingface import HuggingFaceTarget
from tests.support.models import tiny_llama

CPU = torch.device("cpu")
NEW_TOKENS = 24
CONFIG = DrafterConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    vocab_size=64, num_target_layers=4, target_layer_ids=(0, 2), mask_token_id=1, block_size=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return HuggingFaceTarget(tiny_llama(), CONFIG.target_layer_ids, CPU)


@pytest.fixture(scope="module")
def params():
    return init_parameters(CONFIG, seed=0, device=CPU)


def make_prompts(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (3 + i % 9,), generator=generator) for i in range(count)]


def drafts_that_match(target, prompt, matches):
    """A stand-in drafter whose k-th block agrees with the target's own text in the first `matches[k]` tokens.

    It also keeps the features that it is handed.
    """
    text = target_decode(target, prompt, NEW_TOKENS + CONFIG.block_size)
    seen = []

    class StandIn:
        def __init__(self, *unused):
            self.position, self.block = 0, 0

        def propose(self, features, last_token):
            seen.append(features)
            assert last_token == text[self.position]
            right = matches[self.block % len(matches)]
            drafts = text[self.position + 1 : self.position + CONFIG.block_size]
            self.position += right + 1
            self.block += 1
            return torch.tensor([t if i < right else (t + 1) % 64 for i, t in enumerate(drafts)])

    return StandIn, seen


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.long)])
def test_text_equals_the_targets_own_greedy_text(target, params, count):
    report = evaluate_decoding(target, CONFIG, params, make_prompts(count), NEW_TOKENS)
    assert report.mismatches == ()
    assert report.prompts == count
    assert report.tokens == count * NEW_TOKENS
    assert 1 <= report.tau <= CONFIG.block_size


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("matches", [[0], [5], [2], [0, 5, 3, 1, 4]], ids=["none", "all", "two", "mixed"])
def test_each_block_yields_its_matches_and_one_more(target, params, monkeypatch, matches, count):
    for prompt in make_prompts(count):
        stand_in, _ = drafts_that_match(target, prompt, matches)
        monkeypatch.setattr(speculative, "Drafter", stand_in)
        decoded = speculative_decode(target, CONFIG, params, prompt, NEW_TOKENS)
        assert decoded.tokens == target_decode(target, prompt, NEW_TOKENS)
        blocks = len(decoded.block_yields)
        assert decoded.block_yields == [matches[i % len(matches)] + 1 for i in range(blocks)]
        assert decoded.target_passes == 1 + blocks
        assert sum(decoded.block_yields[:-1]) < NEW_TOKENS - 1 <= sum(decoded.block_yields)


def test_drafter_gets_each_context_feature_once_and_in_order(target, params, monkeypatch):
    prompt = make_prompts(1)[0]
    stand_in, seen = drafts_that_match(target, prompt, [0, 5, 3, 1, 4])
    monkeypatch.setattr(speculative, "Drafter", stand_in)
    decoded = speculative_decode(target, CONFIG, params, prompt, NEW_TOKENS)
    context_SF = torch.cat(seen)
    whole_SF, _ = target.features([torch.cat([prompt, torch.tensor(decoded.tokens)])])[0]
    # The anchor's own feature does not exist when its block is drafted.
    assert len(context_SF) == len(prompt) + sum(decoded.block_yields[:-1])
    torch.testing.assert_close(context_SF, whole_SF[: len(context_SF)], rtol=1e-4, atol=1e-4)


def test_forgetting_to_rewind_the_cache_shows(target, params, monkeypatch):
    monkeypatch.setattr(target, "rewind", lambda cache, tokens: None)
    assert len(evaluate_decoding(target, CONFIG, params, make_prompts(2), NEW_TOKENS).mismatches) == 2


def test_a_wrong_bonus_token_shows(target, params, monkeypatch):
    monkeypatch.setattr(speculative, "_leading_matches", lambda drafts, choices: 1)
    assert len(evaluate_decoding(target, CONFIG, params, make_prompts(2), NEW_TOKENS).mismatches) == 2


@pytest.mark.parametrize("matches", [[0], [5], [3, 1]], ids=["none", "all", "mixed"])
def test_decoding_ends_with_the_end_token_and_counts_nothing_after_it(params, monkeypatch, matches):
    prompt = make_prompts(1)[0]
    open_ended = HuggingFaceTarget(tiny_llama(), CONFIG.target_layer_ids, CPU)
    text = target_decode(open_ended, prompt, NEW_TOKENS)
    stand_in, _ = drafts_that_match(open_ended, prompt, matches)
    monkeypatch.setattr(speculative, "Drafter", stand_in)
    for end in list(dict.fromkeys(text))[::5]:
        ending = HuggingFaceTarget(tiny_llama(eos_token_id=[end, 63]), CONFIG.target_layer_ids, CPU)
        expected = text[: min(text.index(t) for t in (end, 63) if t in text) + 1]
        decoded = speculative_decode(ending, CONFIG, params, prompt, NEW_TOKENS)
        assert decoded.tokens == target_decode(ending, prompt, NEW_TOKENS) == expected
        assert 1 + sum(decoded.block_yields) == len(expected)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_limit_on_new_tokens_holds_inside_a_block(target, params, monkeypatch, limit):
    prompt = make_prompts(1)[0]
    stand_in, _ = drafts_that_match(target, prompt, [5])
    monkeypatch.setattr(speculative, "Drafter", stand_in)
    assert speculative_decode(target, CONFIG, params, prompt, limit).tokens == target_decode(
        target, prompt, limit
    )


def test_report_adds_up_over_prompts(target, params, monkeypatch):
    prompts = make_prompts(3)
    decoded = [speculative_decode(target, CONFIG, params, prompt, NEW_TOKENS) for prompt in prompts]
    report = evaluate_decoding(target, CONFIG, params, prompts, NEW_TOKENS, compare=False)
    yields = np.concatenate([one.block_yields for one in decoded])
    assert report.tau == pytest.approx(yields.mean())
    assert report.target_passes == sum(one.target_passes for one in decoded)
    assert report.tokens == sum(len(one.tokens) for one in decoded)


def test_prompt_is_what_comes_before_the_first_answer():
    mask = np.array([False, False, True, True, False, True])
    assert prompt_of(Document("a", np.arange(6), mask)).tolist() == [0, 1]
