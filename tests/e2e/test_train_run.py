"""A whole run: what it reports and stores, how it stops, and that a resumed one ends with the same bits."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from aot.errors import EXIT_OK, EXIT_RESUMABLE, ConfigError
from aot.lockfile import read_lock
from dflash.config import load_config
from dflash.train import checkpoint, drafter_worker, run, target_worker
from dflash.train.plan import TRAIN
from tests.support.training import final_bytes, finish, rows, start, tiny_config, train_here, wait_for_step

LONG = ("--set", "train.epochs=4", "--set", "output.checkpoint_every=4")


def test_a_run_reports_every_step_and_stores_all_it_takes_to_repeat_it(tiny, tmp_path, capsys):
    output = tmp_path / "out"
    assert train_here(tiny, output, "eval.eval_every=5", "output.checkpoint_every=5") == EXIT_OK
    assert [row["step"] for row in rows(output, "train")] == list(range(1, 13))
    assert [row["step"] for row in rows(output, "eval")] == [5, 10, 12]
    last = rows(output, "train")[-1]
    assert last["loss"] == pytest.approx(
        0.85 * last["ce"] + 0.15 * 4 * last["kl"] + 0.1 * last["cap"], rel=1e-5
    )
    assert last["anchors"] > 0
    assert 1 <= last["accept_length"] <= 8
    assert len(last["slot_accuracy"]) == 7
    said = capsys.readouterr().err
    for part in ("step 12/12", "Ktok/s", "pad ", "wait ", "eta ", "eval at step 12", "3 drafter workers"):
        assert part in said

    folders = checkpoint.folders(output)
    assert [folder.name for folder in folders] == ["step-00000005", "step-00000010", "step-00000012"]
    lock = read_lock(folders[-1] / "artifacts.lock")
    assert {f"{program} {bucket}" for program, bucket in lock} == {
        "eval_step 256x32", "train_step 128x16", "train_step 256x32"
    }  # fmt: skip
    assert lock == read_lock(output / "artifacts.lock") == read_lock(tiny.lock)
    environment = json.loads((folders[-1] / "environment.json").read_text())
    assert environment["key"]["torch_git"] == torch.version.git_version
    assert len(environment["packages"]["torch"]["record"]) == 64
    assert len(environment["target"]["hash"]) == len(environment["tokenizer"]["hash"]) == 64
    expected = tiny_config(tiny, output, "eval.eval_every=5", "output.checkpoint_every=5")
    for folder in (output, folders[-1]):
        assert load_config(str(folder / "run.toml")) == expected
        assert (folder / "command.txt").read_text() == "dflash train\n"


def test_a_longer_run_learns(tiny, tmp_path):
    output = tmp_path / "out"
    train_here(tiny, output, "train.epochs=8", "train.lr=5e-3")
    losses = [row["token_ce"] for row in rows(output, "train")]
    assert sum(losses[-6:]) < sum(losses[:6]) - 6 * 0.3


def test_killed_and_resumed_equals_uninterrupted_to_the_bit(tiny, tmp_path):
    """SIGKILL in the middle, a last checkpoint some steps back, every process fresh."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    uninterrupted = start(tiny, whole, *LONG)
    process = start(tiny, broken, *LONG)
    wait_for_step(process, broken, 10)
    process.kill()
    process.communicate()
    assert finish(uninterrupted)[0] == EXIT_OK
    resumed_from = checkpoint.latest(broken)[1].step
    assert 0 < resumed_from < 24
    code, said = finish(start(tiny, broken, *LONG, "--resume"))
    assert code == EXIT_OK, said
    assert f"resuming after step {resumed_from}" in said
    assert final_bytes(broken) == final_bytes(whole)
    timing = {"seconds", "ktok_per_s", "drafter_wait_s", "drafter_busy", "target_wait_s"}
    kept, expected = (
        [{key: value for key, value in row.items() if key not in timing} for row in rows(output)]
        for output in (broken, whole)
    )
    assert kept == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_stops_at_a_step_boundary_with_a_checkpoint_and_code_75(tiny, tmp_path, number):
    output = tmp_path / "out"
    process = start(tiny, output, "--set", "train.epochs=200", "--set", "eval.eval_every=3")
    wait_for_step(process, output, 4)
    process.send_signal(number)
    code, said = finish(process, 20)
    assert code == EXIT_RESUMABLE, said
    assert "--resume" in said
    assert checkpoint.latest(output)[1].step == rows(output, "train")[-1]["step"]


def test_a_second_signal_ends_the_process_at_once(tiny, tmp_path):
    output = tmp_path / "out"
    process = start(tiny, output, "--set", "train.epochs=200")
    wait_for_step(process, output, 2)
    process.send_signal(signal.SIGSTOP)
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    code, _ = finish(process, 20)
    assert code in (-signal.SIGTERM, -signal.SIGINT)


