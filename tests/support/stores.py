"""Stores of made-up packages: quick to publish, checked like real ones."""

import dataclasses
import random
from pathlib import Path

from aot.buckets import Bucket
from aot.fingerprint import Fingerprint
from aot.manifest import KeyInputs, Manifest
from aot.store import Store
from aot.trace import key_inputs
from tests.support.toy import SMALL, ToyStep

FINGERPRINT = Fingerprint(**{field.name: "2.13" for field in dataclasses.fields(Fingerprint)})


def package_bytes(seed: int = 0, size: int = 20_000) -> bytes:
    return random.Random(seed).randbytes(size) + bytes(size)


def inputs_of(bucket: Bucket = SMALL, **program) -> KeyInputs:
    return key_inputs(ToyStep(**program), bucket, FINGERPRINT)


def publish(store: Store, package: Path, bucket: Bucket = SMALL, trial=None, **program) -> Manifest:
    return store.publish(package, inputs_of(bucket, **program), "0" * 64, {}, trial=trial)


def check_whole(store: Store) -> list[Manifest]:
    """Read every visible artifact whole; any that is half there raises."""
    manifests = store.manifests()
    for manifest in manifests:
        store.read_package(manifest)
    return manifests
