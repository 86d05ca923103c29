"""What verification costs: a whole store at level `bytes`, and each load of a bucket."""

from __future__ import annotations

import hashlib
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import zstandard

from aot.canary import child_environment
from aot.manifest import KeyInputs, Manifest
from aot.policy import Policy, check_trust
from aot.program import CallSpec, TensorSpec
from aot.runtime import private_copy
from aot.source import digest_of_files
from aot.store import Store
from aot.trace import key_inputs
from tests.support.toy import SMALL, ToyStep
from tests.support.vouched import FINGERPRINT, archive, keyring, write_signature

if TYPE_CHECKING:
    from pathlib import Path

ARTIFACTS = 200
#: Of the demonstration's packages: 1.2 to 1.8 MB, 0.33 MB compressed, and a manifest of 10 KB.
PACKAGE_BYTES, RANDOM_BYTES, TENSORS, SOURCES = 1_800_000, 330_000, 64, 30
RANDOM = random.Random(0).randbytes(RANDOM_BYTES)


def inputs(inner: int) -> KeyInputs:
    """Key inputs of the size that a drafter's train step has."""
    base = key_inputs(ToyStep(inner=inner), SMALL, FINGERPRINT)
    tensors = tuple(
        TensorSpec(f"param.layers.{i}.self_attn.q_proj.weight", (512, 256), "float32") for i in range(TENSORS)
    )
    sources = {f"dflash/drafter/module_{i}.py": "a" * 64 for i in range(SOURCES)}
    return replace(
        base,
        call_spec=CallSpec("cpu", tensors, tensors[:2]),
        sources=sources,
        source_digest=digest_of_files(sources),
    )


def put(store: Store, index: int) -> Manifest:
    """What `publish` leaves, without waiting for the disk."""
    package = archive(RANDOM + index.to_bytes(4, "big") + bytes(PACKAGE_BYTES - RANDOM_BYTES))
    blob = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(package)
    digests = [hashlib.sha256(content).hexdigest() for content in (package, blob)]
    made = inputs(index + 1)
    manifest = Manifest(made, made.key(), "0" * 64, digests[0], len(package), digests[1], len(blob), {})
    for path, content in (
        (store.blob_path(manifest), blob),
        (store.manifest_path(manifest.program, manifest.bucket, manifest.key), manifest.to_bytes()),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return manifest


def test_200_artifacts_are_verified_in_5_seconds(tmp_path: Path) -> None:
    """Level `bytes`, as a command, from its start to its end; 2.5 s on an idle core."""
    store = Store(tmp_path / "store")
    for index in range(ARTIFACTS):
        put(store, index)
    command = [
        sys.executable,
        "-m",
        "aot.cli",
        "verify",
        "--all",
        "--level",
        "bytes",
        "--store",
        str(store.root),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (result.returncode, result.stdout.count(" ok")) == (0, ARTIFACTS)
    # Time on a core, all of which is one thread's: other tests share the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


@pytest.mark.parametrize("policy_name", ["local", "signed"])
def test_verification_of_a_bucket_costs_20_ms_of_each_load(tmp_path: Path, policy_name: str) -> None:
    """All that `prepare` adds to a bare load: manifest, trust, bytes, archive members, the private copy."""
    store = Store(tmp_path / "store")
    manifest = put(store, 0)
    ring = keyring(tmp_path / "keys", "alice")
    write_signature(store, manifest, ring)
    path = store.manifest_path(manifest.program, manifest.bucket, manifest.key)
    policy, times = Policy(policy_name, keys=ring.folder), []
    for turn in range(15):
        folder = tmp_path / str(turn)
        folder.mkdir()
        begun = time.thread_time()
        read = store.read_manifest(path)
        check_trust(store, read, policy)
        private_copy(store, read, folder)
        times.append(1e3 * (time.thread_time() - begun))
    # Time on a core, the best of several: other tests share the cores.
    assert min(times) < 20, times
