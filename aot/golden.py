"""Golden records: what a program compiles to, as committed hashes that tell when anything changed, and what.

A record holds the graph hash, the key inputs and the key under a fixed fixture fingerprint, and beside it the
canonical graph lines (zstd), so that a red test shows a readable difference instead of two digests. A CUDA
program's graph is traced with fake CPU tensors, which needs no GPU. Package digests are never golden.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import zstandard

from aot.fingerprint import Fingerprint
from aot.manifest import KeyInputs, canonical_json

if TYPE_CHECKING:
    from pathlib import Path

    from aot.buckets import Bucket
    from aot.program import Program

MAX_SHOWN_LINES = 40


def fixture_fingerprint() -> Fingerprint:
    """One made-up environment, so that keys compare across machines.

    Of the real one it keeps torch's minor version, which decides what compile options exist.
    """
    import torch

    made_up = {field.name: f"fixture-{field.name}" for field in fields(Fingerprint)}
    return Fingerprint(**made_up | {"torch_version": torch_minor(torch.__version__)})


def torch_minor(version: str) -> str:
    """Return `2.13` of `2.13.0+cpu`: graphs differ between minors."""
    from aot.trace import torch_release

    return "{}.{}".format(*torch_release(version))


@dataclass(frozen=True)
class GoldenRecord:
    """`graph` holds the canonical lines of the traced graph."""

    key: str
    key_inputs: KeyInputs
    graph_hash: str
    graph: tuple[str, ...]

    @classmethod
    def make(cls, program: Program, bucket: Bucket) -> GoldenRecord:
        """Trace the program at the bucket, without compiling."""
        from aot.graph import graph_hash, graph_lines
        from aot.trace import key_inputs, trace

        exported = trace(program, bucket, device_type="cpu")
        inputs = key_inputs(program, bucket, fixture_fingerprint())
        return cls(inputs.key(), inputs, graph_hash(exported), tuple(graph_lines(exported)))

    def save(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        record = {"graph_hash": self.graph_hash, "key": self.key, "key_inputs": self.key_inputs.as_json()}
        (folder / f"{name}.json").write_bytes(canonical_json(record) + b"\n")
        lines = "\n".join(self.graph).encode()
        (folder / f"{name}.graph.zst").write_bytes(zstandard.ZstdCompressor(level=19).compress(lines))

    @classmethod
    def load(cls, folder: Path, name: str) -> GoldenRecord:
        """Raise FileNotFoundError where none was written: a missing golden is a failure, not a skip."""
        record = json.loads((folder / f"{name}.json").read_bytes())
        lines = zstandard.ZstdDecompressor().decompress((folder / f"{name}.graph.zst").read_bytes())
        inputs = KeyInputs.from_json(record["key_inputs"])
        return cls(record["key"], inputs, record["graph_hash"], tuple(lines.decode().split("\n")))

    def differences(self, found: GoldenRecord) -> list[str]:
        """Say what changed: key inputs field by field, then the first lines of the graph's diff."""
        changed = self.key_inputs.differences(found.key_inputs, at_load=False)
        report = [str(difference) for difference in changed]
        if self.graph_hash != found.graph_hash:
            diff = list(difflib.unified_diff(self.graph, found.graph, "golden", "found", lineterm="", n=0))
            report.append(f"graph: expected {self.graph_hash[:12]}, found {found.graph_hash[:12]}")
            report += diff[:MAX_SHOWN_LINES]
            if len(diff) > MAX_SHOWN_LINES:
                report.append(f"... and {len(diff) - MAX_SHOWN_LINES} more lines")
        if self.key != found.key and not report:
            report.append(f"key: expected {self.key}, found {found.key}")
        return report
