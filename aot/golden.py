"""Golden records: what a program compiles to, as committed hashes that tell when anything changed, and what.

A record holds the graph hash, the key inputs and the key under a fixed fixture fingerprint, and beside it the
canonical graph lines (zstd), so that a red test shows a readable difference instead of two digests. A CUDA
program's graph is traced with fake CPU tensors, which needs no GPU. Package digests are never golden.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import zstandard

from aot.fingerprint import Fingerprint
from aot.manifest import canonical_json

if TYPE_CHECKING:
    from pathlib import Path

    from aot.buckets import Bucket
    from aot.program import Program

MAX_SHOWN_LINES = 40


def fixture_fingerprint() -> Fingerprint:
    """One made-up environment, so that keys compare across machines."""
    return Fingerprint(**{field.name: f"fixture-{field.name}" for field in fields(Fingerprint)})


@dataclass(frozen=True)
class GoldenRecord:
    """`key_inputs` is JSON as `aot.manifest.KeyInputs` writes it; `graph` the canonical lines of the traced graph."""

    key: str
    key_inputs: dict[str, Any]
    graph_hash: str
    graph: tuple[str, ...]

    @classmethod
    def make(cls, program: Program, bucket: Bucket) -> GoldenRecord:
        """Trace the program at the bucket, without compiling."""
        from aot.graph import graph_hash, graph_lines
        from aot.trace import key_inputs, trace

        exported = trace(program, bucket, device_type="cpu")
        inputs = key_inputs(program, bucket, fixture_fingerprint())
        return cls(
            key=inputs.key(),
            key_inputs=json.loads(canonical_json(asdict(inputs))),
            graph_hash=graph_hash(exported),
            graph=tuple(graph_lines(exported)),
        )

    def save(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        record = {"graph_hash": self.graph_hash, "key": self.key, "key_inputs": self.key_inputs}
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", "utf-8")
        lines = "\n".join(self.graph).encode()
        (folder / f"{name}.graph.zst").write_bytes(zstandard.ZstdCompressor(level=19).compress(lines))

    @classmethod
    def load(cls, folder: Path, name: str) -> GoldenRecord:
        """Raise FileNotFoundError where no golden was written: a missing golden is a failure, never a skip."""
        record = json.loads((folder / f"{name}.json").read_text("utf-8"))
        lines = zstandard.ZstdDecompressor().decompress((folder / f"{name}.graph.zst").read_bytes())
        return cls(**record, graph=tuple(lines.decode().split("\n")))

    def differences(self, found: GoldenRecord) -> list[str]:
        """Say what changed since this record: key inputs field by field, then the first lines of the graph's diff."""
        report = [
            f"{path}: {_shown(before)} -> {_shown(after)}"
            for path, before, after in _changed("", self.key_inputs, found.key_inputs)
        ]
        if self.graph_hash != found.graph_hash:
            diff = list(difflib.unified_diff(self.graph, found.graph, "golden", "now", lineterm="", n=0))
            report.append(f"graph: {self.graph_hash[:16]} -> {found.graph_hash[:16]}")
            report += diff[:MAX_SHOWN_LINES]
            if len(diff) > MAX_SHOWN_LINES:
                report.append(f"... and {len(diff) - MAX_SHOWN_LINES} more lines")
        if not report and self.key != found.key:
            report.append(f"key: {self.key} -> {found.key}")
        return report


def _shown(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else text[:117] + "..."


def _changed(path: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted({*before, *after})
        return [c for key in keys for c in _changed(f"{path}.{key}".lstrip("."), before.get(key), after.get(key))]
    if isinstance(before, list) and isinstance(after, list):
        if len(before) == len(after):
            pairs = enumerate(zip(before, after, strict=True))
            return [c for i, (a, b) in pairs for c in _changed(f"{path}[{i}]", a, b)]
        return [(f"{path} (length)", len(before), len(after))]
    return [(path, before, after)]
