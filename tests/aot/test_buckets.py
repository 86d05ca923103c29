"""Buckets: parsing, choosing, and choosing them from the data."""

import random

import pytest

from aot.buckets import TOKEN_MULTIPLE, Bucket, auto_buckets, choose, parse_buckets
from aot.errors import ConfigError

LARGEST = Bucket(4096, 256)
BLOCK = 16


def whole_tiles(bucket: Bucket) -> None:
    if bucket.anchors * BLOCK % 128:
        raise ConfigError("not whole tiles")


def anything(bucket: Bucket) -> None:
    pass


def some_sizes(seed: int) -> dict[tuple[int, int], int]:
    dice = random.Random(seed)
    return {(dice.randint(1, 4096), dice.randint(1, 256)): dice.randint(1, 20) for _ in range(200)}


def padding(sizes: dict[tuple[int, int], int], buckets: tuple[Bucket, ...]) -> float:
    """Padded tokens over all tokens of the buckets used."""
    real = sum(tokens * count for (tokens, _), count in sizes.items())
    used = 0
    for (tokens, anchors), count in sizes.items():
        bucket = choose(buckets, tokens, anchors)
        assert bucket is not None
        used += bucket.tokens * count
    return 1 - real / used


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_auto_buckets_hold_everything_and_contain_the_largest(seed: int, count: int) -> None:
    sizes = some_sizes(seed)
    buckets = auto_buckets(sizes, count, LARGEST, whole_tiles)
    assert LARGEST in buckets
    assert 1 <= len(buckets) <= count + 1
    assert list(buckets) == sorted(set(buckets))
    for bucket in buckets:
        whole_tiles(bucket)
        assert bucket.tokens % TOKEN_MULTIPLE == 0
        assert LARGEST.holds(bucket.tokens, bucket.anchors)
    assert all(choose(buckets, *size) is not None for size in sizes)


def test_each_bucket_holds_its_share_of_the_micro_batches() -> None:
    sizes = {(128 * i, i): 1 for i in range(1, 33)}
    buckets = auto_buckets(sizes, 4, LARGEST, anything)
    assert buckets[-1] == LARGEST
    assert [sum(bucket.holds(*size) for size in sizes) for bucket in buckets] == [8, 16, 24, 32, 32]


def test_more_buckets_pad_less() -> None:
    sizes = some_sizes(7)
    pads = [padding(sizes, auto_buckets(sizes, count, LARGEST, whole_tiles)) for count in (1, 2, 4, 8)]
    assert pads == sorted(pads, reverse=True)
    assert pads[-1] < 0.6 * pads[0]


def test_equal_micro_batches_need_one_bucket_beside_the_largest() -> None:
    assert auto_buckets({(500, 30): 99}, 4, LARGEST, whole_tiles) == (Bucket(512, 32), LARGEST)
    assert auto_buckets({(500, 30): 99, (4096, 256): 1}, 4, LARGEST, whole_tiles) == (
        Bucket(512, 32),
        LARGEST,
    )


def test_a_micro_batch_beyond_the_largest_bucket_is_an_error() -> None:
    with pytest.raises(ConfigError, match="4097 tokens and 1 anchors does not fit 4096x256"):
        auto_buckets({(4097, 1): 1}, 4, LARGEST, whole_tiles)


def test_choose_takes_the_cheapest_that_holds() -> None:
    buckets = parse_buckets("1024x64,512x32,512x128")
    assert choose(buckets, 512, 32) == Bucket(512, 32)
    assert choose(buckets, 512, 33) == Bucket(512, 128)
    assert choose(buckets, 513, 1) == Bucket(1024, 64)
    assert choose(buckets, 1025, 1) is None


@pytest.mark.parametrize(
    "text", ["", "512", "512x", "0x8", "512x32x1", "-512x8", "500x8", "512X8", "9" * 12 + "x1"]
)
def test_what_is_no_bucket_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_buckets(text)
    assert caught.value.hint


def test_buckets_are_written_as_they_are_read() -> None:
    assert ",".join(map(str, parse_buckets(" 1024x64, 512x32,512x32"))) == "512x32,1024x64"
