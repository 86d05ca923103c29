"""`dflash-aot verify` on damaged or outdated artifacts: what it names, what to run, its exit code."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aot.cli import cli
from aot.console import run
from aot.store import Store
from tests.support.tiny_run import LARGE, REPOSITORY, TinyRun

Edit = Callable[[str], str]
OK, CORRUPT, UNCHECKED, STALE = 0, 1, 4, 8


@pytest.fixture
def store(tiny: TinyRun, tmp_path: Path) -> Store:
    """A copy that a test may damage, without artifacts of older sources that the shared store may hold."""
    shutil.copytree(tiny.store, tmp_path / "store", ignore=shutil.ignore_patterns("build", "tmp"))
    store = Store(tmp_path / "store")
    for program in ("train_step", "eval_step"):
        [*older, _] = by_age(store, program)
        for path in older:
            path.unlink()
    return store


def verify(tiny: TinyRun, store: Store) -> int:
    return run(cli, "dflash-aot", ["verify", tiny.run_file, "--buckets", LARGE, "--store", str(store.root)])


def by_age(store: Store, program: str) -> list[Path]:
    """The manifests of LARGE, oldest first."""
    folder = store.manifest_root / program / LARGE
    return sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)


def flip_a_byte(store: Store) -> None:
    blob = store.blob_path(store.read_manifest(by_age(store, "train_step")[-1]))
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)


def truncate(store: Store) -> None:
    blob = store.blob_path(store.read_manifest(by_age(store, "train_step")[-1]))
    os.truncate(blob, blob.stat().st_size - 1)


def edit_the_manifest(store: Store) -> None:
    path = by_age(store, "train_step")[-1]
    edited = path.read_text().replace('"block_size":8', '"block_size":4')
    assert edited != path.read_text()
    path.write_text(edited)


def omit_the_eval_step(store: Store) -> None:
    shutil.rmtree(store.manifest_root / "eval_step")


DAMAGE: dict[str, tuple[Callable[[Store], None], int, str]] = {
    "a flipped byte": (flip_a_byte, CORRUPT, rf"train_step {LARGE}.*bytes +corrupt"),
    "a truncated file": (truncate, CORRUPT, rf"train_step {LARGE}.*bytes +corrupt"),
    "an edited manifest": (edit_the_manifest, CORRUPT, rf"train_step/{LARGE}/\w+ +bytes +corrupt"),
    "an omitted eval bucket": (
        omit_the_eval_step,
        UNCHECKED,
        r"eval_step 256x32 .*unchecked +no artifact",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_names_the_artifact_and_the_command(
    damage: str, tiny: TinyRun, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    inflict, code, line = DAMAGE[damage]
    assert verify(tiny, store) == OK
    capsys.readouterr()
    inflict(store)
    assert verify(tiny, store) == code
    said = capsys.readouterr()
    assert re.search(line, said.out), said.out
    assert f"hint: `dflash-aot build {tiny.run_file} --buckets {LARGE}" in said.err


def test_names_another_torch_commit(
    tiny: TinyRun, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "git_version", "f" * 40)
    assert verify(tiny, store) == STALE
    said = capsys.readouterr()
    assert re.search(r"env +stale +.*torch_git.*f{40}", said.out), said.out
    assert f"hint: `dflash-aot build {tiny.run_file} --buckets {LARGE}" in said.err


def verify_with_model_edited(
    tiny: TinyRun, folder: Path, edit: Callable[[str], str]
) -> tuple[int, dict, str]:
    """Run the command from a copy of the packages whose dflash/drafter/model.py is edited."""
    for package in ("aot", "dflash"):
        shutil.copytree(REPOSITORY / package, folder / package)
    path = folder / "dflash" / "drafter" / "model.py"
    before = path.read_text()
    path.write_text(edit(before))
    assert path.read_text() != before
    arguments = ["verify", tiny.run_file, "--buckets", LARGE, "--store", str(tiny.store), "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "aot.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    return result.returncode, json.loads(result.stdout), result.stderr


def test_names_a_changed_source_file(tiny: TinyRun, tmp_path: Path) -> None:
    code, report, errors = verify_with_model_edited(tiny, tmp_path, lambda text: f"{text}\nUNUSED = 1\n")
    assert code == report["exit_code"] == STALE, errors
    stale = [check for check in report["checks"] if check["status"] == "stale"]
    assert {check["level"] for check in stale} == {"source"}
    assert all("dflash/drafter/model.py" in check["detail"] for check in stale)
    assert all("dflash-aot build" in check["command"] for check in stale)


def test_a_comment_and_a_docstring_invalidate_nothing(tiny: TinyRun, tmp_path: Path) -> None:
    def edit(text: str) -> str:
        assert text.startswith('"""')
        return '"""Other words' + text[3:] + "\n# A comment.\n"

    code, report, errors = verify_with_model_edited(tiny, tmp_path, edit)
    assert code == OK, errors
    assert {check["status"] for check in report["checks"]} == {"ok"}
