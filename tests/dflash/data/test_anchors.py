import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.data.anchors import anchor_counts, candidates, document_order, draw_anchors
from dflash.data.randomness import device_seed, digest, permutation, philox_words

masks = st.lists(st.booleans(), max_size=60).map(lambda values: np.array(values, dtype=bool))


@given(masks)
def test_candidates_are_supervised_tokens_followed_by_one_and_never_the_first(mask):
    expected = [p for p in range(len(mask)) if p >= 1 and p + 1 < len(mask) and mask[p] and mask[p + 1]]
    assert candidates(mask).tolist() == expected


@given(masks, st.floats(0.001, 3), st.integers(1, 20), st.integers(0, 3))
def test_anchors_are_distinct_sorted_candidates_in_the_number_asked_for(mask, rate, limit, epoch):
    anchors = draw_anchors(5, epoch, "some id", mask, rate, limit)
    possible = candidates(mask)
    assert anchors.dtype == np.int32
    assert (np.diff(anchors) > 0).all()
    assert np.isin(anchors, possible).all()
    assert len(anchors) == anchor_counts(len(possible), rate, limit)


@pytest.mark.parametrize(
    ("candidate_count", "rate", "limit", "count"),
    [
        (0, 1.0, 8, 0),
        (1, 0.001, 8, 1),
        (10, 0.25, 8, 3),
        (10, 0.24, 8, 2),
        (10, 2.0, 20, 10),
        (10, 1.0, 8, 8),
    ],
)
def test_anchor_count_is_rounded_at_least_one_and_never_above_candidates_or_limit(
    candidate_count, rate, limit, count
):
    assert anchor_counts(candidate_count, rate, limit) == count


def test_draws_depend_on_seed_epoch_and_document():
    mask = np.ones(200, dtype=bool)
    draws = [
        tuple(draw_anchors(*key, mask, 0.1, 50))
        for key in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]
    ]
    assert len(set(draws)) == 4


def test_every_candidate_is_drawn_equally_often():
    mask = np.ones(42, dtype=bool)
    counts = np.zeros(42)
    for epoch in range(2000):
        counts[draw_anchors(0, epoch, "a", mask, 0.25, 50)] += 1
    assert counts[0] == counts[41] == 0
    # 2000 draws of 10 in 40: 500 each, standard deviation 19.4.
    assert abs(counts[1:41] - 500).max() < 5 * 19.4


def test_purposes_do_not_run_together():
    assert (
        len(
            {
                digest(1, "a", "bc"),
                digest(1, "ab", "c"),
                digest(1, "abc"),
                digest(11, "abc"),
                digest(1, "a", 2),
            }
        )
        == 5
    )
    assert digest(1, "2") != digest(1, 2)


def philox4x64(counter, key):
    """The published Philox-4x64-10 block function, in plain integers."""
    word = 2**64 - 1
    for _ in range(10):
        high0, low0 = divmod(counter[0] * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(counter[2] * 0xCA5A826395121157, 2**64)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) & word, (key[1] + 0xBB67AE8584CAA73B) & word]
    return counter


def test_words_are_those_of_the_published_algorithm():
    key = digest(3, "purpose", 4)
    parts = [int.from_bytes(key[:8], "little"), int.from_bytes(key[8:16], "little")]
    # numpy counts up before each block of four words.
    expected = [word for block in range(1, 4) for word in philox4x64([block, 0, 0, 0], parts)]
    assert philox_words(12, 3, "purpose", 4).tolist() == expected


def test_permutation_and_order_visit_everything_once():
    assert sorted(permutation(100, 0, "x")) == list(range(100))
    assert document_order(0, 0, 100).tolist() != document_order(0, 1, 100).tolist()


def test_draws_are_the_same_in_another_process_with_another_hash_seed():
    code = (
        "import numpy as np; from dflash.data.anchors import draw_anchors, document_order;"
        "print(draw_anchors(1, 2, 'id', np.ones(99, bool), 0.2, 9).tolist(),"
        "document_order(1, 2, 9).tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = (
        f"{draw_anchors(1, 2, 'id', np.ones(99, bool), 0.2, 9).tolist()} {document_order(1, 2, 9).tolist()}\n"
    )
    assert outputs == {here.encode()}


@pytest.mark.parametrize("bits", [32, 63])
def test_device_seed_uses_its_bits(bits):
    seeds = [device_seed(0, "noise", i, bits=bits) for i in range(200)]
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**bits for seed in seeds)
    assert max(seeds) >= 2 ** (bits - 1)
