"""Rows of JSON, JSON Lines and `datasets` inputs, each with the place it came from.

Files are read record by record, so that a file cut short or one broken line costs its own rows only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from aot.errors import ConfigError

FORMATS = "a JSON or JSON Lines file, or a folder saved by `datasets`"
#: What `json` raises: bad syntax, numbers of thousands of digits, brackets nested too deep.
UNREADABLE = (ValueError, RecursionError)
SEPARATOR = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class Row:
    """One record, or the fault that kept it from being one."""

    place: str
    values: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None


def read_rows(inputs: Iterable[str | Path]) -> Iterator[Row]:
    """Yield the rows of every input in order. Raises ConfigError for an input that cannot be read."""
    for path in map(Path, inputs):
        if path.is_dir():
            yield from _from_folder(path)
        else:
            yield from _from_file(path)


def _row(place: str, record: Any) -> Row:
    return Row(place, record) if isinstance(record, Mapping) else Row(place, fault="the row is not an object")


def _from_folder(path: Path) -> Iterator[Row]:
    import datasets

    try:
        rows = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"input '{path}' cannot be read: {error}", f"name {FORMATS}") from None
    if isinstance(rows, datasets.DatasetDict):
        raise ConfigError(f"input '{path}' holds several splits", f"name one: {path / next(iter(rows))}")
    for index, record in enumerate(rows):
        yield _row(f"{path.name}:{index}", record)


def _from_file(path: Path) -> Iterator[Row]:
    try:
        # utf-8-sig drops a byte order mark; a broken byte becomes a lone surrogate, and its row a bad one.
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            records = _array(file.read()) if _starts_array(file) else _lines(file)
            for place, record in records:
                where = f"{path.name}:{place}"
                if isinstance(record, Exception):
                    yield Row(where, fault="not valid JSON")
                else:
                    yield _row(where, record)
    except OSError as error:
        raise ConfigError(f"input '{path}' cannot be read: {error.strerror}", f"name {FORMATS}") from None


def _starts_array(file: TextIO) -> bool:
    """Look at the first character that is not white space, and go back to the start."""
    character = file.read(1)
    while character.isspace():
        character = file.read(1)
    file.seek(0)
    return character == "["


def _lines(lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except UNREADABLE as error:
                yield number, error


def _array(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the records of a JSON array; one that cannot be read ends it, since what follows has no start."""
    decoder, index = json.JSONDecoder(), 0
    position = SEPARATOR.match(text, text.index("[") + 1).end()
    while not text.startswith("]", position):
        try:
            record, end = decoder.raw_decode(text, position)
        except UNREADABLE as error:
            yield index, error
            return
        yield index, record
        position, index = SEPARATOR.match(text, end).end(), index + 1
