"""Checkpoints: safetensors and JSON in one folder that appears whole or not at all.

    <output>/checkpoints/step-00000050/
        masters.safetensors      fp32 weights under their z-lab names
        moments.safetensors      Adam's `first.<name>` and `second.<name>`
        state.json               step, configuration, what shaped the weights by digest, file hashes,
                                 and a checksum of all that
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

from safetensors import SafetensorError

from aot.console import warn
from aot.errors import ConfigError, EnvironmentFault, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from dflash.train.optimizer import Replica

SCHEMA = 2
FOLDER = "checkpoints"
MASTERS, MOMENTS, STATE, ENVIRONMENT = (
    "masters.safetensors",
    "moments.safetensors",
    "state.json",
    "environment.json",
)
_NAME = re.compile(r"step-(\d{8,})")
DRAFT, DISCARDED = ".draft-", ".discarded-"
DAMAGED_HINT = "name another one with `--checkpoint`; a run's folder stands for its last whole one"


class CorruptCheckpoint(UserError):
    """A checkpoint's files are not those that were written."""

    def __init__(self, message: str, hint: str | None = DAMAGED_HINT):
        super().__init__(message, hint)


class UnwrittenCheckpoint(EnvironmentFault):
    """The machine did not take a checkpoint; the ones before it are as they were."""


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
    found = [
        path for path in (output / FOLDER).glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def save(
    output: Path, state: State, replica: Replica, extra_files: Mapping[str, str], keep_last: int
) -> Path:
    """Publish the checkpoint of `state.step` and prune old ones; `extra_files` is {file name: text}.

    A whole checkpoint of the same step is kept as it is: the run is deterministic. Raises UnwrittenCheckpoint
    with the one to go on from.
    """
    final = output / FOLDER / folder_name(state.step)
    if not _is_whole(final):
        try:
            _publish(final, state, replica, extra_files)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(_hidden(final, DRAFT), ignore_errors=True)
            raise _unwritten(final, error) from None
    _prune(final, keep_last)
    return final


def _unwritten(final: Path, error: Exception) -> UnwrittenCheckpoint:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    last = next(filter(_is_whole, reversed(folders(final.parent.parent))), None)
    goes_on = f"then `--resume` goes on from {last}" if last else "there is no earlier one to resume from"
    return UnwrittenCheckpoint(
        f"checkpoint '{final}' cannot be written: {reason}", f"free or mend its disk; {goes_on}"
    )


def _prune(saved: Path, keep_last: int) -> None:
    """Remove what is older than the last `keep_last` whole ones: a damaged one counts for none."""
    whole = 0
    found = folders(saved.parent.parent)
    for folder in reversed(found if len(found) > keep_last else ()):
        if whole == keep_last:
            _discard(folder)
        elif folder == saved or _is_whole(folder):
            whole += 1


def _is_whole(folder: Path) -> bool:
    if folder.exists():
        with contextlib.suppress(UserError):
            read_state(folder)
            return True
    return False


def _publish(final: Path, state: State, replica: Replica, extra_files: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    draft = _hidden(final, DRAFT)
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    save_file(replica.masters, draft / MASTERS)
    save_file({f"{kind}.{name}": tensor for kind, name, tensor in _moments(replica)}, draft / MOMENTS)
    for name, text in extra_files.items():
        (draft / name).write_text(text, "utf-8")
    files = {path.name: _describe(path) for path in sorted(draft.iterdir())}
    body = {"schema": SCHEMA, **asdict(state), "files": files}
    (draft / STATE).write_text(state_text(body), "utf-8")
    for path in draft.iterdir():
        _sync(path)
    _sync(draft)
    if final.exists():
        _discard(final)
    draft.rename(final)
    _sync(final.parent)


def sweep(output: Path) -> None:
    """Remove what a killed run left half written or half removed, under our own names only.

    The caller holds the run's lock.
    """
    for prefix in (DRAFT, DISCARDED):
        for path in (output / FOLDER).glob(f"{prefix}step-*"):
            if _NAME.fullmatch(path.name.removeprefix(prefix)) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def read_state(folder: Path) -> State:
    """Read `state.json` and check its checksum and every file's size and SHA-256.

    Raises CorruptCheckpoint naming the file, ConfigError for a checkpoint of another version.
    """
    try:
        body = json.loads((folder / STATE).read_text("utf-8"))
        schema = body["schema"]
        checksum = body.pop("checksum", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"checkpoint '{folder}': {STATE} cannot be read ({error})") from None
    if schema != SCHEMA:
        raise ConfigError(
            f"checkpoint '{folder}' has schema {schema}, this version reads {SCHEMA}",
            "go on with the version that wrote it, or start anew in another folder with `--output`",
        )
    if checksum != _checksum(body):
        raise CorruptCheckpoint(f"checkpoint '{folder}': {STATE} is not the file that was written")
    files = body.pop("files")
    del body["schema"]
    state = State(**body)
    if _NAME.fullmatch(folder.name) and folder.name != folder_name(state.step):
        raise CorruptCheckpoint(f"checkpoint '{folder}' is that of step {state.step}, under another name")
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


def restore(folder: Path, replicas: list[Replica], updates: int) -> None:
    """Load masters and moments after `updates` updates into every replica.

    Raises CorruptCheckpoint if names or shapes differ.
    """
    from safetensors.torch import load_file

    masters, moments = load_masters(folder), load_file(folder / MOMENTS)
    first = {name.removeprefix("first."): t for name, t in moments.items() if name.startswith("first.")}
    second = {name.removeprefix("second."): t for name, t in moments.items() if name.startswith("second.")}
    for stored in (masters, first, second):
        expected = {name: tensor.shape for name, tensor in replicas[0].masters.items()}
        if {name: tensor.shape for name, tensor in stored.items()} != expected:
            raise CorruptCheckpoint(f"checkpoint '{folder}' holds tensors of another drafter")
    for replica in replicas:
        replica.load_state(masters, first, second, updates)


def _moments(replica: Replica) -> Iterator[tuple[str, str, torch.Tensor]]:
    for kind, tensors in (("first", replica.first), ("second", replica.second)):
        for name, tensor in tensors.items():
            yield kind, name, tensor


def state_text(body: Mapping[str, Any]) -> str:
    """The text of a `state.json` that says `body`, with a checksum that fits."""
    sealed = {name: value for name, value in body.items() if name != "checksum"}
    return json.dumps({**sealed, "checksum": _checksum(sealed)}, indent=1, sort_keys=True)


def _checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of all that `state.json` says, however it is laid out."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _hidden(folder: Path, prefix: str) -> Path:
    return folder.with_name(prefix + folder.name)


def _discard(folder: Path) -> None:
    """Hide first, so that a kill during the removal leaves no half checkpoint in sight."""
    hidden = _hidden(folder, DISCARDED)
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
