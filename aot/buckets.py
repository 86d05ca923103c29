"""Shape buckets: the fixed (tokens, anchors) sizes a program is compiled for.

A micro-batch of `tokens` context tokens and `anchors` anchors runs in the cheapest bucket that holds it.
The largest bucket is always part of a set, so that every micro-batch the packer emits has a home.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from aot.errors import ConfigError

TOKEN_MULTIPLE = 128


@dataclass(frozen=True, order=True)
class Bucket:
    """T context tokens and A anchors, written ``8192x512``."""

    tokens: int
    anchors: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.anchors}"

    def holds(self, tokens: int, anchors: int) -> bool:
        return tokens <= self.tokens and anchors <= self.anchors

    @classmethod
    def parse(cls, text: str) -> "Bucket":
        match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", text.strip())
        if match is None:
            raise ConfigError(f"bucket '{text}' is not TOKENSxANCHORS", "e.g. `512x32`")
        bucket = cls(int(match[1]), int(match[2]))
        if bucket.tokens % TOKEN_MULTIPLE:
            raise ConfigError(
                f"bucket '{text}': {bucket.tokens} tokens is not a multiple of {TOKEN_MULTIPLE}",
                f"use `{-(-bucket.tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE}x{bucket.anchors}`",
            )
        return bucket


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """Parse ``512x32,1024x64`` into sorted, distinct buckets."""
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError("the list of buckets is empty", "e.g. `--buckets 512x32,1024x64`")
    return tuple(sorted({Bucket.parse(part) for part in parts}))


@dataclass(frozen=True)
class LengthHistogram:
    """How many micro-batches of each size a run emits, per program: {program: {(tokens, anchors): count}}."""

    counts: Mapping[str, Mapping[tuple[int, int], int]] = field(default_factory=dict)

    def sizes(self) -> dict[tuple[int, int], int]:
        """All programs' sizes together."""
        merged: dict[tuple[int, int], int] = {}
        for sizes in self.counts.values():
            for size, count in sizes.items():
                merged[size] = merged.get(size, 0) + count
        return merged


def choose(buckets: Iterable[Bucket], tokens: int, anchors: int) -> Bucket | None:
    """Return the cheapest bucket that holds the micro-batch: fewest tokens plus anchors, or None."""
    fitting = [bucket for bucket in buckets if bucket.holds(tokens, anchors)]
    return min(fitting, key=lambda b: (b.tokens * b.anchors, b.tokens, b.anchors)) if fitting else None


def auto_buckets(
    sizes: Mapping[tuple[int, int], int], count: int, largest: Bucket, check: Callable[[Bucket], None]
) -> tuple[Bucket, ...]:
    """Return `count` quantiles of the micro-batches by tokens, and the largest bucket; equal ones count once.

    `sizes` is {(tokens, anchors): number}. The i-th bucket holds the smallest i/count of the micro-batches:
    its tokens are rounded up to TOKEN_MULTIPLE, its anchors to the next number that `check` accepts (it
    raises ConfigError otherwise). Raises ConfigError if a micro-batch does not fit the largest bucket.
    """
    ordered = sorted(sizes.items())
    for (tokens, anchors), _ in ordered:
        if not largest.holds(tokens, anchors):
            raise ConfigError(
                f"a micro-batch of {tokens} tokens and {anchors} anchors does not fit {largest}"
            )
    total = sum(sizes.values())
    buckets, seen, anchors = {largest}, 0, 1
    for (tokens, size_anchors), number in ordered:
        before, seen, anchors = seen, seen + number, max(anchors, size_anchors)
        # A quantile i/count falls among these micro-batches.
        if before * count // total != seen * count // total:
            buckets.add(_rounded(tokens, anchors, largest, check))
    return tuple(sorted(buckets))


def _rounded(tokens: int, anchors: int, largest: Bucket, check: Callable[[Bucket], None]) -> Bucket:
    tokens = min(-(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE, largest.tokens)
    for wider in range(anchors, largest.anchors):
        bucket = Bucket(tokens, wider)
        try:
            check(bucket)
        except ConfigError:
            continue
        return bucket
    return Bucket(tokens, largest.anchors)
