"""The trainer refuses to start on anything but the artifacts it was built for, and says what to run."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from aot.errors import (
    ConfigError,
    CorruptArtifact,
    EnvironmentFault,
    MissingArtifact,
    StaleArtifact,
    UserError,
)
from aot.private import PRIVATE_VARIABLE
from dflash.train import session
from tests.support.tiny_run import NEEDS, REPOSITORY
from tests.support.training import train_here


@pytest.fixture
def store(tiny, tmp_path, monkeypatch):
    """A copy that a test may damage, with private copies of its own; the target must not even be loaded."""
    shutil.copytree(tiny.store, tmp_path / "store", ignore=shutil.ignore_patterns("build", "tmp"))
    for stale in set((tmp_path / "store" / "manifests").glob("*/*/*.json")) - set(
        used_manifests(tmp_path / "store", tiny)
    ):
        stale.unlink()
    monkeypatch.setenv(PRIVATE_VARIABLE, str(tmp_path / "private"))
    monkeypatch.setattr(session, "load_targets", lambda *args: pytest.fail("the target was loaded"))
    return tmp_path / "store"


def used_manifests(root, tiny):
    """The manifests that the tiny run resolves to now; the shared store may hold those of older sources."""
    from aot.buckets import Bucket
    from aot.runtime import Fingerprints, resolve
    from aot.store import Store
    from dflash.config import load_config
    from dflash.drafter.programs import make_programs

    programs = {program.name: program for program in make_programs(load_config(tiny.run_file))}
    store, fingerprints = Store(root), Fingerprints()
    for name, bucket in NEEDS:
        manifest = resolve(store, programs[name], Bucket.parse(bucket), fingerprints("cpu"))
        yield store.manifest_path(manifest.program, manifest.bucket, manifest.key)


def only(store, program, bucket):
    [manifest] = (store / "manifests" / program / bucket).glob("*.json")
    return manifest


def blob(store, program, bucket):
    digest = json.loads(only(store, program, bucket).read_text())["blob_digest"]
    return store / "blobs" / f"{digest}.zst"


def flip_blob(store):
    path = blob(store, "train_step", "128x16")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_blob(store):
    path = blob(store, "train_step", "128x16")
    os.truncate(path, path.stat().st_size - 1)


def edit_manifest(store):
    path = only(store, "train_step", "128x16")
    text = path.read_text()
    changed = text.replace('"block_size":8', '"block_size":4')
    assert changed != text
    path.write_text(changed)


def remove_eval(store):
    shutil.rmtree(store / "manifests" / "eval_step")


FAULTS = {
    "an omitted eval bucket": (remove_eval, MissingArtifact, "eval_step 256x32"),
    "one flipped byte": (flip_blob, CorruptArtifact, r"\.zst: its bytes are not those"),
    "a truncated file": (cut_blob, CorruptArtifact, r"\.zst: \d+ bytes, published with \d+"),
    "an edited manifest": (edit_manifest, CorruptArtifact, "train_step/128x16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refuses_naming_the_artifact_and_the_command(tiny, store, tmp_path, fault):
    damage, error, name = FAULTS[fault]
    damage(store)
    with pytest.raises(error, match=name) as caught:
        train_here(tiny, tmp_path / "out", store=store)
    assert caught.value.exit_code == 1
    bucket = "256x32" if damage is remove_eval else "128x16"
    assert f"`dflash-aot build {tiny.run_file} --buckets {bucket} " in caught.value.hint
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_refuses_another_torch_commit_by_name(tiny, store, tmp_path, monkeypatch):
    built_with = torch.version.git_version
    monkeypatch.setattr(torch.version, "git_version", "f" * 40)
    with pytest.raises(
        StaleArtifact, match=f"torch_git: expected {'f' * 40}, (artifact has|found) {built_with}"
    ) as caught:
        train_here(tiny, tmp_path / "out", store=store)
    assert f"dflash-aot build {tiny.run_file} --buckets 128x16,256x32" in caught.value.hint


def test_an_empty_store_is_answered_with_one_command_for_all_buckets(tiny, tmp_path):
    with pytest.raises(MissingArtifact, match="3 of 3 artifacts") as caught:
        train_here(tiny, tmp_path / "out", store=tmp_path / "empty")
    assert f"dflash-aot build {tiny.run_file} --buckets 128x16,256x32" in caught.value.hint


def edited_project(tmp_path, edit):
    """A copy of the packages with `edit` applied to dflash/drafter/model.py, first on the path."""
    for package in ("aot", "dflash"):
        shutil.copytree(REPOSITORY / package, tmp_path / "copy" / package)
    path = tmp_path / "copy" / "dflash" / "drafter" / "model.py"
    before = path.read_text()
    path.write_text(edit(before))
    assert path.read_text() != before
    return tmp_path / "copy"


def dry_run(tiny, project, tmp_path):
    return subprocess.run(
        [
            sys.executable, "-m", "dflash.cli", "train", tiny.run_file, "--dry-run",
            "--store", str(tiny.store), "--lock", str(tiny.lock), "--output", str(tmp_path / "out"),
        ],
        capture_output=True, text=True, cwd=project, env={**os.environ, "PYTHONPATH": str(project)},
    )  # fmt: skip


def test_refuses_a_changed_source_file_by_name_without_a_traceback(tiny, tmp_path):
    project = edited_project(tmp_path, lambda text: text + "\nUNUSED = 1\n")
    result = dry_run(tiny, project, tmp_path)
    assert result.returncode == 1
    assert "dflash/drafter/model.py" in result.stderr
    assert re.search(r"\n\nhint: `dflash-aot build \S+ --lock \S+ --buckets 128x16,256x32", result.stderr), (
        result.stderr
    )
    assert "Traceback" not in result.stderr


def test_a_comment_and_a_docstring_invalidate_nothing(tiny, tmp_path):
    project = edited_project(
        tmp_path,
        lambda text: '"""Another docstring."""\n' + text[text.index('"""', 3) + 3 :] + "\n# A comment.\n",
    )
    result = dry_run(tiny, project, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "train_step 256x32" in result.stdout


CONFIG_FAULTS = {
    'data.train=""': (ConfigError, "data.train is not set"),
    'data.train="/nowhere"': (ConfigError, "/nowhere"),
    'topology.drafter_devices=["gpu"]': (ConfigError, "drafter_devices: 'gpu' is not a device"),
    'topology.target_devices=["meta"]': (ConfigError, "target_devices: 'meta' is not a device"),
    "topology.target_devices=[]": (ConfigError, "target_devices is empty"),
    'topology.drafter_devices=["cuda:64"]': (EnvironmentFault, "there is no 'cuda:64'"),
    'drafter.attention="flex"': (ConfigError, "'cpu' cannot run drafter.attention 'flex'"),
}


@pytest.mark.parametrize("change", CONFIG_FAULTS)
def test_refuses_what_cannot_be_before_it_loads_anything(tiny, store, tmp_path, change):
    error, message = CONFIG_FAULTS[change]
    with pytest.raises(error, match=message) as caught:
        train_here(tiny, tmp_path / "out", change, store=store)
    assert isinstance(caught.value, UserError)
    assert caught.value.hint


def test_refuses_a_target_that_the_drafter_does_not_fit(tiny, tmp_path):
    """The artifacts do not depend on how many layers the target has."""
    with pytest.raises(ConfigError, match=r"drafter\.num_target_layers is 5, the target has 4"):
        train_here(tiny, tmp_path / "out", "drafter.num_target_layers=5")


def test_refuses_splits_of_different_tokenizers(tiny, store, tmp_path):
    shutil.copytree(tiny.root / "data" / "eval", tmp_path / "eval")
    path = tmp_path / "eval" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "tokenizer_hash": "0" * 64}))
    with pytest.raises(ConfigError, match="different tokenizers"):
        train_here(tiny, tmp_path / "out", f'data.eval="{tmp_path / "eval"}"', store=store)


def test_on_miss_eager_runs_and_counts_itself_loudly(tiny, tmp_path, capsys):
    from tests.support.training import rows

    shutil.copytree(tiny.store, tmp_path / "store", ignore=shutil.ignore_patterns("build", "tmp"))
    remove_eval(tmp_path / "store")
    output = tmp_path / "out"
    assert train_here(tiny, output, "train.on_miss=eager", "train.max_steps=1", store=tmp_path / "store") == 0
    said = capsys.readouterr().err
    assert "eval_step 256x32" in said
    assert "EAGER" in said
    train_here(tiny, tmp_path / "compiled", "train.max_steps=1")
    eager, compiled = (rows(folder, "eval")[0]["loss"] for folder in (output, tmp_path / "compiled"))
    assert eager == pytest.approx(compiled, rel=1e-5)
