"""The lock file in a run: required, kept in every checkpoint, and the same after an interruption."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from aot.buckets import Bucket
from aot.errors import EXIT_OK, ConfigError, CorruptArtifact, UntrustedArtifact
from aot.lockfile import FILE_NAME, LockedArtifact, LockMismatch, lock_text, read_lock, write_lock
from aot.policy import Policy
from aot.store import Store
from dflash.train import checkpoint, session
from dflash.train.run import train
from dflash.train.session import Invocation
from tests.support.tiny_run import LARGE
from tests.support.training import final_bytes, tiny_config, train_here

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.tiny_run import TinyRun

STOP = ("train.max_steps=2", 'data.eval=""', "output.checkpoint_every=1")


@pytest.fixture
def no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load_targets", lambda *args: pytest.fail("the target was loaded"))


def test_without_a_lock_file_nothing_starts(tiny: TinyRun, tmp_path: Path, no_target: None) -> None:
    """Fails if a run takes whatever the store offers."""
    with pytest.raises(ConfigError, match=r"lock file '.*' does not exist") as caught:
        train_here(tiny, tmp_path / "out", lock=tmp_path / FILE_NAME)
    assert f"`dflash-aot build {tiny.run_file} --buckets 128x16,256x32" in (caught.value.hint or "")


def test_a_damaged_lock_file_is_written_anew_by_a_build_of_the_whole_run(
    tiny: TinyRun, tmp_path: Path, no_target: None
) -> None:
    """Fails with `--buckets` in the hint: such a build would have to keep entries that cannot be read."""
    (tmp_path / FILE_NAME).write_text("hello")
    with pytest.raises(CorruptArtifact, match="not a lock file") as caught:
        train_here(tiny, tmp_path / "out", lock=tmp_path / FILE_NAME)
    assert f"`dflash-aot build {tiny.run_file}" in (caught.value.hint or "")
    assert "--buckets" not in (caught.value.hint or "")


def test_a_lock_file_must_name_every_artifact_of_the_run(
    tiny: TinyRun, tmp_path: Path, no_target: None
) -> None:
    lock = read_lock(tiny.lock)
    place = next(place for place in lock if place[0] == "eval_step")
    write_lock(tmp_path / FILE_NAME, {key: entry for key, entry in lock.items() if key != place})
    with pytest.raises(LockMismatch, match="eval_step 256x32: the lock file does not name it") as caught:
        train_here(tiny, tmp_path / "out", lock=tmp_path / FILE_NAME)
    assert f"`dflash-aot build {tiny.run_file} --buckets 256x32" in (caught.value.hint or "")
    write_lock(tmp_path / FILE_NAME, {**lock, place: replace(lock[place], package_digest="0" * 64)})
    with pytest.raises(LockMismatch, match=r"eval_step 256x32: .* package_digest: expected 000000000000"):
        train_here(tiny, tmp_path / "out", lock=tmp_path / FILE_NAME)


def test_the_policy_of_the_run_reaches_its_artifacts(tiny: TinyRun, tmp_path: Path, no_target: None) -> None:
    """Fails if `train` checks with a policy of its own: the flag would reach nothing."""
    invocation = Invocation(tiny.run_file, (), tiny.lock, Policy("signed", keys=tmp_path / "none"))
    with pytest.raises(UntrustedArtifact, match="it is not signed, and the policy is 'signed'"):
        train(tiny_config(tiny, tmp_path / "out"), Store(tiny.store), invocation)


@pytest.fixture(scope="module")
def stopped(tiny: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("stopped") / "out"
    assert train_here(tiny, output, *STOP) == EXIT_OK
    return output


def test_every_checkpoint_holds_the_lock_of_what_the_run_used(tiny: TinyRun, stopped: Path) -> None:
    folders = checkpoint.folders(stopped)
    assert len(folders) == 2
    # Two steps fill the large bucket only.
    place = ("train_step", Bucket.parse(LARGE))
    for folder in (stopped, *folders):
        assert read_lock(folder / FILE_NAME) == {place: read_lock(tiny.lock)[place]}


def rewrite_lock(folder: Path, change: Callable[[LockedArtifact], LockedArtifact]) -> None:
    """Give a checkpoint the lock of a run whose artifact was otherwise."""
    ((place, entry),) = read_lock(folder / FILE_NAME).items()
    text = lock_text({place: change(entry)}).encode()
    (folder / FILE_NAME).write_bytes(text)
    state = json.loads((folder / checkpoint.STATE).read_text())
    state["files"][FILE_NAME] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / checkpoint.STATE).write_text(checkpoint.state_text(state))


def another_compiler(entry: LockedArtifact) -> LockedArtifact:
    inputs = replace(entry.inputs, fingerprint=replace(entry.inputs.fingerprint, compiler="g++ 99"))
    return replace(entry, inputs=inputs, key=inputs.key())


def other_bytes(entry: LockedArtifact) -> LockedArtifact:
    return replace(entry, package_digest="0" * 64)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (another_compiler, "fingerprint.compiler: expected g++ 99, found "),
        (other_bytes, "package_digest: expected 000000000000, found "),
    ],
)
def test_resume_refuses_other_artifacts_field_by_field(
    tiny: TinyRun, stopped: Path, tmp_path: Path, no_target: None, change, field: str
) -> None:
    """Fails without `check_same_artifacts`: the run would go on with other bits and say nothing."""
    output = tmp_path / "out"
    shutil.copytree(stopped, output)
    last = checkpoint.folders(output)[-1]
    rewrite_lock(last, change)
    with pytest.raises(LockMismatch) as caught:
        train_here(tiny, output, *STOP, resume=True)
    assert f"cannot resume {last}, made with other artifacts" in caught.value.message
    assert field in caught.value.message
    assert f"dflash-aot verify --lock {last / FILE_NAME} --explain" in (caught.value.hint or "")


def test_resume_with_the_checkpoints_own_lock_goes_on(tiny: TinyRun, stopped: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(stopped, output)
    lock = checkpoint.folders(output)[-1] / FILE_NAME
    before = final_bytes(output)
    assert train_here(tiny, output, *STOP, resume=True, lock=lock) == EXIT_OK
    assert final_bytes(output) == before


def test_without_a_lock_file_eager_runs_all_of_it_and_says_so(
    tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("train.on_miss=eager", "train.max_steps=1", 'data.eval=""')
    assert train_here(tiny, tmp_path / "out", *settings, lock=tmp_path / FILE_NAME) == EXIT_OK
    said = capsys.readouterr().err
    assert "there is no lock file" in said
    assert said.count("EAGER") == 1
    assert read_lock(tmp_path / "out" / FILE_NAME) == {}
