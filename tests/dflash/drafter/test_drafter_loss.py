"""What the loss means: the target's own logits cost nothing, unsupervised slots and chunks do not count."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aot.buckets import Bucket
from dflash.drafter import step
from dflash.drafter.loss import MAX_CHUNKS, chunks
from dflash.drafter.programs import TrainStep
from tests.support.drafter import BUCKET, LOSS, example, run_eager, tiny_programs


@pytest.mark.parametrize(
    ("anchors", "slots", "max_rows", "expected"),
    [
        (1024, 31, 2048, 16),
        (64, 15, 512, 2),
        (32, 15, 512, 1),
        (7, 3, 4, 7),
        (5, 3, 1, 5),
        (4096, 15, 100, 16),
    ],
)
def test_chunks_cover_the_anchors_and_stay_few(anchors, slots, max_rows, expected):
    runs = list(chunks(anchors, slots, max_rows))
    assert [i for run in runs for i in range(anchors)[run]] == list(range(anchors))
    assert len(runs) == expected <= MAX_CHUNKS
    if len(runs) < min(MAX_CHUNKS, anchors):
        assert all(len(range(anchors)[run]) * slots <= max_rows for run in runs)


@pytest.mark.parametrize("weighting", ["gamma", "dpace"])
def test_how_the_loss_is_cut_into_chunks_changes_nothing(weighting):
    whole = LOSS.model_copy(update={"max_chunk_rows": 10**6, "weighting": weighting})
    inputs = example(TrainStep(tiny_programs()[0].config, whole), seed=1)
    expected = run_eager(tiny_programs(whole)[0], inputs, double=True)
    for rows in (1, 20, 50):
        outputs = run_eager(
            tiny_programs(whole.model_copy(update={"max_chunk_rows": rows}))[0], inputs, double=True
        )
        for name, value in expected.items():
            torch.testing.assert_close(outputs[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_a_larger_bucket_gives_the_same_sums_and_gradients():
    """Padding tokens and invalid anchors add nothing, whatever they hold."""
    train, evaluate = tiny_programs()
    larger = Bucket(256, 32)
    inputs = example(train, seed=1)
    padded = example(train, seed=2, bucket=larger)
    for name, value in inputs.items():
        if name in ("anchors", "context_start"):
            padded[name] = torch.cat((value, torch.full((16,), 255, dtype=torch.int32)))
        elif name == "anchor_valid":
            padded[name] = torch.cat((value, torch.zeros(16, dtype=torch.bool)))
        elif name == "doc_ids":
            padded[name] = torch.cat((value, torch.full((128,), -1, dtype=torch.int32)))
        elif value.shape[:1] == (128,) and name in (
            "features",
            "teacher_hidden",
            "input_ids",
            "position_ids",
            "loss_mask",
        ):
            padded[name][:128] = value
        else:
            padded[name] = value
    for program in (train, evaluate):
        small, large = (run_eager(program, x, double=True) for x in (inputs, padded))
        for name, value in small.items():
            got = large[name][: BUCKET.anchors] if name.startswith("block_") else large[name]
            torch.testing.assert_close(got, value, rtol=1e-11, atol=1e-11, msg=name)


def test_slots_past_the_document_or_outside_the_loss_mask_do_not_count():
    program, _ = tiny_programs()
    inputs = example(program, seed=1)
    reference = run_eager(program, inputs)
    anchors, documents = inputs["anchors"].tolist(), inputs["doc_ids"].tolist()
    counted = {
        a + k
        for a, valid in zip(anchors, inputs["anchor_valid"].tolist(), strict=True)
        for k in range(1, program.config.block_size)
        if valid and a + k < 128 and documents[a + k] == documents[a] and inputs["loss_mask"][a + k]
    }
    assert reference["slot_count"].sum() >= len(counted)
    changed = inputs["input_ids"].clone()
    for index in set(range(128)) - counted - set(anchors):
        changed[index] = (changed[index] + 1) % 256
    assert not torch.equal(changed, inputs["input_ids"])
    for name, value in run_eager(program, inputs | {"input_ids": changed}).items():
        assert torch.equal(value, reference[name]), name


@pytest.fixture(scope="module")
def regenerated():
    """A row of text that a random target wrote greedily after 8 tokens, every fifth token of it replaced."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        initializer_range=0.2,
    )
    target = LlamaForCausalLM(config).double().eval()
    ids = torch.randint(256, (1, 8))
    with torch.no_grad():
        while ids.shape[1] < 128:
            ids = torch.cat((ids, target(ids).logits[:, -1:].argmax(-1)), dim=1)
            if ids.shape[1] % 5 == 0:
                ids[0, -1] = torch.randint(256, ())
        hidden = target.model(ids).last_hidden_state[0]
    return ids[0], hidden, target.lm_head.weight.detach()


def forced_step(monkeypatch, regenerated, emitted_at):
    """Evaluate a drafter that emits in slot k of the anchor at a the target's state at a + emitted_at(k)."""
    ids, hidden, head = regenerated
    _, program = tiny_programs()
    inputs = example(program)
    anchors = torch.arange(20, 100, 5, dtype=torch.int32)
    inputs |= {
        "input_ids": ids,
        "teacher_hidden": hidden,
        "lm_head": head,
        "doc_ids": torch.zeros(128, dtype=torch.int32),
        "loss_mask": torch.arange(128) >= 8,
        "anchors": anchors,
        "context_start": torch.zeros_like(anchors),
        "anchor_valid": torch.ones(16, dtype=torch.bool),
    }
    places = anchors.long()[:, None] + torch.tensor([emitted_at(k) for k in range(8)])
    monkeypatch.setattr(step, "block_hidden", lambda *_: hidden[places])
    hits = (hidden[:-1] @ head.T).argmax(-1) == ids[1:]
    own = sum(hits[a + k - 1].item() for a in anchors.tolist() for k in range(1, 8)) / (16 * 7)
    outputs = run_eager(program, inputs, double=True)
    return outputs, (outputs["slot_correct"].sum() / outputs["slot_count"].sum()).item(), own


def test_a_drafter_that_emits_the_targets_logits_has_no_kl_and_the_targets_accuracy(monkeypatch, regenerated):
    outputs, accuracy, own = forced_step(monkeypatch, regenerated, lambda k: k - 1)
    assert abs(outputs["kl"].item()) < 1e-9
    assert accuracy == pytest.approx(own, abs=1e-12)
    assert 0.7 < own < 0.95, "the text must be mostly, not wholly, the target's own"


@pytest.mark.parametrize("late", [-1, 1])
def test_an_off_by_one_teacher_fails_both(monkeypatch, regenerated, late):
    """The drafter emits what a teacher read one position away would have it emit."""
    outputs, accuracy, own = forced_step(monkeypatch, regenerated, lambda k: k - 1 + late)
    assert outputs["kl"].item() > 1.0
    assert accuracy < own - 0.3
