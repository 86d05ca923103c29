"""What can be compiled: a pure function over named tensors, at one bucket.

A program knows nothing of files or compilers. It declares its call spec (ordered names, shapes, dtypes and
strides of inputs and outputs), gives the function to trace, and offers a higher-precision twin for `verify`.
This module imports no torch: specs are plain records, so that commands answer quickly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from aot.buckets import Bucket, LengthHistogram


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, as torch reports them (a size of 0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape, dtype (torch's name without the prefix, e.g. ``bfloat16``) and strides in elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        stride = contiguous_stride(self.shape) if self.stride is None else tuple(self.stride)
        object.__setattr__(self, "stride", stride)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class CallSpec:
    """Ordered inputs and outputs of one program at one bucket; every tensor lies on `device_type`."""

    device_type: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.inputs)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs)


class Program(ABC):
    """One pure function to compile. Subclasses are cheap to make: no weights, no tensors."""

    name: str
    device_type: str
    compile_options: Mapping[str, bool | int | str] = {}
    #: Outputs that an argmax decides: rounding alone turns a near tie over, and with it a whole unit.
    discrete_outputs: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Everything structural that shapes the graph, as JSON without floats (use strings)."""

    @property
    @abstractmethod
    def source_modules(self) -> tuple[str, ...]:
        """Modules the function lives in; what they import of the same project is followed."""

    @abstractmethod
    def call_spec(self, bucket: Bucket) -> CallSpec: ...

    @abstractmethod
    def function(self, bucket: Bucket) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function to trace: tensors in the order of the inputs, a tuple in that of the outputs."""

    @abstractmethod
    def example_inputs(self, bucket: Bucket, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Fresh, valid, random inputs; different for each seed."""

    @abstractmethod
    def reference(self, bucket: Bucket, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The naive twin in float64 on the same inputs, for `verify --level numerics`."""

    def check_bucket(self, bucket: Bucket) -> None:  # noqa: B027 - most programs take every bucket
        """Raise ConfigError if the program has no form at this bucket."""


@dataclass(frozen=True)
class ProgramSet:
    """What a run needs: its programs, its buckets, and the micro-batch sizes its data will emit.

    `histogram` is None when the data is not there yet (a build with explicit buckets needs none).
    """

    programs: tuple[Program, ...]
    buckets: tuple[Bucket, ...]
    histogram: LengthHistogram | None = None
    notes: tuple[str, ...] = field(default=())


#: An entry point of group `aot.programs`: (run file, overrides) -> ProgramSet.
ProgramFactory = Callable[[str, Sequence[str]], ProgramSet]
