"""How the pipeline of a run kept its workers busy, and how its drafter grew, from the run's metrics.

    python scripts/bench/gpu_pipeline.py runs/smollm2-train

Medians over the training steps after the first ones, in which queues fill and kernels load.
"""

import argparse
import statistics
from pathlib import Path

from dflash.train.metrics import FILE_NAME, eval_line, read_rows

WARM = 20
COLUMNS = (
    ("Ktok/s", "ktok_per_s", 1.0),
    ("drafter busy %", "drafter_busy", 100.0),
    ("drafter waits ms a step", "drafter_wait_s", 1e3),
    ("target waits ms a step", "target_wait_s", 1e3),
    ("padding %", "padding", 100.0),
    ("step ms", "seconds", 1e3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="the output folder of a run")
    rows = read_rows(parser.parse_args().run / FILE_NAME)
    steps = [row for row in rows if row["kind"] == "train"]
    if len(steps) <= WARM:
        raise SystemExit(f"error: {len(steps)} training steps; the first {WARM} do not count")
    minutes = sum(row["seconds"] for row in rows) / 60
    print(
        f"{len(steps)} steps, {sum(row['tokens'] for row in steps) / 1e6:.1f} M tokens, {minutes:.1f} minutes"
    )
    for title, key, scale in COLUMNS:
        print(f"{title:24s} {scale * statistics.median(row[key] for row in steps[WARM:]):8.2f}")
    for row in rows:
        if row["kind"] == "eval":
            print(eval_line(row))


if __name__ == "__main__":
    main()
