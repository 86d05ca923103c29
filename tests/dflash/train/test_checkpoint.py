"""Checkpoints appear whole or not at all, say what is wrong with them, and restore to the bit."""

import contextlib
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from aot.errors import ConfigError
from dflash.config import TrainConfig
from dflash.train import checkpoint
from dflash.train.optimizer import ANCHORS, Replica

SHAPES = {"fc.weight": (4, 8), "norm.weight": (4,)}
EXTRA = {"environment.json": "{}", "run.toml": "name = 'x'\n"}


def replica(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made = Replica(weights, dtype, torch.device("cpu"))
    grads = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made.step({**grads, ANCHORS: torch.ones(1)}, 1e-3, TrainConfig())
    return made


def state(step):
    return checkpoint.State(step, step, 100, "plan", "data", "target", {"name": "x"}, {"skipped_steps": 1})


def save(output, step, keep_last=3, seed=None):
    made = replica(step if seed is None else seed)
    return checkpoint.save(output, state(step), made, EXTRA, keep_last)


def snapshot(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same(a, b):
    pairs = ((a.masters, b.masters), (a.first, b.first), (a.second, b.second), (a.params, b.params))
    return all(torch.equal(x[name], y[name]) for x, y in pairs for name in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_was_saved_is_restored_to_the_bit(tmp_path, dtype):
    saved, fresh = replica(1, dtype), replica(2, dtype)
    folder = checkpoint.save(tmp_path, state(7), saved, EXTRA, 3)
    assert not same(saved, fresh)
    checkpoint.restore(folder, [fresh], 4)
    assert fresh.updates == 4
    assert same(saved, fresh)
    assert checkpoint.latest(tmp_path) == (folder, state(7))
    assert (folder / "run.toml").read_text() == EXTRA["run.toml"]


def test_two_saves_of_one_state_are_byte_identical(tmp_path):
    first, second = save(tmp_path / "a", 5), save(tmp_path / "b", 5)
    assert snapshot(first) == snapshot(second)


def test_only_the_last_ones_are_kept_by_number(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep_last=2)
    assert [folder.name for folder in checkpoint.folders(tmp_path)] == ["step-00000010", "step-00000011"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_a_whole_checkpoint_is_never_overwritten_and_a_damaged_one_is_replaced(tmp_path):
    folder = save(tmp_path, 5, seed=1)
    before = snapshot(folder)
    assert save(tmp_path, 5, seed=2) == folder
    assert snapshot(folder) == before
    (folder / checkpoint.MOMENTS).write_bytes(b"short")
    save(tmp_path, 5, seed=1)
    assert snapshot(folder) == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped weights": lambda f: flip(f / checkpoint.MASTERS),
    "truncated moments": lambda f: os.truncate(f / checkpoint.MOMENTS, 10),
    "missing weights": lambda f: (f / checkpoint.MASTERS).unlink(),
    "missing state": lambda f: (f / checkpoint.STATE).unlink(),
    "state is no JSON": lambda f: (f / checkpoint.STATE).write_text("{"),
    "state is a list": lambda f: (f / checkpoint.STATE).write_text("[]"),
    "changed run file": lambda f: (f / "run.toml").write_text("name = 'y'\n"),
    "weights not listed": lambda f: edit(f, lambda body: body["files"].pop(checkpoint.MASTERS), seal=True),
    "an earlier step": lambda f: edit(f, lambda body: body.update(step=3)),
    "a step that is no number": lambda f: edit(f, lambda body: body.update(step="abc")),
    "a later end": lambda f: edit(f, lambda body: body.update(total_steps=99)),
    "no updates": lambda f: edit(f, lambda body: body.update(updates=None)),
    "counters are a number": lambda f: edit(f, lambda body: body.update(counters=3)),
    "files are a number": lambda f: edit(f, lambda body: body.update(files=3)),
    "no checksum": lambda f: edit(f, lambda body: body.pop("checksum")),
    "another checkpoint's state": lambda f: edit(f, lambda body: body.update(step=5), seal=True),
}


def edit(folder, change, seal=False):
    """Change the state; `seal` gives it a checksum that fits."""
    path = folder / checkpoint.STATE
    body = json.loads(path.read_text())
    change(body)
    path.write_text(checkpoint.state_text(body) if seal else json.dumps(body))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(tmp_path, damage, capsys):
    older, newer = save(tmp_path, 5), save(tmp_path, 6)
    DAMAGE[damage](newer)
    with pytest.raises(checkpoint.CorruptCheckpoint, match="step-00000006") as caught:
        checkpoint.read_state(newer)
    assert caught.value.hint == checkpoint.DAMAGED_HINT
    assert checkpoint.latest(tmp_path)[0] == older
    assert "step-00000006" in capsys.readouterr().err


def test_damaged_checkpoints_do_not_push_a_good_one_out(tmp_path):
    """Counting folders instead of whole checkpoints deletes step 4, the only other one to resume from."""
    for step in (4, 5, 6):
        save(tmp_path, step)
    for step in (5, 6):
        flip(tmp_path / "checkpoints" / checkpoint.folder_name(step) / checkpoint.MASTERS)
    save(tmp_path, 7, keep_last=2)
    assert checkpoint.read_state(tmp_path / "checkpoints" / checkpoint.folder_name(4)) == state(4)
    save(tmp_path, 8, keep_last=2)
    assert [folder.name for folder in checkpoint.folders(tmp_path)] == ["step-00000007", "step-00000008"]


def test_the_sweep_touches_our_own_names_only(tmp_path):
    """Removing every hidden name takes the user's folder, and ends in NotADirectoryError at a file."""
    folder = save(tmp_path, 5).parent
    theirs = {".gitignore", ".notes", ".draft-notes", ".draft-step-00000009"}
    for name in (".notes", ".draft-notes", ".draft-step-00000006", ".discarded-step-00000004"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    for name in (".gitignore", ".draft-step-00000009"):
        (folder / name).touch()
    checkpoint.sweep(tmp_path)
    assert {path.name for path in folder.iterdir()} == {*theirs, "step-00000005"}


def test_a_file_under_a_checkpoints_name_is_no_checkpoint(tmp_path):
    """Without the look at what it is, pruning it ends in NotADirectoryError."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001").touch()
    for step in (5, 6, 7):
        save(tmp_path, step, keep_last=2)
    assert len(checkpoint.folders(tmp_path)) == 2


@pytest.fixture
def small_files():
    """No file of this process may grow beyond a few bytes: the system refuses as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextlib.contextmanager
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limited


def test_a_checkpoint_that_does_not_fit_is_told_with_the_one_to_go_on_from(tmp_path, small_files):
    """Uncaught, safetensors' own error is a traceback and the draft stays, filling the disk."""
    folder = save(tmp_path, 5)
    with small_files(), pytest.raises(checkpoint.UnwrittenCheckpoint, match="step-00000006") as caught:
        save(tmp_path, 6)
    assert str(folder) in caught.value.hint
    assert list(folder.parent.iterdir()) == [folder]


def test_a_checkpoint_of_another_version_is_refused_with_what_to_do(tmp_path):
    """Without the hint the user knows what is wrong, but not what to do."""
    folder = save(tmp_path, 5)
    edit(folder, lambda body: body.update(schema=1))
    with pytest.raises(ConfigError, match="schema 1") as caught:
        checkpoint.read_state(folder)
    assert "--output" in caught.value.hint


def test_a_checkpoint_is_named_by_its_folder_or_by_its_run(tmp_path):
    older, newer = save(tmp_path, 5), save(tmp_path, 6)
    assert checkpoint.resolve(older)[1].step == 5
    assert checkpoint.resolve(tmp_path) == (newer, state(6))
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        checkpoint.resolve(tmp_path / "nowhere")


def test_tensors_of_another_drafter_are_refused(tmp_path):
    folder = save(tmp_path, 5)
    other = Replica({"fc.weight": torch.zeros(4, 9)}, torch.float32, torch.device("cpu"))
    with pytest.raises(checkpoint.CorruptCheckpoint, match="another drafter"):
        checkpoint.restore(folder, [other], 1)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    folder = save(tmp_path, 5)
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".json", ".toml"}


OPERATIONS = ("fsync", "rename", "mkdir", "rmdir", "unlink", "open", "replace")


def run_and_die_at(operation_number, body):
    """Fork, SIGKILL the child at its n-th call that changes a folder; return True if it died."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def counted(original):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count == operation_number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        for name in OPERATIONS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            body()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_kill_at_any_point_leaves_whole_checkpoints_only_and_at_least_the_one_before(tmp_path):
    """Save step 6 over steps 4 and 5 with pruning, killed at the n-th operation for every n."""
    made = {step: replica(step) for step in (4, 5, 6)}
    number, died = 0, True
    while died:
        number += 1
        output = tmp_path / str(number)
        for step in (4, 5):
            checkpoint.save(output, state(step), made[step], EXTRA, 2)
        died = run_and_die_at(
            number, lambda output=output: checkpoint.save(output, state(6), made[6], EXTRA, 2)
        )
        for folder in checkpoint.folders(output):
            checkpoint.read_state(folder)
        assert checkpoint.latest(output)[1].step in ((5, 6) if died else (6,))
        assert len(checkpoint.folders(output)) >= 2
        checkpoint.sweep(output)
        checkpoint.save(output, state(6), made[6], EXTRA, 2)
        assert [folder.name for folder in checkpoint.folders(output)] == ["step-00000005", "step-00000006"]
    assert number > 15