def test_an_interrupted_evaluation_is_repeated_by_the_run_that_resumes(tiny, tmp_path, monkeypatch):
    """Stop while the held-out round after the last step is under way; then resume and compare."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_here(tiny, whole)
    original = drafter_worker.DrafterWorker._micro_batch
    entered, interrupts = threading.Event(), []

    def slow(self, delivery, result):
        if delivery.item.program != TRAIN:
            entered.set()
            interrupts[0].requested = True
            time.sleep(1.2)
        original(self, delivery, result)

    class Recorded(run.Interrupts):
        def __init__(self):
            super().__init__()
            interrupts.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(drafter_worker.DrafterWorker, "_micro_batch", slow)
        patch.setattr(run, "Interrupts", Recorded)
        assert train_here(tiny, broken) == EXIT_RESUMABLE
    assert entered.is_set()
    assert rows(broken, "eval") == []
    assert train_here(tiny, broken, resume=True) == EXIT_OK
    assert final_bytes(broken) == final_bytes(whole)
    assert rows(broken, "eval")[0]["loss"] == rows(whole, "eval")[0]["loss"]


def raising(original, when):
    """The method, but raising when `when(self, item)`."""

    def wrapped(self, first, *rest):
        item = getattr(first, "item", first)
        if when(self, item):
            raised.append(time.monotonic())
            raise FileNotFoundError("planted")
        return original(self, first, *rest)

    raised = []
    return wrapped, raised


FAULTS = {
    "target worker 1": (target_worker.TargetWorker, "_features", "train_step of step 7"),
    "drafter worker 2": (drafter_worker.DrafterWorker, "_micro_batch", "train_step of step 7"),
    "drafter worker 0": (drafter_worker.DrafterWorker, "_micro_batch", "eval_step of step 12"),
}


@pytest.mark.parametrize("worker", FAULTS)
def test_a_failing_worker_is_named_and_stops_the_run_within_a_second(tiny, tmp_path, monkeypatch, worker):
    owner, method, place = FAULTS[worker]
    output = tmp_path / "out"
    wrapped, raised = raising(
        getattr(owner, method),
        lambda self, item: self.name.startswith(worker) and str(item).startswith(place),
    )
    monkeypatch.setattr(owner, method, wrapped)
    # Other tests may have left threads of their own.
    before = set(threading.enumerate())
    with pytest.raises(run.RunFailed, match=f"{worker}.*{place}.*FileNotFoundError: planted") as caught:
        train_here(tiny, output, "output.checkpoint_every=2")
    assert time.monotonic() - raised[0] < 1.5
    assert caught.value.exit_code == 1
    folder, state = checkpoint.latest(output)
    assert state.step == rows(output, "train")[-1]["step"] - (rows(output, "train")[-1]["step"] % 2)
    assert str(folder) in caught.value.hint
    assert set(threading.enumerate()) <= before


def test_a_worker_that_cannot_load_its_artifact_is_named(tiny, tmp_path, monkeypatch):
    def broken(self, device):
        raise RuntimeError("planted")

    monkeypatch.setattr("aot.runtime.PreparedArtifact.load", broken)
    with pytest.raises(run.RunFailed, match=r"drafter worker \d \(cpu\) failed at loading artifacts"):
        train_here(tiny, tmp_path / "out")


def test_a_stall_ends_the_run_and_says_who_was_busy_with_what(tiny, tmp_path, monkeypatch):
    release = threading.Event()

    def hang(self, delivery, result):
        release.wait(30)

    monkeypatch.setattr(drafter_worker.DrafterWorker, "_micro_batch", hang)
    with pytest.raises(run.RunFailed, match=r"nothing has moved for 1\.5 s .*drafter worker 0.*step 1"):
        train_here(tiny, tmp_path / "out", "topology.stall_timeout_s=1.5")
    release.set()


def poison(monkeypatch, when):
    """Make the features of chosen items NaN."""
    original = target_worker.TargetWorker._features

    def wrapped(self, item):
        packed, features = original(self, item)
        if when(item):
            features["features"].fill_(float("nan"))
        return packed, features

    monkeypatch.setattr(target_worker.TargetWorker, "_features", wrapped)


def test_a_micro_batch_that_is_not_finite_is_dropped_and_counted(tiny, tmp_path, monkeypatch):
    poison(monkeypatch, lambda item: item.program == TRAIN and item.step == 3 and item.index == 1)
    output = tmp_path / "out"
    assert train_here(tiny, output) == EXIT_OK
    assert [row["dropped_micro_batches"] for row in rows(output, "train")] == [0, 0] + [1] * 10
    assert rows(output, "train")[-1]["skipped_steps"] == 0
    masters = load_file(checkpoint.folders(output)[-1] / checkpoint.MASTERS)
    assert all(tensor.isfinite().all() for tensor in masters.values())


def test_a_step_without_a_finite_micro_batch_changes_no_byte(tiny, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, lambda item: item.program == TRAIN and item.step == 2)
    output = tmp_path / "out"
    train_here(tiny, output, "train.max_steps=3", "output.checkpoint_every=1")
    first, second, third = checkpoint.folders(output)
    for name in (checkpoint.MASTERS, checkpoint.MOMENTS):
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert (second / name).read_bytes() != (third / name).read_bytes()
    assert checkpoint.read_state(third).counters["skipped_steps"] == 1
    assert checkpoint.read_state(third).updates == 2
    assert "1 skipped steps" in capsys.readouterr().err


def test_a_gradient_norm_that_is_not_finite_skips_the_update(tiny, tmp_path, monkeypatch):
    """Each micro-batch is finite, their sum overflows float32."""
    original = drafter_worker.DrafterWorker._micro_batch

    def huge(self, delivery, result):
        original(self, delivery, result)
        if delivery.item.step == 2:
            for gradient in self.gradients.values():
                gradient.fill_(3e38)

    monkeypatch.setattr(drafter_worker.DrafterWorker, "_micro_batch", huge)
    output = tmp_path / "out"
    train_here(tiny, output, "train.max_steps=2", "output.checkpoint_every=1")
    first, second = checkpoint.folders(output)
    assert (first / checkpoint.MASTERS).read_bytes() == (second / checkpoint.MASTERS).read_bytes()
    assert rows(output, "train")[-1]["skipped_steps"] == 1
    assert rows(output, "train")[-1]["grad_norm"] is None


@pytest.fixture(scope="module")
def interrupted(tiny, tmp_path_factory):
    """A run of 12 steps whose checkpoints at 4 and 8 stand and whose later ones are gone."""
    output = tmp_path_factory.mktemp("interrupted") / "out"
    train_here(tiny, output, "output.checkpoint_every=4")
    whole = final_bytes(output)
    checkpoint._discard(checkpoint.folders(output)[-1])
    return output, whole


REFUSED = {
    "train.lr=1e-4": "train.lr: 0.002 then, 0.0001 now",
    "drafter.mask_token_id=4": "drafter.mask_token_id: 5 then, 4 now",
    "train.seed=1": "train.seed: 0 then, 1 now",
    "train.max_steps=10": "train.max_steps: None then, 10 now",
    "train.grad_accum=2": "micro-batches of a step",
    'topology.drafter_devices=["cpu"]': "micro-batches of a step",
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_resume_that_would_be_another_run_is_refused_naming_the_change(tiny, interrupted, change):
    with pytest.raises(ConfigError, match=REFUSED[change].replace("[", r"\[")) as caught:
        train_here(tiny, interrupted[0], change, resume=True)
    assert "run.toml" in caught.value.hint


def test_other_data_or_another_target_is_refused_on_resume(tiny, interrupted, monkeypatch):
    data = f'data.train="{tiny.root}/data/eval"'
    with pytest.raises(ConfigError, match="are not those of the checkpoint"):
        train_here(tiny, interrupted[0], data, resume=True)
    monkeypatch.setattr("dflash.target.huggingface.HuggingFaceTarget.model_hash", "0" * 64)
    with pytest.raises(ConfigError, match="the target's weights are not those"):
        train_here(tiny, interrupted[0], resume=True)


def test_other_devices_with_the_same_step_resume_to_the_same_bits(tiny, interrupted, tmp_path):
    """Three drafters once, then the same three again with other target workers and queue depth."""
    output = tmp_path / "out"
    shutil.copytree(interrupted[0], output)
    changes = ('topology.target_devices=["cpu"]', "topology.queue_depth=1")
    assert train_here(tiny, output, *changes, resume=True) == EXIT_OK
    assert final_bytes(output) == interrupted[1]


def test_a_damaged_last_checkpoint_is_passed_over(tiny, interrupted, tmp_path, capsys):
    output = tmp_path / "out"
    shutil.copytree(interrupted[0], output)
    (checkpoint.folders(output)[-1] / checkpoint.MASTERS).write_bytes(b"torn")
    assert train_here(tiny, output, resume=True) == EXIT_OK
    assert "step-00000008': masters.safetensors is not the file" in capsys.readouterr().err
    assert final_bytes(output) == interrupted[1]


def test_a_run_does_not_start_over_checkpoints_nor_beside_another_trainer(tiny, interrupted, tmp_path):
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run") as caught:
        train_here(tiny, interrupted[0])
    assert "--resume" in caught.value.hint
    with (
        run.locked(tmp_path),
        pytest.raises(ConfigError, match="another process is training"),
    ):
        train_here(tiny, tmp_path)


def test_resume_without_a_checkpoint_starts_and_says_so(tiny, tmp_path, capsys):
    assert train_here(tiny, tmp_path / "out", "train.max_steps=1", resume=True) == EXIT_OK
    assert "starting at step 0" in capsys.readouterr().err


def test_help_is_quick_and_imports_no_heavy_module():
    code = (
        "import sys, time; start = time.perf_counter(); from dflash.cli import cli\n"
        "heavy = {'torch', 'transformers', 'datasets', 'wandb'}\n"
        "try:\n    cli(['--help'])\n"
        "except SystemExit: pass\n"
        "print(time.perf_counter() - start, *(heavy & set(sys.modules)))"
    )
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(5)
    ]
    last_lines = [text.strip().splitlines()[-1].split() for text in said]
    assert all(len(parts) == 1 for parts in last_lines), last_lines
    assert min(float(parts[0]) for parts in last_lines) < 0.3
