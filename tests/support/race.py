"""Calls that provably race with a thread that traces."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

# From 2.14 on the flag is thread-local: no other thread can see it.
GLOBAL_FLAG = isinstance(symbolic_trace._is_fx_tracing_flag, bool)
WAIT_S = 120.0

Tensors = Mapping[str, torch.Tensor]
MakeCall = Callable[[], Callable[[Tensors], Tensors]]


def equal(ours: Tensors, expected: Tensors) -> bool:
    return all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


@dataclass
class FreeRace:
    """Callers that only count calls made while the tracer traces, and a tracer that never waits for them.

    A caller spends its turn only while the flag is up and gives the interpreter away otherwise: a naive loop
    of calls starves the tracer and then races with nothing.
    """

    wanted_calls: int
    wanted_traces: int
    threads: int = 3
    calls: Counter[int] = field(default_factory=Counter)
    traces: int = 0
    errors: list[BaseException] = field(default_factory=list)
    tracing: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def flag(self) -> bool:
        return symbolic_trace._is_fx_tracing_flag is True if GLOBAL_FLAG else self.tracing

    def trace(self) -> None:
        def traced(x: torch.Tensor) -> torch.Tensor:
            self.tracing = True
            for _ in range(20):
                x = torch.sin(x) * 2
            self.tracing = False
            return x

        with self.recorded():
            while not self.finished():
                make_fx(traced)(torch.ones(4))
                self.traces += 1

    def call(self, index: int, make: MakeCall, mine: Tensors, expected: Tensors) -> None:
        with self.recorded():
            function = make()
            while not self.finished():
                if not self.flag():
                    time.sleep(0)
                    continue
                if self.calls[index] >= self.wanted_calls // self.threads + 1:
                    # Enough calls: wait for the traces, without being in their way.
                    time.sleep(0.001)
                    continue
                outputs = function(mine)
                self.calls[index] += 1
                assert equal(outputs, expected), f"caller {index}: other outputs than single-threaded"
                time.sleep(0)

    def finished(self) -> bool:
        enough = self.calls.total() >= self.wanted_calls and self.traces >= self.wanted_traces
        return enough or self.done.is_set()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """An exception in any thread ends the race and fails the test."""
        try:
            yield
        except BaseException as error:
            self.errors.append(error)
        finally:
            if self.errors:
                self.done.set()

    def run(self, make: MakeCall, inputs: list[Tensors], expected: list[Tensors]) -> None:
        """Race one caller per entry of `inputs`; each makes its own call, and expects its own outputs."""
        threads = [threading.Thread(target=self.trace)]
        for index, (mine, wanted) in enumerate(zip(inputs, expected, strict=True)):
            threads.append(threading.Thread(target=self.call, args=(index, make, mine, wanted)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        still_running = [thread.name for thread in threads if thread.is_alive()]
        self.done.set()
        assert not still_running, f"{self.calls.total()} calls beside {self.traces} traces after {WAIT_S} s"
