"""Turn conversations into prepared documents: token ids, assistant-only loss masks and a manifest.

Rows come from JSON or JSON Lines files or from `datasets` folders, as chats (`messages`, ShareGPT
`conversations`) or as tokens (`input_ids` and `loss_mask`). A row that cannot be used is skipped, counted and
listed in ``rejected.jsonl``; too many of them fail the whole preparation. The output appears in one rename.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aot.errors import ConfigError, UserError
from dflash.data.anchors import candidates
from dflash.data.chat import BadRow, ChatTokenizer, is_text, read_messages
from dflash.data.dataset import MANIFEST_NAME, MANIFEST_SCHEMA, Document, add_to_digest
from dflash.data.sources import Row, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerFast

REJECTED_NAME = "rejected.jsonl"
PROGRESS_ROWS = 100


class TooManyBadRows(UserError):
    """More rows than allowed cannot be used."""


@dataclass
class PrepareReport:
    """What went in and what came out; also the body of each manifest."""

    rows: int = 0
    bad_rows: int = 0
    duplicates: int = 0
    generation_mark_disagreements: int = 0
    bad_by_reason: Counter[str] = field(default_factory=Counter)
    documents: dict[str, int] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    vocab_size: int | None = None,
    eval_fraction: float = 0.0,
    max_bad_rate: float = 0.01,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> PrepareReport:
    """Write prepared documents to `output`, or with `eval_fraction` to `output`/train and `output`/eval.

    `vocab_size` bounds token ids (default: the tokenizer's). The split is by conversation: a row's
    `conversation_id`, else its id. `progress` is called with the number of rows read, now and then.
    Raises ConfigError for unusable inputs or an existing output, TooManyBadRows above `max_bad_rate`.
    """
    output = Path(output)
    if output.exists() and not overwrite:
        raise ConfigError(f"'{output}' exists", "add --overwrite, or name another folder")
    if output.exists() and not (output / REJECTED_NAME).is_file():
        raise ConfigError(f"'{output}' holds something else than prepared documents", "name another folder")
    if not 0 <= eval_fraction < 1:
        raise ConfigError(f"--eval-fraction {eval_fraction} is not in [0, 1)", "e.g. `--eval-fraction 0.05`")
    if not tokenizer.is_fast:
        raise ConfigError("the tokenizer gives no character offsets", "use a model with a fast tokenizer")
    staging = _staging(output)
    try:
        reader = _Reader(tokenizer, vocab_size or len(tokenizer))
        report = reader.report
        folders = (
            {"train": staging / "train", "eval": staging / "eval"} if eval_fraction else {"train": staging}
        )
        writers = {split: _Writer(folder) for split, folder in folders.items()}
        for document, conversation in reader.read(inputs, progress):
            in_eval = _unit_interval(conversation) < eval_fraction
            writers["eval" if in_eval else "train"].add(document)
        report.documents = {split: writer.documents for split, writer in writers.items()}
        _check(report, reader.rejected, max_bad_rate)
        common = {**tokenizer_identity(tokenizer), "vocab_size": reader.vocab_size, **_source_summary(report)}
        for writer in writers.values():
            writer.finish(common)
        rejected = "".join(json.dumps(entry) + "\n" for entry in reader.rejected)
        (staging / REJECTED_NAME).write_text(rejected, "utf-8")
        report.folders = {split: str(output / path.relative_to(staging)) for split, path in folders.items()}
        _move_into_place(staging, output)
        return report
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _staging(output: Path) -> Path:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise ConfigError(
            f"--output '{output}' cannot be written: {(error.strerror or str(error)).lower()}",
            "name a folder of your own",
        ) from None


def tokenizer_identity(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Return SHA-256 of the tokenizer (its JSON form) and of its chat template."""
    return {
        "tokenizer_hash": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "template_hash": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
    }


def _source_summary(report: PrepareReport) -> dict[str, Any]:
    return {
        "rows": report.rows,
        "bad_rows": report.bad_rows,
        "bad_by_reason": dict(sorted(report.bad_by_reason.items())),
        "duplicates": report.duplicates,
        "generation_mark_disagreements": report.generation_mark_disagreements,
    }


def _check(report: PrepareReport, rejected: list[dict[str, str]], max_bad_rate: float) -> None:
    if report.bad_rows > max_bad_rate * report.rows:
        reason, count = report.bad_by_reason.most_common(1)[0]
        examples = ", ".join(entry["id"] for entry in rejected if entry["reason"] == reason)[:200]
        raise TooManyBadRows(
            f"{report.bad_rows} of {report.rows} rows cannot be used, more than {max_bad_rate:.2%}; "
            f"{count} of them: {reason} ({examples})",
            "mend the rows, or allow more with --max-bad-rate",
        )
    empty = [split for split, count in report.documents.items() if count == 0]
    if empty:
        raise ConfigError(
            f"no document for {' and '.join(empty)} in {report.rows} rows",
            "add rows, or change --eval-fraction",
        )


def _unit_interval(conversation: str) -> float:
    """Map a conversation to [0, 1), the same on every machine and in every order of the rows."""
    return int.from_bytes(hashlib.sha256(conversation.encode()).digest()[:8], "big") / 2**64


def _move_into_place(staging: Path, output: Path) -> None:
    if output.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}-old-", dir=output.parent)) / "old"
        output.rename(old)
        staging.rename(output)
        shutil.rmtree(old.parent)
    else:
        staging.rename(output)
    output.chmod(0o755)


