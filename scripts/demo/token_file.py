"""The token file of the demonstration: conversations as token ids and loss masks, zstd over safetensors.

Tensors: `input_ids` uint16 [N] of all documents end to end, `lengths` uint16 [D], `loss_bits` uint8 (the loss
mask of all N tokens, packed). Metadata: `ids` (JSON list of D conversation ids) and `provenance` (JSON).
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors.numpy import load, save

HEADER_LENGTH_BYTES = 8


def write_token_file(path: Path, rows: list[dict[str, Any]], provenance: dict[str, Any]) -> None:
    """Write rows of {id, input_ids, loss_mask}; every id must fit 16 bits."""
    input_ids = np.concatenate([np.asarray(row["input_ids"]) for row in rows])
    if input_ids.min() < 0 or input_ids.max() > np.iinfo(np.uint16).max:
        raise ValueError("a token id does not fit 16 bits")
    loss_mask = np.concatenate([np.asarray(row["loss_mask"], dtype=bool) for row in rows])
    tensors = {
        "input_ids": input_ids.astype(np.uint16),
        "lengths": np.array([len(row["input_ids"]) for row in rows], dtype=np.uint16),
        "loss_bits": np.packbits(loss_mask),
    }
    metadata = {"ids": json.dumps([row["id"] for row in rows]), "provenance": json.dumps(provenance)}
    payload = save(tensors, metadata)
    path.write_bytes(zstandard.ZstdCompressor(level=19, write_checksum=True).compress(payload))


def read_token_file(path: Path) -> tuple[Iterator[dict[str, Any]], dict[str, Any]]:
    """Return the rows of {id, input_ids, loss_mask} and the provenance."""
    payload = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    header_size = int.from_bytes(payload[:HEADER_LENGTH_BYTES], "little")
    metadata = json.loads(payload[HEADER_LENGTH_BYTES : HEADER_LENGTH_BYTES + header_size])["__metadata__"]
    tensors = load(payload)
    input_ids, lengths = tensors["input_ids"], tensors["lengths"].astype(np.int64)
    loss_mask = np.unpackbits(tensors["loss_bits"], count=len(input_ids)).astype(bool)

    def rows() -> Iterator[dict[str, Any]]:
        ends = np.cumsum(lengths)
        for name, end, length in zip(json.loads(metadata["ids"]), ends, lengths, strict=True):
            document = slice(end - length, end)
            yield {
                "id": name,
                "input_ids": input_ids[document].tolist(),
                "loss_mask": loss_mask[document].astype(int).tolist(),
            }

    return rows(), json.loads(metadata["provenance"])


def main() -> None:
    """Write the rows of a token file as JSON lines that `dflash prepare` reads: token_file.py FILE OUTPUT."""
    source, output = map(Path, sys.argv[1:])
    rows, provenance = read_token_file(source)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for name, text in provenance.items():
        print(f"{name}: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
