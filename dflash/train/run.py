"""One training run, from its configuration to its exit code.

The main thread coordinates; target and drafter workers are daemon threads that end when the plan ends, when
one of them fails, or when the run is interrupted. SIGTERM and SIGINT ask for a checkpoint at the step
boundary; a second one ends the process at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from aot.console import note
from aot.errors import EXIT_OK, EXIT_RESUMABLE, ConfigError, UserError
from aot.lockfile import FILE_NAME
from dflash.train import provenance
from dflash.train.checkpoint import folders
from dflash.train.coordinator import Coordinator
from dflash.train.devices import make_reproducible
from dflash.train.drafter_worker import Delivery, DrafterWorker, RoundResult
from dflash.train.metrics import MetricsLog, Reporter, WandbSink
from dflash.train.pipeline import Hub, OrderedQueue, RoundGate, Stalled, Stopped, WorkerThread, join_all
from dflash.train.session import Invocation, Session
from dflash.train.target_worker import TargetWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aot.store import Store
    from dflash.config import RunConfig

#: How long workers may take to notice a stop; a compiled call that is under way ends first.
JOIN_S = 1.0


class RunFailed(UserError):
    """A worker failed, or nothing moved any more."""


class Interrupts:
    """Counts SIGTERM and SIGINT: the first asks, the second kills."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> bool:
        return self.requested

    def _handle(self, number: int, frame: object) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
        note(f"{signal.Signals(number).name}: stopping at the next step boundary (again: at once)")

    @contextlib.contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle the signals inside the block; a thread other than the main one cannot, and does not."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold the run's folder: two trainers in one folder would prune each other's checkpoints."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / ".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"output.dir '{output}' cannot be written: {(error.strerror or str(error)).lower()}",
            "name a folder of your own with `--output`",
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is training in '{output}'", "name another folder with `--output`"
            ) from None
        yield


def train(config: RunConfig, store: Store, invocation: Invocation, *, resume: bool = False) -> int:
    """Run or resume a training run; return its exit code (0, or 75 when stopped by a signal and resumable).

    Raises UserError for what the user can mend, RunFailed naming the worker that failed.
    """
    make_reproducible()
    with Interrupts().installed() as interrupts, locked(Path(config.output.dir)):
        session = Session.open(config, store, invocation, resume)
        if interrupts():
            return EXIT_RESUMABLE
        write_run_files(session)
        log = MetricsLog(session.output, session.progress.step)
        sinks = []
        if config.output.wandb_project:
            sinks.append(WandbSink(config.output, session.output, config.model_dump(mode="json")))
        reporter = Reporter(log, sinks)
        try:
            finished = run_workers(session, reporter, interrupts)
        finally:
            reporter.close()
    if finished:
        note(f"done: {session.progress.step} steps, checkpoints in {session.output}")
        return EXIT_OK
    note(f"stopped after step {session.progress.step}: `dflash train {invocation.run_text} --resume` goes on")
    return EXIT_RESUMABLE


def write_run_files(session: Session) -> None:
    """The resolved run file, the command line and the lock file, beside the metrics."""
    for name in (provenance.RUN_FILE, provenance.COMMAND_FILE, FILE_NAME):
        (session.output / name).write_text(session.extra_files[name], "utf-8")


def run_workers(session: Session, reporter: Reporter, interrupts: Interrupts) -> bool:
    """Start the threads and coordinate them; return False when interrupted. Raises RunFailed."""
    config = session.config
    hub = Hub(config.topology.stall_timeout_s)
    targets, drafters = make_targets(session), make_drafters(session)
    gate: RoundGate[RoundResult] = RoundGate(hub, len(drafters))
    queues: list[OrderedQueue[Delivery]] = [OrderedQueue(hub, config.topology.queue_depth) for _ in drafters]
    done = session.progress.step
    threads = [
        WorkerThread(
            hub,
            target.name,
            lambda target=target: target.run(session.plan.rounds(done), queues, session.drafter_devices, hub),
        )
        for target in targets
    ] + [
        WorkerThread(
            hub,
            drafter.name,
            lambda drafter=drafter: drafter.run(session.plan.rounds(done), queues[drafter.index], gate, hub),
        )
        for drafter in drafters
    ]
    coordinator = Coordinator(
        config,
        session.plan,
        session.progress,
        list(session.replicas.values()),
        drafters,
        targets,
        gate,
        reporter,
        session.save,
    )
    for thread in threads:
        thread.start()
    try:
        return coordinator.run(interrupts)
    except (Stopped, Stalled) as error:
        raise failure(hub, error, session) from error
    finally:
        hub.stop()
        join_all(threads, JOIN_S)


def make_targets(session: Session) -> list[TargetWorker]:
    config, devices = session.config, session.target_devices
    return [
        TargetWorker(
            index,
            len(devices),
            device,
            session.targets[device],
            session.documents,
            config.data,
            config.train.seed,
            session.replicas[session.drafter_devices[0]].dtype,
        )
        for index, device in enumerate(devices)
    ]


def make_drafters(session: Session) -> list[DrafterWorker]:
    devices = session.drafter_devices
    return [
        DrafterWorker(
            index,
            len(devices),
            device,
            session.config.train,
            session.plan.total_steps,
            session.artifacts,
            session.replicas[device],
            session.fixed_inputs[device],
        )
        for index, device in enumerate(devices)
    ]


def failure(hub: Hub, error: Exception, session: Session) -> RunFailed:
    """The error to show: which worker, at what, and where to go on from. A bug's traceback goes to stderr."""
    published = folders(session.output)
    hint = f"`--resume` goes on from {published[-1]}" if published else "no checkpoint had been written yet"
    if hub.failure is None:
        return RunFailed(f"the run stalled: {error}", hint)
    cause = hub.failure.error
    if not isinstance(cause, UserError):
        note("".join(traceback.format_exception(cause)).rstrip())
    text = f"{type(cause).__name__}: {cause}" if not isinstance(cause, UserError) else cause.message
    return RunFailed(f"{hub.failure.worker} failed at {hub.failure.activity}: {text}", hint)
