"""Write the golden records of the shipped recipes to artifacts/golden/<torch minor>/; `make golden` calls it.

Covered: both programs of the demonstration at each of its buckets, and both of the reference run at its
largest, traced with fake tensors on the CPU; and the source digests. Tests compare, they never write.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from aot.buckets import Bucket
from aot.golden import GoldenRecord, torch_minor
from aot.program import Program
from aot.source import source_digest
from dflash.config import load_config
from dflash.drafter.programs import make_programs

GOLDEN = Path(__file__).parents[1] / "artifacts" / "golden"
RECIPES = {"smollm2-cpu": None, "qwen3.6-27b-5x3": 1}


def golden_folder() -> Path:
    """Graphs differ between torch minors, so each has a folder of its own."""
    return GOLDEN / torch_minor(torch.__version__)


def cases() -> Iterator[tuple[str, Program, Bucket]]:
    """Yield (name, program, bucket) of every record; of the reference run, the largest bucket only."""
    for recipe, largest in RECIPES.items():
        config = load_config(recipe)
        buckets = sorted(config.data.resolved_buckets)
        for program in make_programs(config):
            for bucket in buckets[-largest:] if largest else buckets:
                yield f"{recipe}.{program.name}.{bucket}", program, bucket


def source_digests() -> dict[str, str]:
    """The digest of each program's source, the same on every Python and torch."""
    return {
        f"{recipe}.{program.name}": source_digest(program.source_modules)
        for recipe in RECIPES
        for program in make_programs(load_config(recipe))
    }


def main() -> None:
    folder = golden_folder()
    for name, program, bucket in cases():
        GoldenRecord.make(program, bucket).save(folder, name)
        print(f"wrote {folder.relative_to(GOLDEN.parent)}/{name}", file=sys.stderr)
    (GOLDEN / "source.json").write_text(
        json.dumps(source_digests(), indent=1, sort_keys=True) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
