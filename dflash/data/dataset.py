"""Prepared documents: a `datasets` folder of token ids and loss masks, with a manifest beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aot.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import datasets

MANIFEST_NAME = "manifest.json"
MANIFEST_SCHEMA = 1
PREPARE_HINT = "make it with `dflash prepare INPUT --output FOLDER`"


@dataclass(frozen=True)
class Document:
    """One conversation: token ids int64 [length] and the bool mask of the tokens to learn [length]."""

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


def add_to_digest(digest: Any, name: str, input_ids: np.ndarray, loss_mask: np.ndarray) -> None:
    """Hash one document; that of all, in order, is the digest in the manifest."""
    header = json.dumps([name, len(input_ids)]).encode()
    digest.update(header + input_ids.astype("<i4").tobytes() + loss_mask.astype(bool).tobytes())


def content_digest(rows: datasets.Dataset) -> str:
    """SHA-256 of every document, in order. Raises ValueError for bytes that are no such table."""
    table = rows.data.table
    table.validate(full=True)
    digest = hashlib.sha256()
    for batch in table.select(["id", "input_ids", "loss_mask"]).to_batches():
        names, *lists = batch.columns
        for row in zip(names.to_pylist(), *map(_pieces, lists), strict=True):
            add_to_digest(digest, *row)
    return digest.hexdigest()


def _pieces(lists: Any) -> Iterator[np.ndarray]:
    values = lists.values.to_numpy(zero_copy_only=False)
    return (values[start:end] for start, end in pairwise(lists.offsets.to_pylist()))


@dataclass(frozen=True)
class Documents:
    """A prepared folder, memory-mapped; reading documents from several threads is safe."""

    folder: Path
    manifest: dict[str, Any]
    rows: datasets.Dataset = field(repr=False)
    _measured: dict[int | None, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Documents:
        """Open a folder written by `dflash prepare`.

        Reads it once, so that nobody trains on other documents than were prepared. Raises ConfigError when it
        is absent, unfinished, changed since, or of another schema.
        """
        import datasets

        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST_NAME).read_text("utf-8"))
        except (OSError, ValueError):
            raise ConfigError(f"'{folder}' is not a folder of prepared documents", PREPARE_HINT) from None
        if not isinstance(manifest, dict) or manifest.get("schema") != MANIFEST_SCHEMA:
            raise ConfigError(f"'{folder}' was prepared by another version", PREPARE_HINT)
        try:
            rows = datasets.load_from_disk(str(folder))
            digest = content_digest(rows)
        except Exception as error:
            # Damaged metadata trips `datasets` in many ways: KeyError, TypeError, AttributeError and more.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(f"'{folder}' cannot be read: {reason}", PREPARE_HINT) from None
        if len(rows) != manifest["documents"]:
            raise ConfigError(
                f"'{folder}' holds {len(rows)} documents, its manifest says {manifest['documents']}",
                PREPARE_HINT,
            )
        if digest != manifest.get("digest"):
            raise ConfigError(f"'{folder}' holds other documents than were prepared", PREPARE_HINT)
        return cls(folder, manifest, rows.with_format("numpy"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Document:
        row = self.rows[int(index)]
        return Document(
            str(row["id"]),
            np.asarray(row["input_ids"], dtype=np.int64),
            np.asarray(row["loss_mask"], dtype=bool),
        )

    @property
    def digest(self) -> str:
        """SHA-256 of every document, in order: equal for equal data."""
        return self.manifest["digest"]

    @property
    def max_token_id(self) -> int:
        """The largest token id of any document; a run's vocabulary must hold it."""
        return self.manifest["max_token_id"]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return self.measure()[0]

    @property
    def supervised(self) -> np.ndarray:
        """Candidate anchors of each document, int64 [documents]."""
        return self.measure()[1]

    def measure(self, max_length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return lengths and candidate anchors, int64 [documents], of documents cut at `max_length`."""
        if max_length not in self._measured:
            self._measured[max_length] = self._scan(max_length)
        return self._measured[max_length]

    def _scan(self, max_length: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Scan the loss masks column-wise, chunk by chunk: a million documents take seconds, not minutes."""
        lengths, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for chunk in self.rows.data.column("loss_mask").chunks:
            offsets = chunk.offsets.to_numpy().astype(np.int64)
            mask = chunk.values.to_numpy(zero_copy_only=False)
            start, length = offsets[:-1], np.diff(offsets)
            if max_length is not None:
                length = np.minimum(length, max_length)
            # pairs[i]: supervised tokens before i whose next token is supervised. Candidates of a document
            # are such tokens from its second to its last but one.
            pairs = np.append(0, np.cumsum(mask[:-1] & mask[1:]))
            first = np.minimum(start + 1, len(pairs) - 1)
            last = np.minimum(start + np.maximum(length - 1, 1), len(pairs) - 1)
            lengths.append(length)
            counts.append(pairs[last] - pairs[first])
        return np.concatenate(lengths), np.concatenate(counts)
