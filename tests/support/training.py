"""Runs of the tiny run: in this process, or as the `dflash` command in one of their own."""

import os
import subprocess
import sys
import time
from pathlib import Path

from aot.store import Store
from dflash.config import RunConfig, load_config
from dflash.train import checkpoint
from dflash.train.metrics import FILE_NAME, read_rows
from dflash.train.run import train
from dflash.train.session import Invocation
from tests.support.tiny_run import REPOSITORY, TinyRun


def tiny_config(run: TinyRun, output: Path, *overrides: str) -> RunConfig:
    return load_config(run.run_file, [f'output.dir="{output}"', *overrides])


def train_here(
    run: TinyRun,
    output: Path,
    *overrides: str,
    resume: bool = False,
    store: Path | None = None,
    lock: Path | None = None,
) -> int:
    """Train in this process and return the exit code; errors are raised."""
    config = tiny_config(run, output, *overrides)
    invocation = Invocation(run.run_file, ("dflash", "train"), lock or run.lock)
    return train(config, Store(store or run.store), invocation, resume=resume)


def command(run: TinyRun, output: Path, *arguments: str, store: Path | None = None) -> list[str]:
    return [
        sys.executable, "-m", "dflash.cli", "train", run.run_file,
        "--store", str(store or run.store), "--lock", str(run.lock), "--output", str(output), *arguments,
    ]  # fmt: skip


def start(
    run: TinyRun, output: Path, *arguments: str, store: Path | None = None, **variables: str
) -> subprocess.Popen[str]:
    """Start `dflash train` with its stderr as a pipe; `variables` are added to the environment."""
    paths = [variables.pop("PYTHONPATH", ""), str(REPOSITORY)]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(
        command(run, output, *arguments, store=store),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 180) -> tuple[int, str]:
    """Wait for the end; return the exit code and what was said on stderr."""
    _, said = process.communicate(timeout=timeout_s)
    return process.returncode, said


def wait_for_step(process: subprocess.Popen[str], output: Path, step: int, timeout_s: float = 120) -> None:
    """Return once the run has reported `step`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (output / FILE_NAME).exists() and any(row["step"] >= step for row in rows(output)):
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    raise TimeoutError(f"step {step} was not reached")


def rows(output: Path, kind: str | None = None) -> list[dict]:
    """Metric rows, of one kind if given."""
    return [row for row in read_rows(output / FILE_NAME) if kind in (None, row["kind"])]


def final_bytes(output: Path) -> dict[str, bytes]:
    """Weights and optimizer state of the last checkpoint, as stored."""
    folder = checkpoint.folders(output)[-1]
    return {
        f"{folder.name}/{name}": (folder / name).read_bytes()
        for name in (checkpoint.MASTERS, checkpoint.MOMENTS)
    }
