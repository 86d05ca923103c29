"""SIGKILL at chosen places and at any time, SIGTERM, and resume: the same bits as a run left alone."""

import signal
from pathlib import Path

import pytest

from aot.errors import EXIT_OK, EXIT_RESUMABLE
from dflash.train import checkpoint
from tests.support.import_hooks import write_sitecustomize
from tests.support.tiny_run import TinyRun
from tests.support.training import final_bytes, finish, rows, start, wait_for_step

#: 12 steps of 3 micro-batches.
SETTINGS = ("--set", "output.checkpoint_every=3", "--set", "output.keep_last=2", "--set", "eval.eval_every=5")
TIMES = {"seconds", "ktok_per_s", "drafter_wait_s", "drafter_busy", "target_wait_s"}

#: Places of the run, as module:function:call; the killed process dies before that call.
KILL_POINTS = {
    "in a step": "dflash.train.drafter_worker:DrafterWorker._micro_batch:26",
    "while the target runs": "dflash.train.target_worker:TargetWorker._features:20",
    "between backward and update": "dflash.train.optimizer:Replica.step:8",
    "before a step is reported": "dflash.train.metrics:MetricsLog.write:8",
    "before the first checkpoint": "dflash.train.checkpoint:_publish:1",
    "in a checkpoint's files": "dflash.train.checkpoint:_describe:6",
    "before a checkpoint has its name": "dflash.train.checkpoint:_sync:14",
    "before an old checkpoint goes": "dflash.train.checkpoint:_discard:1",
    "in the last evaluation": "dflash.train.metrics:Sums.summary:15",
}


@pytest.fixture(scope="module")
def uninterrupted(tiny: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("uninterrupted") / "out"
    code, said = finish(start(tiny, output, *SETTINGS))
    assert code == EXIT_OK, said
    return output


def train_and_die(tiny: TinyRun, output: Path, point: str, hooks: Path, *more: str) -> None:
    """Train until the process kills itself at `point`."""
    folder = write_sitecustomize(hooks, f"import_hooks.kill_at({point!r})")
    code, said = finish(start(tiny, output, *SETTINGS, *more, PYTHONPATH=folder))
    assert code == -signal.SIGKILL, said


def resume_to_the_end(tiny: TinyRun, output: Path) -> str:
    code, said = finish(start(tiny, output, *SETTINGS, "--resume"))
    assert code == EXIT_OK, said
    return said


def assert_same(output: Path, expected: Path) -> None:
    """The same weights, moments and metrics, and nothing left lying about."""
    assert final_bytes(output) == final_bytes(expected)
    ours, theirs = (
        [{key: value for key, value in row.items() if key not in TIMES} for row in rows(folder)]
        for folder in (output, expected)
    )
    assert ours == theirs
    names = [path.name for path in checkpoint.folders(output)]
    assert names == sorted(path.name for path in (output / checkpoint.FOLDER).iterdir())


def test_killed_three_times_then_terminated_a_run_still_ends_with_the_same_bits(
    tiny: TinyRun, uninterrupted: Path, tmp_path: Path
) -> None:
    """In a step, before a checkpoint has its name, while an old one goes; and once by SIGTERM."""
    output = tmp_path / "out"
    train_and_die(tiny, output, "dflash.train.drafter_worker:DrafterWorker._micro_batch:14", tmp_path / "1")
    assert checkpoint.latest(output)[1].step == 3
    # Step 6 is its second checkpoint but has no name yet; the next one must begin at 3 again.
    train_and_die(tiny, output, "dflash.train.checkpoint:_sync:4", tmp_path / "2", "--resume")
    assert checkpoint.latest(output)[1].step == 3
    assert any(path.name.startswith(".draft") for path in (output / checkpoint.FOLDER).iterdir())
    train_and_die(tiny, output, "dflash.train.checkpoint:_discard:1", tmp_path / "3", "--resume")
    assert checkpoint.latest(output)[1].step == 9
    process = start(tiny, output, *SETTINGS, "--resume")
    wait_for_step(process, output, 10)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] in (EXIT_RESUMABLE, EXIT_OK)
    resume_to_the_end(tiny, output)
    assert_same(output, uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("place", KILL_POINTS)
def test_killed(place: str, tiny: TinyRun, uninterrupted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    train_and_die(tiny, output, KILL_POINTS[place], tmp_path / "hooks")
    resume_to_the_end(tiny, output)
    assert_same(output, uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("step", range(1, 12, 2))
def test_killed_at_any_time_after_step(step: int, tiny: TinyRun, uninterrupted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = start(tiny, output, *SETTINGS)
    wait_for_step(process, output, step)
    process.kill()
    process.communicate()
    resume_to_the_end(tiny, output)
    assert_same(output, uninterrupted)
