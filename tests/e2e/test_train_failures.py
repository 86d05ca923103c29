"""What goes wrong beside the training itself: workers that hang, wandb that is absent, slow or broken."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from aot.errors import EXIT_FAILED, EXIT_OK
from dflash.train import checkpoint, metrics
from tests.support.import_hooks import write_sitecustomize
from tests.support.tiny_run import TinyRun
from tests.support.training import finish, rows, start, train_here

WANDB = ("output.wandb_project=tiny", "train.max_steps=3")

# Worker 0 fails in step 4 while worker 1 is deep in a call that does not come back.
HANG_AND_FAIL = """
def change(module):
    import time
    original = module.DrafterWorker._micro_batch
    def changed(self, delivery, result):
        if delivery.item.step == 4 and self.index == 1:
            time.sleep(600)
        if delivery.item.step == 4 and self.index == 0:
            time.sleep(0.2)
            print("FAILED AT", time.time(), flush=True)
            raise ValueError("planted")
        original(self, delivery, result)
    module.DrafterWorker._micro_batch = changed
import_hooks.after_import("dflash.train.drafter_worker", change)
"""


def test_a_worker_that_hangs_does_not_keep_a_failed_run_alive(tiny: TinyRun, tmp_path: Path) -> None:
    hooks = write_sitecustomize(tmp_path / "hooks", HANG_AND_FAIL)
    process = start(tiny, tmp_path / "out", "--set", "output.checkpoint_every=2", PYTHONPATH=hooks)
    failed_at = float(process.stdout.readline().split()[-1])
    code, said = finish(process)
    assert time.time() - failed_at < 3, "a second to stop, and the rest for the interpreter to end"
    assert code == EXIT_FAILED
    assert "error: drafter worker 0 (cpu) failed at train_step of step 4" in said
    assert "ValueError: planted" in said
    folder, state = checkpoint.latest(tmp_path / "out")
    assert state.step == 2
    assert f"hint: `--resume` goes on from {folder}" in said


class Wandb:
    """Stands in for the wandb module: a run that records, or misbehaves."""

    class Error(Exception):
        pass

    def __init__(self, key: bool = False, init_fails: tuple[str, ...] = (), log_hangs: bool = False):
        self.logged: list[dict] = []
        self.modes: list[str] = []
        self.finished = False
        self.release = threading.Event()
        self._key, self._init_fails, self._log_hangs = key, init_fails, log_hangs

    def Settings(self, **_):
        return None

    def login(self, prompt: bool) -> bool:
        assert not prompt, "training must not ask"
        return self._key

    def init(self, mode: str, **_):
        self.modes.append(mode)
        if mode in self._init_fails:
            raise self.Error("no network")
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, row):
        if self._log_hangs:
            self.release.wait(60)
        self.logged.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch):
    """Install a stand-in; `wandb(...)` makes it."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(metrics, "WANDB_PATIENCE_S", 0.5)
    made: list[Wandb] = []

    def install(**behaviour) -> Wandb:
        made.append(Wandb(**behaviour))
        monkeypatch.setitem(sys.modules, "wandb", made[-1])
        return made[-1]

    yield install
    for fake in made:
        fake.release.set()


def test_without_a_key_wandb_runs_offline_and_gets_every_row(wandb, tiny: TinyRun, tmp_path: Path) -> None:
    fake = wandb()
    assert train_here(tiny, tmp_path / "out", *WANDB) == EXIT_OK
    assert fake.modes == ["offline"]
    assert [row["step"] for row in fake.logged] == [1, 2, 3, 3]
    assert fake.logged[0]["train/loss"] == rows(tmp_path / "out", "train")[0]["loss"]
    assert fake.logged[3]["eval/loss"] == rows(tmp_path / "out", "eval")[0]["loss"]
    assert fake.finished


FAULTS = {
    "cannot go online": ({"key": True, "init_fails": ("online",)}, "writing an offline run"),
    "cannot start at all": ({"init_fails": ("offline",)}, "wandb stopped: no network"),
    "hangs": ({"log_hangs": True}, None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wandb_never_fails_or_holds_up_a_run_when_it(
    fault: str, wandb, tiny: TinyRun, tmp_path: Path, monkeypatch, capsys
) -> None:
    behaviour, told = FAULTS[fault]
    monkeypatch.setattr(metrics, "WANDB_QUEUE", 2)
    wandb(**behaviour)
    assert train_here(tiny, tmp_path / "out", *WANDB) == EXIT_OK
    assert len(rows(tmp_path / "out")) == 4
    assert (told or "rows dropped") in capsys.readouterr().err


def test_a_run_ends_well_without_wandb_installed(tiny: TinyRun, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train_here(tiny, tmp_path / "out", *WANDB) == EXIT_OK
    assert "wandb stopped" in capsys.readouterr().err
    assert len(rows(tmp_path / "out")) == 4


def test_the_real_wandb_offline(tiny: TinyRun, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    settings = [part for text in WANDB for part in ("--set", text)]
    variables = {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    code, said = finish(start(tiny, tmp_path / "out", *settings, **variables))
    assert code == EXIT_OK, said
    assert "wandb stopped" not in said
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*"))
