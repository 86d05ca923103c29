"""Training beside a thread that traces all the time ends with the same bits as without it."""

import sys
import threading

import torch
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from aot.errors import EXIT_OK
from dflash.train import drafter_worker
from tests.support.training import final_bytes, rows, train_here

FIFTY_STEPS = ("train.epochs=9", "train.max_steps=50")


class Tracer:
    """Runs make_fx in a loop; counts its traces and the compiled calls that began while it was tracing."""

    def __init__(self, monkeypatch):
        self.traces, self.calls_while_tracing, self.error = 0, 0, None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="tracer")
        original = drafter_worker.DrafterWorker._micro_batch

        def counted(worker, delivery, result):
            self.calls_while_tracing += bool(_symbolic_trace._is_fx_tracing_flag)
            original(worker, delivery, result)

        monkeypatch.setattr(drafter_worker.DrafterWorker, "_micro_batch", counted)

    def _loop(self):
        def function(x):
            for _ in range(40):
                x = torch.sin(x) + x
            return x

        try:
            while not self._end.is_set():
                make_fx(function, tracing_mode="fake")(torch.ones(4))
                self.traces += 1
        except BaseException as error:
            self.error = error

    def __enter__(self):
        # Without this the tracer keeps the interpreter for 5 ms at a time and the run crawls.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(2e-4)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._end.set()
        sys.setswitchinterval(self._interval)
        self._thread.join(30)


def test_fifty_steps_beside_a_tracer_end_with_the_same_bits(tiny, tmp_path, monkeypatch):
    assert train_here(tiny, tmp_path / "alone", *FIFTY_STEPS) == EXIT_OK
    with monkeypatch.context() as patch, Tracer(patch) as tracer:
        assert train_here(tiny, tmp_path / "raced", *FIFTY_STEPS) == EXIT_OK
    assert tracer.error is None, tracer.error
    assert tracer.traces > 1
    assert tracer.calls_while_tracing >= 20, "it never raced: the test proves nothing"
    assert len(rows(tmp_path / "raced", "train")) == 50
    assert final_bytes(tmp_path / "raced") == final_bytes(tmp_path / "alone")
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("alone", "raced")]
    assert losses[0] == losses[1]
