"""What a run reports: sums over micro-batches, one JSON line per round, one dense line on the console, wandb.

The JSONL file is the source of truth and is always written. wandb gets a copy through a bounded queue:
without a key it runs offline, and when it is slow or broken rows are dropped and counted; training never
waits for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aot.console import duration_text, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import torch

    from dflash.config import OutputConfig

#: Outputs of both programs that are summed; the `slot_*` ones have one entry per supervised slot.
SUMMED = ("loss", "ce", "kl", "cap", "anchors", "accept", "slot_ce", "slot_correct", "slot_count")
#: What went wrong so far in the run; shown once it is not zero.
COUNTERS = ("dropped_micro_batches", "skipped_steps", "eager_calls")
FILE_NAME = "metrics.jsonl"
WANDB_QUEUE = 1024
WANDB_PATIENCE_S = 10.0


@dataclass
class Sums:
    """Float64 sums of a program's metric outputs over micro-batches."""

    values: dict[str, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def flat(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The metrics of one call end to end, float64 [n], on its device."""
        import torch

        return torch.cat([outputs[name].detach().reshape(-1) for name in SUMMED]).double()

    @classmethod
    def unflat(cls, flat: torch.Tensor) -> Sums:
        """What `flat` gave, brought to the host."""
        values = flat.numpy()
        slots = (len(values) - sum(not name.startswith("slot_") for name in SUMMED)) // 3
        sizes = [slots if name.startswith("slot_") else 1 for name in SUMMED]
        return cls(dict(zip(SUMMED, np.split(values, np.cumsum(sizes)[:-1]), strict=True)))

    @classmethod
    def of(cls, outputs: Mapping[str, torch.Tensor]) -> Sums:
        """Read the metrics of one call; one transfer from the device, so it waits for the call to end."""
        return cls.unflat(cls.flat(outputs).cpu())

    @classmethod
    def total(cls, parts: Iterable[Sums]) -> Sums:
        """Add in the order given; that order is part of the result's last bits."""
        result = cls()
        for part in parts:
            for name, value in part.values.items():
                result.values[name] = result.values.get(name, 0.0) + value
        return result

    @property
    def anchors(self) -> float:
        return float(self.values["anchors"][0]) if self.values else 0.0

    def finite(self) -> bool:
        return all(bool(np.isfinite(value).all()) for value in self.values.values())

    def summary(self) -> dict[str, Any]:
        """Means: `loss`, `ce`, `kl`, `cap`, `accept_length` per anchor, `token_ce`, `slot_accuracy` per slot.

        `accept_length` is the mean over blocks of 1 + leading hits. Empty when there was no anchor.
        """
        if self.anchors == 0:
            return {}
        per_anchor = {
            name: float(self.values[name][0]) / self.anchors for name in ("loss", "ce", "kl", "cap")
        }
        count = self.values["slot_count"]
        return {
            **per_anchor,
            "accept_length": float(self.values["accept"][0]) / self.anchors,
            "token_ce": float(self.values["slot_ce"].sum() / max(count.sum(), 1)),
            "slot_accuracy": [round(float(a), 6) for a in self.values["slot_correct"] / np.maximum(count, 1)],
            "anchors": int(self.anchors),
        }


class MetricsLog:
    """Append-only JSON lines, one per round: `kind` is train or eval, `step` counts optimizer steps."""

    def __init__(self, folder: Path, completed: int):
        """Open the file, first dropping rows that a run resumed after `completed` steps writes again."""
        self.path = folder / FILE_NAME
        if self.path.exists():
            kept = [row for row in read_rows(self.path) if _precedes(row, completed)]
            draft = self.path.with_suffix(".draft")
            draft.write_text("".join(_line(row) for row in kept), "utf-8")
            draft.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file; what is no row of ours is left out, such as a last line cut short by a kill."""
    rows = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line.decode())
            if isinstance(row, dict) and isinstance(row.get("step"), int) and "kind" in row:
                rows.append(row)
    return rows


def _precedes(row: Mapping[str, Any], completed: int) -> bool:
    """A resumed run repeats the evaluation of the step that it starts from."""
    return row["step"] < completed or (row["step"] == completed and row["kind"] == "train")


def _line(row: Mapping[str, Any]) -> str:
    """JSON has no NaN: a value that is not finite becomes null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(plain) + "\n"


def train_line(row: Mapping[str, Any], total_steps: int, eta_s: float) -> str:
    """The console line of one optimizer step."""
    parts = [f"step {row['step']}/{total_steps}"]
    if "loss" in row:
        parts += [f"loss {row['loss']:.4f}", f"accept {row['accept_length']:.3f}"]
    parts += [
        f"gnorm {row['grad_norm']:.3g}",
        f"lr {row['lr']:.2e}",
        f"{row['ktok_per_s']:.2f} Ktok/s",
        f"pad {100 * row['padding']:.0f}%",
        f"wait {row['drafter_wait_s']:.2f}/{row['target_wait_s']:.2f} s",
    ]
    parts += [f"{row[name]} {name.replace('_', ' ')}" for name in COUNTERS if row[name]]
    return "  ".join([*parts, f"eta {duration_text(eta_s)}"])


def eval_line(row: Mapping[str, Any]) -> str:
    """The console line of one held-out round."""
    if "loss" not in row:
        return f"eval at step {row['step']}: no finite micro-batch"
    return (
        f"eval at step {row['step']}  loss {row['loss']:.4f}  ce {row['token_ce']:.4f}  "
        f"accept {row['accept_length']:.3f}  {row['anchors']} anchors"
    )


class WandbSink:
    """Feeds wandb from a thread of its own; every failure is told once and costs rows, not time."""

    def __init__(self, config: OutputConfig, folder: Path, run_config: Mapping[str, Any]):
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(WANDB_QUEUE)
        self.dropped = 0
        arguments = {
            "project": config.wandb_project,
            "name": config.wandb_run,
            "dir": str(folder),
            "config": dict(run_config),
        }
        self._thread = threading.Thread(target=self._feed, args=(arguments,), name="wandb", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Queue one row, or drop it when the queue is full."""
        prefixed = {
            f"{row['kind']}/{key}": value for key, value in row.items() if key not in ("kind", "step")
        }
        try:
            self._rows.put_nowait({"step": row["step"], **prefixed})
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Give wandb a few seconds to finish, then leave it behind."""
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(None)
        self._thread.join(WANDB_PATIENCE_S)
        if self.dropped:
            warn(f"wandb was too slow: {self.dropped} rows dropped ({FILE_NAME} has them all)")

    def _feed(self, arguments: Mapping[str, Any]) -> None:
        try:
            run = _start_wandb(arguments)
            while (row := self._rows.get()) is not None:
                run.log(row)
            run.finish()
        except Exception as error:
            warn(f"wandb stopped: {error} ({FILE_NAME} goes on)")


def _start_wandb(arguments: Mapping[str, Any]) -> Any:
    """Start a run in the user's WANDB_MODE; else online with a key, offline without or when that fails."""
    import wandb

    settings = wandb.Settings(init_timeout=WANDB_PATIENCE_S, silent=True)
    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
    try:
        return wandb.init(**arguments, mode=mode, settings=settings)
    except wandb.Error as error:
        if mode != "online":
            raise
        warn(f"wandb cannot go online: {error}; writing an offline run, `wandb sync` uploads it")
        return wandb.init(**arguments, mode="offline", settings=settings)


class Reporter:
    """Sends each row to every sink."""

    def __init__(self, log: MetricsLog, others: Sequence[WandbSink] = ()):
        self._log = log
        self._others = others

    def write(self, row: Mapping[str, Any]) -> None:
        self._log.write(row)
        for sink in self._others:
            sink.write(row)

    def close(self) -> None:
        self._log.close()
        for sink in self._others:
            sink.close()
