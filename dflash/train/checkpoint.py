"""Checkpoints: safetensors and JSON in one folder that appears whole or not at all.

    <output>/checkpoints/step-00000050/
        masters.safetensors      fp32 weights under their z-lab names
        moments.safetensors      Adam's `first.<name>` and `second.<name>`
        state.json               step, configuration, what shaped the weights by digest, file hashes
        environment.json         every package and what else the run ran in
        artifacts.lock           which artifacts the run was made with
        run.toml, command.txt    the run file as resolved, the command line

A folder is written under a hidden name, synced and renamed; the newest whole one is found by looking, so
there is no pointer to fall out of step. Nothing here is a pickle. A checkpoint stands right after an
optimizer step, before the evaluation that may follow it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from aot.console import warn
from aot.errors import ConfigError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from dflash.train.optimizer import Replica

SCHEMA = 1
FOLDER = "checkpoints"
MASTERS, MOMENTS, STATE, ENVIRONMENT = (
    "masters.safetensors",
    "moments.safetensors",
    "state.json",
    "environment.json",
)
_NAME = re.compile(r"step-(\d{8,})")


class CorruptCheckpoint(UserError):
    """A checkpoint's files are not those that were written."""


@dataclass(frozen=True)
class State:
    """What a checkpoint knows beside its tensors. `updates` counts the steps that were not skipped."""

    step: int
    updates: int
    total_steps: int
    plan: str
    data: str
    target: str
    config: Mapping[str, Any]
    counters: Mapping[str, int] = field(default_factory=dict)


def folder_name(step: int) -> str:
    return f"step-{step:08}"


def folders(output: Path) -> list[Path]:
    """Published checkpoint folders of a run, oldest first."""
    found = [path for path in (output / FOLDER).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def save(
    output: Path, state: State, replica: Replica, extra_files: Mapping[str, str], keep_last: int
) -> Path:
    """Publish the checkpoint of `state.step` and prune old ones; `extra_files` is {file name: text}.

    A whole checkpoint of the same step is kept as it is: the run is deterministic.
    """
    final = output / FOLDER / folder_name(state.step)
    if not _is_whole(final):
        _publish(final, state, replica, extra_files)
    for old in folders(output)[:-keep_last]:
        _discard(old)
    return final


def _is_whole(folder: Path) -> bool:
    if folder.exists():
        with contextlib.suppress(CorruptCheckpoint):
            read_state(folder)
            return True
    return False


def _publish(final: Path, state: State, replica: Replica, extra_files: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    draft = final.with_name(f".draft-{final.name}")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    save_file(replica.masters, draft / MASTERS)
    save_file({f"{kind}.{name}": tensor for kind, name, tensor in _moments(replica)}, draft / MOMENTS)
    for name, text in extra_files.items():
        (draft / name).write_text(text, "utf-8")
    files = {path.name: _describe(path) for path in sorted(draft.iterdir())}
    body = {"schema": SCHEMA, **asdict(state), "files": files}
    (draft / STATE).write_text(json.dumps(body, indent=1, sort_keys=True), "utf-8")
    for path in draft.iterdir():
        _sync(path)
    _sync(draft)
    if final.exists():
        _discard(final)
    draft.rename(final)
    _sync(final.parent)


def sweep(output: Path) -> None:
    """Remove what a killed run left half written or half removed. The caller holds the run's lock."""
    for path in (output / FOLDER).glob(".*"):
        shutil.rmtree(path)


def read_state(folder: Path) -> State:
    """Read `state.json` and check every file's size and SHA-256; raises CorruptCheckpoint naming the file."""
    try:
        body = json.loads((folder / STATE).read_text("utf-8"))
        files = body.pop("files")
        schema = body.pop("schema")
        state = State(**body) if schema == SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"checkpoint '{folder}': {STATE} cannot be read ({error})") from None
    if state is None:
        raise ConfigError(f"checkpoint '{folder}' has schema {schema}, this version reads {SCHEMA}")
    for name in (MASTERS, MOMENTS, *files):
        if name not in files or not (folder / name).is_file() or files[name] != _describe(folder / name):
            raise CorruptCheckpoint(f"checkpoint '{folder}': {name} is not the file that was written")
    return state


def latest(output: Path) -> tuple[Path, State] | None:
    """The newest whole checkpoint of a run, or None; a damaged one is told and passed over."""
    for folder in reversed(folders(output)):
        try:
            return folder, read_state(folder)
        except CorruptCheckpoint as error:
            warn(f"{error.message}; trying the one before")
    return None


def resolve(path: Path) -> tuple[Path, State]:
    """A checkpoint named by its own folder or by its run's; raises ConfigError if there is none."""
    if (path / STATE).is_file():
        return path, read_state(path)
    found = latest(path)
    if found is None:
        raise ConfigError(
            f"'{path}' holds no whole checkpoint", "name a run's output folder or a checkpoint's"
        )
    return found


def load_masters(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights by z-lab name, on the CPU."""
    from safetensors.torch import load_file

    return load_file(folder / MASTERS)


def restore(folder: Path, replicas: list[Replica]) -> None:
    """Load masters and moments into every replica; raises CorruptCheckpoint if names or shapes differ."""
    from safetensors.torch import load_file

    masters, moments = load_masters(folder), load_file(folder / MOMENTS)
    first = {name.removeprefix("first."): t for name, t in moments.items() if name.startswith("first.")}
    second = {name.removeprefix("second."): t for name, t in moments.items() if name.startswith("second.")}
    for stored in (masters, first, second):
        expected = {name: tensor.shape for name, tensor in replicas[0].masters.items()}
        if {name: tensor.shape for name, tensor in stored.items()} != expected:
            raise CorruptCheckpoint(f"checkpoint '{folder}' holds tensors of another drafter")
    for replica in replicas:
        replica.load_state(masters, first, second)


def _moments(replica: Replica) -> Iterator[tuple[str, str, torch.Tensor]]:
    for kind, tensors in (("first", replica.first), ("second", replica.second)):
        for name, tensor in tensors.items():
            yield kind, name, tensor


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _discard(folder: Path) -> None:
    """Hide first, so that a kill during the removal leaves no half checkpoint in sight."""
    hidden = folder.with_name(f".discarded-{folder.name}")
    if hidden.exists():
        shutil.rmtree(hidden)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
