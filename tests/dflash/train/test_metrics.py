"""Sums and means, the JSONL file over a resume, and a wandb that may be slow or broken."""

import json
import sys
import threading
import time
import types

import pytest
import torch

from dflash.config import OutputConfig
from dflash.train import metrics
from dflash.train.metrics import MetricsLog, Sums, WandbSink, read_rows


def outputs(scale=1.0, anchors=4.0):
    values = {name: torch.tensor(scale) for name in ("loss", "ce", "kl", "cap")}
    slots = {"slot_ce": [2.0, 1.0], "slot_correct": [3.0, 0.0], "slot_count": [4.0, 0.0]}
    return values | {name: torch.tensor(value) for name, value in slots.items()} | {
        "anchors": torch.tensor(anchors), "accept": torch.tensor(6.0)
    }  # fmt: skip


def test_means_are_over_anchors_and_over_supervised_slots():
    summary = Sums.total([Sums.of(outputs(8.0)), Sums.of(outputs(4.0))]).summary()
    assert summary["loss"] == summary["cap"] == 12 / 8
    assert summary["accept_length"] == 12 / 8
    assert summary["token_ce"] == 6 / 8
    assert summary["slot_accuracy"] == [6 / 8, 0.0]
    assert summary["anchors"] == 8


def test_nothing_in_nothing_out():
    assert Sums.total([]).summary() == {}
    assert Sums.of(outputs(anchors=0.0)).summary() == {}


@pytest.mark.parametrize("name", ["loss", "slot_ce"])
def test_a_value_that_is_not_finite_shows(name):
    values = outputs()
    assert Sums.of(values).finite()
    values[name] = torch.full_like(values[name], float("inf"))
    assert not Sums.of(values).finite()


def row(kind, step):
    return {"kind": kind, "step": step, "loss": 1.0}


def test_a_resumed_log_drops_what_will_be_written_again(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for entry in (row("train", 1), row("eval", 1), row("train", 2), row("eval", 2), row("train", 3)):
        log.write(entry)
    log.close()
    with log.path.open("a") as file:
        file.write('{"kind": "train", "st')
    MetricsLog(tmp_path, 2).close()
    assert read_rows(log.path) == [row("train", 1), row("eval", 1), row("train", 2)]


@pytest.mark.parametrize(
    "line", [b'{"kind": "train\xff", "step": 1}', b"[1]", b'{"step": "x"}', b"[" * 100_000]
)
def test_a_damaged_line_costs_its_own_row_only(tmp_path, line):
    """Reading the file as one UTF-8 text, or taking every JSON value for a row, ends the run that resumes."""
    path = tmp_path / metrics.FILE_NAME
    path.write_bytes(line + b"\n" + json.dumps(row("train", 1)).encode() + b"\n")
    MetricsLog(tmp_path, 2).close()
    assert read_rows(path) == [row("train", 1)]


def test_values_that_json_lacks_become_null(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write({"kind": "train", "step": 1, "grad_norm": float("nan")})
    log.close()
    assert json.loads(log.path.read_text()) == {"kind": "train", "step": 1, "grad_norm": None}


class FakeWandb(types.ModuleType):
    """wandb whose `init` behaves as told."""

    class Error(Exception):
        pass

    def __init__(self, init):
        super().__init__("wandb")
        self.rows, self.modes, self.finished = [], [], False
        self.Settings = lambda **settings: settings
        self.login = lambda prompt: True
        self._init = init

    def init(self, **arguments):
        self.modes.append(arguments["mode"])
        self._init(self, arguments["mode"])
        return types.SimpleNamespace(log=self.rows.append, finish=lambda: setattr(self, "finished", True))


@pytest.fixture
def wandb(monkeypatch):
    def use(init=lambda fake, mode: None):
        fake = FakeWandb(init)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        return fake

    return use


def sink(tmp_path):
    return WandbSink(OutputConfig(wandb_project="p"), tmp_path, {})


def test_wandb_gets_every_row_under_its_kind(wandb, tmp_path):
    fake = wandb()
    to = sink(tmp_path)
    to.write(row("train", 1))
    to.write(row("eval", 1))
    to.close()
    assert fake.rows == [{"step": 1, "train/loss": 1.0}, {"step": 1, "eval/loss": 1.0}]
    assert fake.finished


def test_without_a_key_wandb_is_offline_and_the_users_mode_wins(wandb, tmp_path, monkeypatch):
    fake = wandb()
    fake.login = lambda prompt: False
    sink(tmp_path).close()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink(tmp_path).close()
    assert fake.modes == ["offline", "disabled"]


def test_a_wandb_that_cannot_go_online_goes_offline(wandb, tmp_path, capsys):
    def init(fake, mode):
        if mode == "online":
            raise fake.Error("no route")

    fake = wandb(init)
    to = sink(tmp_path)
    to.write(row("train", 1))
    to.close()
    assert fake.modes == ["online", "offline"]
    assert len(fake.rows) == 1
    assert "no route" in capsys.readouterr().err


def test_a_broken_wandb_is_told_once_and_nothing_else(wandb, tmp_path, capsys):
    def init(fake, mode):
        raise RuntimeError("broken")

    wandb(init)
    to = sink(tmp_path)
    for step in range(10):
        to.write(row("train", step))
    to.close()
    assert capsys.readouterr().err.count("wandb stopped: broken") == 1


def test_a_wandb_that_hangs_costs_rows_and_no_time(wandb, tmp_path, monkeypatch, capsys):
    hang = threading.Event()
    wandb(lambda fake, mode: hang.wait(20))
    monkeypatch.setattr(metrics, "WANDB_QUEUE", 16)
    monkeypatch.setattr(metrics, "WANDB_PATIENCE_S", 0.2)
    started = time.monotonic()
    to = sink(tmp_path)
    for step in range(2000):
        to.write(row("train", step))
    assert time.monotonic() - started < 0.5
    to.close()
    assert time.monotonic() - started < 1.0
    assert f"{2000 - 16} rows dropped" in capsys.readouterr().err
    hang.set()