class _Reader:
    """Reads rows into documents; keeps the counts and the list of rejected rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int):
        self.vocab_size = vocab_size
        self.report = PrepareReport()
        self.rejected: list[dict[str, str]] = []
        self._has_template = bool(tokenizer.chat_template)
        self._chat = ChatTokenizer(tokenizer)
        self._names: set[str] = set()
        self._contents: set[bytes] = set()

    def read(
        self, inputs: Iterable[str | Path], progress: Callable[[int], None] | None
    ) -> Iterator[tuple[Document, str]]:
        """Yield (document, its conversation) for every usable row that is not a copy of an earlier one."""
        for row in read_rows(inputs):
            self.report.rows += 1
            if progress is not None and self.report.rows % PROGRESS_ROWS == 0:
                progress(self.report.rows)
            try:
                made = self._document(row)
            except BadRow as error:
                self.report.bad_rows += 1
                self.report.bad_by_reason[str(error)] += 1
                self.rejected.append(
                    {"id": _row_id(row) or row.place, "place": row.place, "reason": str(error)}
                )
                continue
            if made is not None:
                yield made
        self.report.generation_mark_disagreements = self._chat.disagreements

    def _document(self, row: Row) -> tuple[Document, str] | None:
        if row.fault is not None:
            raise BadRow(row.fault)
        values = row.values
        if "input_ids" in values:
            ids, mask = _tokens(values, self.vocab_size)
        else:
            if not self._has_template:
                raise ConfigError("the tokenizer has no chat template", "name a chat model's tokenizer")
            messages = read_messages(values)
            listed, mask = self._chat.encode(messages, values.get("tools"))
            ids = _in_vocabulary(np.asarray(listed, dtype=np.int64), self.vocab_size)
        if not len(candidates(mask)):
            raise BadRow("no two supervised tokens in a row")
        return self._named(row, ids, mask)

    def _named(self, row: Row, ids: np.ndarray, mask: np.ndarray) -> tuple[Document, str] | None:
        """Give the document an id of its own, since all its randomness hangs on it; None for a copy."""
        content = hashlib.sha256(ids.tobytes() + mask.tobytes())
        if content.digest() in self._contents:
            self.report.duplicates += 1
            return None
        given = _row_id(row) or content.hexdigest()[:16]
        name = f"{given}#{content.hexdigest()[:16]}" if given in self._names else given
        conversation = row.values.get("conversation_id")
        conversation = given if conversation is None else str(conversation)
        if not is_text(name + conversation):
            raise BadRow("not valid UTF-8")
        self._contents.add(content.digest())
        self._names.add(name)
        return Document(name, ids, mask), conversation


def _row_id(row: Row) -> str | None:
    name = row.values.get("id")
    return None if name is None else str(name)


def _tokens(values: Mapping[str, Any], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Check a row of `input_ids` and `loss_mask`."""
    try:
        ids, mask = (np.asarray(values[key]) for key in ("input_ids", "loss_mask"))
    except (KeyError, ValueError):
        raise BadRow("`input_ids` without a `loss_mask`, or lists inside them") from None
    if ids.ndim != 1 or ids.shape != mask.shape or ids.dtype.kind not in "iu":
        raise BadRow("`input_ids` and `loss_mask` are not two lists of integers of one length")
    if not np.isin(mask, (0, 1)).all():
        raise BadRow("`loss_mask` holds more than 0 and 1")
    return _in_vocabulary(ids.astype(np.int64), vocab_size), mask.astype(bool)


def _in_vocabulary(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise BadRow(f"a token id is outside 0..{vocab_size - 1}")
    return ids


class _Writer:
    """Streams documents into an Arrow file, then saves them as a `datasets` folder with its manifest."""

    def __init__(self, folder: Path):
        import datasets
        from datasets.arrow_writer import ArrowWriter

        self._folder = folder
        # In a folder of its own: `datasets` refuses to save beside a file that it reads.
        self._stream = folder / ".stream" / "rows.arrow"
        self._stream.parent.mkdir(parents=True)
        self._writer = ArrowWriter(
            path=str(self._stream),
            features=datasets.Features(
                {
                    "id": datasets.Value("string"),
                    "input_ids": datasets.List(datasets.Value("int32")),
                    "loss_mask": datasets.List(datasets.Value("bool")),
                }
            ),
        )
        self._digest = hashlib.sha256()
        self._lengths: Counter[int] = Counter()
        self._totals: Counter[str] = Counter()
        self.documents = 0

    def add(self, document: Document) -> None:
        ids, mask = document.input_ids, document.loss_mask
        self._writer.write({"id": document.id, "input_ids": ids.astype(np.int32), "loss_mask": mask})
        add_to_digest(self._digest, document.id, ids, mask)
        self._lengths[1 << (len(ids) - 1).bit_length()] += 1
        self._totals.update(
            tokens=len(ids), supervised_tokens=int(mask.sum()), candidate_anchors=len(candidates(mask))
        )
        self._totals["max_token_id"] = max(self._totals["max_token_id"], int(ids.max()))
        self.documents += 1

    def finish(self, common: Mapping[str, Any]) -> None:
        """Save the folder; the manifest comes last."""
        import datasets

        self._writer.finalize()
        rows = datasets.Dataset.from_file(str(self._stream))
        shown = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            rows.save_to_disk(str(self._folder))
        finally:
            if not shown:
                datasets.enable_progress_bars()
        shutil.rmtree(self._stream.parent)
        manifest = {
            "schema": MANIFEST_SCHEMA,
            "documents": self.documents,
            "digest": self._digest.hexdigest(),
            **self._totals,
            "lengths_up_to": {str(length): count for length, count in sorted(self._lengths.items())},
            **common,
        }
        (self._folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
