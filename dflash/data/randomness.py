"""Stateless randomness: every draw is a function of the seed and of what it is for.

The generator is Philox, keyed by SHA-256 of (seed, purpose...), and only its raw 64-bit words are used: their
order is fixed by the algorithm, while the methods of `numpy.random.Generator` may change between releases.
"""

import hashlib
import json

import numpy as np


def digest(seed: int, *purpose: str | int) -> bytes:
    """Return 32 bytes named by the seed and the purpose; ("a", "bc") and ("ab", "c") differ."""
    return hashlib.sha256(json.dumps([seed, *purpose]).encode()).digest()


def philox_words(count: int, seed: int, *purpose: str | int) -> np.ndarray:
    """Return `count` random words, uint64."""
    key = int.from_bytes(digest(seed, *purpose)[:16], "little")
    return np.random.Philox(key=key).random_raw(count)


def permutation(count: int, seed: int, *purpose: str | int) -> np.ndarray:
    """Return a random permutation of 0..count-1, int64."""
    return np.argsort(philox_words(count, seed, *purpose), kind="stable")


def device_seed(seed: int, *purpose: str | int, bits: int = 32) -> int:
    """Return a seed for a torch generator; its CPU generator keeps only 32 bits, CUDA's keeps 64."""
    return int.from_bytes(digest(seed, *purpose)[:8], "little") >> (64 - bits)
