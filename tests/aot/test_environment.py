"""Snapshots of an environment, and what differs between two."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aot.environment import FILE_NAME, changes, packages, read_snapshot, snapshot, variables
from aot.errors import ConfigError


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return snapshot()


def test_a_snapshot_names_the_build_of_torch_and_survives_json(now: dict[str, Any]) -> None:
    assert now["key"]["torch_git"] == torch.version.git_version
    assert now["packages"]["torch"]["version"] == torch.__version__
    assert len(now["packages"]["torch"]["record"]) == 64
    assert "compiler" not in now["key"]
    assert json.loads(json.dumps(now)) == now


def test_two_snapshots_of_one_environment_are_equal(now: dict[str, Any]) -> None:
    assert changes(now, snapshot()) == []


def test_fields_that_enter_the_key_come_first(now: dict[str, Any]) -> None:
    then = copy.deepcopy(now)
    then["packages"]["aaa"] = {"version": "1", "record": "0" * 64}
    then["packages"]["torch"]["record"] = "f" * 64
    then["variables"]["CUDA_VISIBLE_DEVICES"] = "7"
    then["machine"]["driver"] = "550.54.14"
    then["key"]["torch_git"] = "0" * 40
    then["target"] = {"hash": "recorded by the trainer, not by this machine"}
    found = changes(then, now)
    assert [change.field for change in found] == [
        "key.torch_git",
        "machine.driver",
        "variables.CUDA_VISIBLE_DEVICES",
        "packages.aaa",
        "packages.torch",
    ]
    assert [change.enters_key for change in found] == [True, False, False, False, False]
    assert found[3].now is None
    # The version is the same, and the files are not.
    assert found[4].then == f"{torch.__version__} (record ffffffffffff)"


def test_a_reinstalled_package_of_the_same_version_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "toy_pkg-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: Toy_Pkg\nVersion: 1.0\n")
    (folder / "RECORD").write_text("a.py,sha256=1,1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = packages()["toy-pkg"]
    (folder / "RECORD").write_text("a.py,sha256=2,1\n")
    after = packages()["toy-pkg"]
    assert before["version"] == after["version"] == "1.0"
    assert before["record"] != after["record"]


def test_variables_hold_no_secret() -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "0",
        "LD_LIBRARY_PATH": "/x",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "HOME": "/home/me",
        "DFLASH_TRAIN__LR": "1e-3",
    }
    assert variables(environ) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "DFLASH_TRAIN__LR": "1e-3",
        "LD_LIBRARY_PATH": "/x",
        "WANDB_MODE": "offline",
    }


def checkpoint(folder: Path, glibc: str) -> Path:
    folder.mkdir(parents=True)
    (folder / FILE_NAME).write_text(json.dumps({"key": {"glibc": glibc}}))
    return folder


def test_a_checkpoint_a_run_or_a_file_can_be_named(tmp_path: Path) -> None:
    older = checkpoint(tmp_path / "run/checkpoints/step-900", "2.35")
    checkpoint(tmp_path / "run/checkpoints/step-1000", "2.36")
    assert read_snapshot(older)["key"]["glibc"] == "2.35"
    assert read_snapshot(older / FILE_NAME)["key"]["glibc"] == "2.35"
    assert read_snapshot(tmp_path / "run")["key"]["glibc"] == "2.36"


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"key": 1}'])
def test_what_is_no_snapshot_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(ConfigError, match=r"environment"):
        read_snapshot(tmp_path)
    with pytest.raises(ConfigError, match="absent"):
        read_snapshot(tmp_path / "absent")


def test_only_a_runs_own_checkpoints_are_looked_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the whole tree is searched, or if nobody is told which snapshot was taken."""
    newest = checkpoint(tmp_path / "run/checkpoints/step-2", "2.36")
    for path in (tmp_path / "run", newest.parent):
        assert read_snapshot(path)["key"]["glibc"] == "2.36"
        assert f"'{newest / FILE_NAME}'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="holds no environment"):
        read_snapshot(tmp_path)
