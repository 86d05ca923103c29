"""A toy program that its package does not compute. Factory: `tests.support.twins:program_set`."""

from collections.abc import Sequence

from aot.program import ProgramSet
from tests.support.toy import SMALL, ToyStep, toy_step

FACTORY = "tests.support.twins:program_set"


def scaled(*inputs):
    """The toy's step, one gradient off by a ten-thousandth."""
    loss, grad_w1, grad_w2 = toy_step(*inputs)
    return loss, grad_w1 * 1.0001, grad_w2


class OffByATenThousandth(ToyStep):
    def function(self, bucket):
        return scaled

    def reference(self, bucket, inputs):
        return scaled(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))


class WrongTwin(ToyStep):
    """Its float64 twin computes something else, for which the eager step is no yardstick."""

    def reference(self, bucket, inputs):
        loss, grad_w1, grad_w2 = super().reference(bucket, inputs)
        return loss, grad_w1 * 2, grad_w2


def program_set(run_file: str, overrides: Sequence[str] = ()) -> ProgramSet:
    """`run_file` is the name of one of the classes."""
    program = {kind.__name__: kind for kind in (OffByATenThousandth, WrongTwin)}[run_file]()
    return ProgramSet((program,), (SMALL,))
