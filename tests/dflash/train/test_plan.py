"""The plan of a run: rounds, resumption, coverage, and who gets what."""

import numpy as np
import pytest

from aot.buckets import Bucket
from aot.errors import ConfigError
from dflash.config import RunConfig
from dflash.train.plan import EVAL, TRAIN, RunPlan, run_histogram

DRAFTER = {
    "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8,
    "vocab_size": 16, "num_target_layers": 2, "target_layer_ids": (0,), "mask_token_id": 1, "block_size": 8,
}  # fmt: skip
DATA = {
    "max_seq_len": 100, "token_budget": 256, "max_anchors": 32, "max_batch_size": 8, "buckets": ("128x16",),
}  # fmt: skip


class Sized:
    """Documents of given lengths whose tokens are all supervised."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int64)

    def __len__(self):
        return len(self.lengths)

    def measure(self, max_length):
        tokens = self.lengths if max_length is None else np.minimum(self.lengths, max_length)
        return tokens, np.maximum(tokens - 2, 0)


TRAINING, HELD_OUT = Sized([(37 * i) % 90 + 10 for i in range(50)]), Sized([60] * 9)


def config(**sections):
    topology = sections.pop("topology", {"drafter_devices": ("cpu",) * 3})
    return RunConfig(drafter=DRAFTER, data=DATA, topology=topology, **sections)


def make(held_out=HELD_OUT, **sections):
    return RunPlan.make(config(**sections), TRAINING, held_out)


def test_a_step_is_grad_accum_times_drafters_and_the_last_may_be_smaller():
    plan = make(train={"grad_accum": 2}, held_out=None)
    sizes = [len(work.items) for work in plan.rounds()]
    assert plan.micro_batches_per_step == 6
    assert sizes == [6] * (len(plan.train) // 6) + ([len(plan.train) % 6] if len(plan.train) % 6 else [])
    assert plan.total_steps == len(sizes)
    assert 0 < sizes[-1] < 6


def test_every_document_is_seen_once_per_epoch_in_a_new_order():
    plan = make(train={"epochs": 2}, held_out=None)
    seen = [[i for e, batch in plan.train if e == epoch for i in batch.documents] for epoch in (0, 1)]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(50))
    assert seen[0] != seen[1]


def test_every_item_fits_its_bucket_and_every_bucket_is_declared():
    plan = make()
    for work in plan.rounds():
        for item in work.items:
            assert item.batch.bucket.holds(item.batch.tokens, item.batch.anchors)
            assert (item.program, item.batch.bucket) in plan.needs()
    assert set(plan.needs()) == {(i.program, i.batch.bucket) for work in plan.rounds() for i in work.items}
    assert (EVAL, Bucket(256, 32)) in plan.needs()


def test_evaluations_come_at_the_interval_and_once_at_the_end():
    plan = make(eval={"eval_every": 2})
    evaluated = [work.step for work in plan.rounds() if work.program == EVAL]
    total = plan.total_steps
    assert evaluated == sorted({*range(2, total + 1, 2), total})
    assert [work.step for work in plan.rounds() if work.program == TRAIN] == list(range(1, total + 1))


def test_held_out_batches_are_limited_unshuffled_and_the_same_in_every_round():
    plan = make(eval={"eval_every": 1, "eval_max_batches": 2})
    rounds = [work for work in plan.rounds() if work.program == EVAL]
    assert len(plan.held_out) == 2
    assert len({tuple(item.batch for item in work.items) for work in rounds}) == 1


@pytest.mark.parametrize("completed", [0, 1, 2, 3])
def test_a_resumed_run_has_the_tail_of_the_sequence_with_the_evaluation_of_its_step(completed):
    plan = make(eval={"eval_every": 2})
    tail = [w for w in plan.rounds() if w.step > completed or (w.step == completed and w.program == EVAL)]
    assert list(plan.rounds(completed)) == tail


def test_items_are_numbered_through_the_whole_run():
    items = [item for work in make(eval={"eval_every": 2}).rounds() for item in work.items]
    assert [item.sequence for item in items] == list(range(len(items)))


def test_max_steps_cuts_the_run_and_plans_no_epoch_beyond_it():
    plan = make(train={"epochs": 1000, "max_steps": 4})
    assert plan.total_steps == 4
    assert len(plan.train) == 12


def test_the_digest_names_the_training_sequence():
    same = make(topology={"drafter_devices": ("cpu",)}, train={"grad_accum": 3})
    assert make().digest() == same.digest()
    others = [
        make(train={"seed": 1}),
        make(train={"epochs": 2}),
        make(train={"grad_accum": 2}),
        RunPlan.make(config(), Sized([20] * 50), None),
    ]
    assert len({make().digest(), *(plan.digest() for plan in others)}) == 5


def test_histogram_and_padding_count_every_micro_batch():
    plan = make()
    histogram = plan.histogram()
    assert sum(histogram.counts[TRAIN].values()) == len(plan.train)
    assert sum(histogram.counts[EVAL].values()) == len(plan.held_out)
    tokens = sum(batch.tokens for _, batch in plan.train)
    assert tokens == TRAINING.lengths.sum()
    room = sum(batch.bucket.tokens for _, batch in plan.train)
    assert plan.padding()[TRAIN] == pytest.approx(1 - tokens / room)


@pytest.mark.parametrize("split", ["data.train", "data.eval"])
def test_a_split_with_nothing_to_train_on_is_a_start_up_error(split):
    nothing = Sized([2, 1])
    documents = (nothing, HELD_OUT) if split == "data.train" else (TRAINING, nothing)
    with pytest.raises(ConfigError, match=split) as caught:
        RunPlan.make(config(), *documents)
    assert "dflash prepare" in caught.value.hint


@pytest.mark.parametrize("split", ["data.train", "data.eval"])
def test_documents_cut_too_short_are_told_as_such(split):
    """Without the second look at the uncut documents, the hint says to prepare good data again."""
    config = RunConfig(drafter=DRAFTER, data={**DATA, "max_seq_len": 12})
    short = Sized([60])
    short.measure = lambda max_length: (short.lengths, np.array([0 if max_length else 58]))
    with pytest.raises(ConfigError, match=f"{split} .* first 12 tokens") as caught:
        RunPlan.make(config, *((short, None) if split == "data.train" else (TRAINING, short)))
    assert caught.value.hint == "raise data.max_seq_len"


def test_there_is_no_histogram_before_the_data_is_there(tmp_path):
    absent = RunConfig(drafter=DRAFTER, data={**DATA, "train": str(tmp_path / "nowhere")})
    assert run_histogram(absent) is None


def test_the_same_step_is_the_same_plan_for_every_number_of_drafters():
    digests = {
        make(train={"grad_accum": 12 // drafters}, topology={"drafter_devices": ("cpu",) * drafters}).digest()
        for drafters in (1, 2, 3)
    }
    assert len(digests) == 1
