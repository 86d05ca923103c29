"""Compiled calls beside a thread that traces: artifacts are right, torch.compile is not before torch 2.14."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from aot.runtime import LoadedArtifact, PreparedArtifact, prepare
from aot.store import Store
from tests.support.race import GLOBAL_FLAG, WAIT_S, FreeRace, equal
from tests.support.toy import SMALL, ToyStep, toy_step

CPU = torch.device("cpu")
PROGRAM = ToyStep()
NAMES = PROGRAM.call_spec(SMALL).input_names


@pytest.fixture(scope="module")
def prepared(toy_store: Store, tmp_path_factory: pytest.TempPathFactory) -> PreparedArtifact:
    return prepare(toy_store, [(PROGRAM, SMALL)], folder=tmp_path_factory.mktemp("private"))[
        "toy_step", SMALL
    ]


def inputs(seed: int) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES, PROGRAM.example_inputs(SMALL, seed, CPU), strict=True))


@contextmanager
def thread_held_inside_make_fx() -> Iterator[None]:
    """Hold a thread in the middle of a trace by an event inside the traced function."""
    inside, release = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert release.wait(WAIT_S)
        return x + 1

    thread = threading.Thread(target=lambda: make_fx(traced)(torch.ones(1)))
    thread.start()
    try:
        assert inside.wait(WAIT_S)
        yield
    finally:
        release.set()
        thread.join(WAIT_S)
    assert not thread.is_alive()


def test_artifact_calls_are_right_while_a_thread_is_held_inside_a_trace(prepared: PreparedArtifact) -> None:
    artifact = prepared.load(CPU)
    expected = artifact(inputs(0))
    with thread_held_inside_make_fx():
        assert not GLOBAL_FLAG or symbolic_trace._is_fx_tracing_flag is True
        right = sum(equal(artifact(inputs(0)), expected) for _ in range(100))
    assert right == 100


def test_compiled_calls_fail_in_the_same_harness_before_torch_2_14() -> None:
    compiled = torch.compile(toy_step, backend="eager")
    arguments = tuple(inputs(0).values())
    compiled(*arguments)
    failures = 0
    with thread_held_inside_make_fx():
        for _ in range(100):
            try:
                compiled(*arguments)
            except RuntimeError as error:
                failures += "symbolically trace" in str(error)
    assert failures == (100 if GLOBAL_FLAG else 0)
    compiled(*arguments)


def test_ten_thousand_artifact_calls_that_raced_with_traces_are_bit_equal(prepared: PreparedArtifact) -> None:
    single = prepared.load(CPU)
    expected = [single(inputs(index)) for index in range(3)]
    loaded: list[LoadedArtifact] = []

    def make() -> LoadedArtifact:
        loaded.append(prepared.load(CPU))
        return loaded[-1]

    race = FreeRace(wanted_calls=10_000, wanted_traces=100)
    race.run(make, [inputs(index) for index in range(3)], expected)
    assert race.errors == []
    assert race.calls.total() >= 10_000
    assert min(race.calls.values()) > 1_000
    assert race.traces >= 100
    assert len({id(artifact) for artifact in loaded}) == 3


@pytest.mark.skipif(not GLOBAL_FLAG, reason="the flag is thread-local from torch 2.14 on")
def test_the_free_running_harness_catches_compiled_calls() -> None:
    compiled = torch.compile(toy_step, backend="eager")
    names = PROGRAM.call_spec(SMALL).output_names
    expected = [dict(zip(names, compiled(*inputs(index).values()), strict=True)) for index in range(3)]
    race = FreeRace(wanted_calls=1_000, wanted_traces=100)
    race.run(
        lambda: lambda named: dict(zip(names, compiled(*named.values()), strict=True)),
        [inputs(index) for index in range(3)],
        expected,
    )
    assert any("symbolically trace" in str(error) for error in race.errors)
