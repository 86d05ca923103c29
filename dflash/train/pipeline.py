"""Threads that hand work to each other in a fixed order, and all stop when one of them fails.

One condition variable serves the whole run: there are few threads and each exchange is milliseconds of work,
so clarity wins over fine locking. Every wait ends: by its predicate, by a stop, or by the stall timeout.

Order makes the bounded queues free of deadlock. A queue accepts position p only when p is less than `depth`
ahead of what its consumer takes next; so the producer of the lowest item not yet consumed is never blocked,
because all its earlier items are consumed and its consumer waits for exactly that item.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

WAKE_S = 0.5


class Stopped(Exception):
    """Raised inside a waiting worker when the run has been stopped; it is never an error of its own."""


class Stalled(Exception):
    """Nothing in the run has moved for longer than the stall timeout."""


@dataclass(frozen=True)
class Failure:
    """The first error of a run and the worker it happened in, with what that worker was doing."""

    worker: str
    activity: str
    error: BaseException


class Hub:
    """What the threads of one run share: the condition, the stop flag, the first failure, who does what."""

    def __init__(self, stall_timeout_s: float):
        self.condition = threading.Condition()
        self.failure: Failure | None = None
        self.stopped = False
        self.activity: dict[str, str] = {}
        self._stall_timeout_s = stall_timeout_s
        self._last_progress = time.monotonic()

    def progressed(self) -> None:
        """Wake everybody: some state has changed. Call with the condition held."""
        self._last_progress = time.monotonic()
        self.condition.notify_all()

    def does(self, worker: str, activity: str) -> None:
        """Note what `worker` is busy with, for the message of a failure or a stall."""
        self.activity[worker] = activity

    def stop(self) -> None:
        """End every wait, present and future, with Stopped."""
        with self.condition:
            self.stopped = True
            self.condition.notify_all()

    def fail(self, worker: str, error: BaseException) -> None:
        """Stop because `worker` met `error`; only the first failure is kept."""
        with self.condition:
            if self.failure is None and not self.stopped:
                self.failure = Failure(worker, self.activity.get(worker, "starting"), error)
            self.stopped = True
            self.condition.notify_all()

    def check(self) -> None:
        """Raise Stopped if the run has been stopped."""
        if self.stopped:
            raise Stopped

    def wait(self, predicate: Callable[[], bool], interrupted: Callable[[], bool] = lambda: False) -> float:
        """Wait with the condition held until `predicate` or `interrupted` is true; return the seconds waited.

        Raises Stopped once the run is stopped, Stalled when nothing has moved for the stall timeout.
        """
        started = time.monotonic()
        while not predicate():
            self.check()
            if interrupted():
                break
            if time.monotonic() - self._last_progress > self._stall_timeout_s:
                busy = "; ".join(
                    f"{worker}: {activity}" for worker, activity in sorted(self.activity.items())
                )
                raise Stalled(f"nothing has moved for {self._stall_timeout_s:g} s ({busy})")
            self.condition.wait(WAKE_S)
        return time.monotonic() - started


class OrderedQueue(Generic[T]):
    """A bounded queue that many producers fill by position and one consumer empties in order."""

    def __init__(self, hub: Hub, depth: int):
        self._hub = hub
        self._depth = depth
        self._slots: dict[int, T] = {}
        self._next = 0

    def admit(self, position: int) -> float:
        """Wait until `position` is within the depth; returns the seconds waited.

        Apart from `put`, so that a producer moves its value to the consumer's device only once there is room
        for it.
        """
        with self._hub.condition:
            return self._hub.wait(lambda: position < self._next + self._depth)

    def put(self, position: int, value: T) -> None:
        """Place the value of an admitted position."""
        with self._hub.condition:
            assert position < self._next + self._depth, f"position {position} was not admitted"
            self._slots[position] = value
            self._hub.progressed()

    def get(self) -> tuple[T, float]:
        """Take the next value in order; returns it with the seconds waited."""
        with self._hub.condition:
            waited = self._hub.wait(lambda: self._next in self._slots)
            value = self._slots.pop(self._next)
            self._next += 1
            self._hub.progressed()
            return value, waited


class RoundGate(Generic[T]):
    """Where the drafters wait between rounds while the coordinator updates the weights.

    Round r is open once r <= released. Each drafter arrives once per round with its result.
    """

    def __init__(self, hub: Hub, workers: int):
        self._hub = hub
        self._workers = workers
        self._results: dict[int, T] = {}
        self._released = -1

    def enter(self, round_index: int) -> float:
        """Wait until the coordinator opens the round."""
        with self._hub.condition:
            return self._hub.wait(lambda: round_index <= self._released)

    def arrive(self, worker: int, result: T) -> None:
        with self._hub.condition:
            assert worker not in self._results, f"drafter {worker} arrived twice"
            self._results[worker] = result
            self._hub.progressed()

    def open(self, round_index: int) -> None:
        with self._hub.condition:
            self._released = round_index
            self._hub.progressed()

    def collect(self, interrupted: Callable[[], bool] = lambda: False) -> list[T] | None:
        """Wait for all drafters; return their results in worker order, or None when interrupted first."""
        with self._hub.condition:
            self._hub.wait(lambda: len(self._results) == self._workers, interrupted)
            if len(self._results) < self._workers:
                return None
            results = [self._results[worker] for worker in range(self._workers)]
            self._results.clear()
            return results


class WorkerThread(threading.Thread):
    """A daemon thread whose exception becomes the failure of the run."""

    def __init__(self, hub: Hub, name: str, body: Callable[[], None]):
        super().__init__(name=name, daemon=True)
        self._hub = hub
        self._body = body

    def run(self) -> None:
        try:
            self._body()
        except Stopped:
            pass
        except BaseException as error:
            self._hub.fail(self.name, error)
        finally:
            self._hub.does(self.name, "ended")


def join_all(threads: list[WorkerThread], timeout_s: float) -> list[str]:
    """Join the threads within `timeout_s` in all; return the names of those still running."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
