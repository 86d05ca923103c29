"""Toy programs that fail on the way to an artifact, each at another place."""

import time
from collections.abc import Sequence

from aot.program import CallSpec, Program, ProgramSet, TensorSpec
from tests.support.toy import SMALL, ToyStep, toy_step

FACTORY = "tests.support.broken:program_set"


class WrongSpec(ToyStep):
    """Declares its loss in another dtype than it returns."""

    def call_spec(self, bucket):
        spec = super().call_spec(bucket)
        return CallSpec("cpu", spec.inputs, (TensorSpec("loss", (), "float64"), *spec.outputs[1:]))


class Crashes(ToyStep):
    """Compiles, but reads rows that are not there: its package ends the process."""

    def function(self, bucket):
        return lambda w1, w2, features, targets, anchors: toy_step(w1, w2, features, targets, anchors + 10**6)


class Sleeps(ToyStep):
    """Takes a minute to trace."""

    def function(self, bucket):
        time.sleep(60)
        return toy_step


def program_set(run_file: str, overrides: Sequence[str] = ()) -> ProgramSet:
    programs: tuple[Program, ...] = tuple(
        kind(name=name)
        for name, kind in (
            ("wrong_spec", WrongSpec),
            ("crashes", Crashes),
            ("sleeps", Sleeps),
        )
    )
    return ProgramSet(programs, (SMALL,))
