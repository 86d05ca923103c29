"""The check of every input of every call: a package fed a wrong shape returns garbage, without an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aot.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from aot.program import CallSpec, TensorSpec


class InputMismatch(UserError):
    """An input of a call is not what the artifact was compiled for; the call was not made."""


class CallCheck:
    """Turns named inputs into the positional ones of a call, or says which is wrong."""

    def __init__(self, name: str, spec: CallSpec, device: torch.device):
        import torch

        self._name, self._spec = name, spec
        # Tensors on the CPU report no index.
        self._device = device if device.type != "cpu" else torch.device("cpu")
        self._types = (torch.Tensor, torch.nn.Parameter)
        self._layout = torch.strided
        self._expected = [
            (item.name, torch.Size(item.shape), item.stride, getattr(torch, item.dtype))
            for item in spec.inputs
        ]

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs in call order; takes less than a microsecond for each.

        Raises InputMismatch naming the first input that is unknown, missing, no plain dense tensor, or of
        another device, dtype, rank, shape or strides.
        """
        device, types, layout = self._device, self._types, self._layout
        tensors = []
        for name, shape, stride, dtype in self._expected:
            tensor = inputs.get(name)
            if (
                type(tensor) not in types
                or tensor.layout is not layout
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.device != device
            ):
                raise self._mismatch(inputs)
            tensors.append(tensor)
        if len(inputs) != len(tensors):
            raise self._mismatch(inputs)
        return tensors

    def _mismatch(self, inputs: Mapping[str, torch.Tensor]) -> InputMismatch:
        """Say what is wrong with the first wrong input; unknown names come before missing ones."""
        known = self._spec.input_names
        unknown = [name for name in inputs if name not in known]
        if unknown:
            return InputMismatch(f"{self._name}: unexpected input '{unknown[0]}'")
        for spec in self._spec.inputs:
            problem = self._problem(spec, inputs)
            if problem:
                return InputMismatch(f"{self._name}: input '{spec.name}' {problem}")
        raise AssertionError("the quick check refused inputs that the slow one accepts")

    def _problem(self, spec: TensorSpec, inputs: Mapping[str, torch.Tensor]) -> str | None:
        if spec.name not in inputs:
            return "is missing"
        tensor = inputs[spec.name]
        if type(tensor) not in self._types or tensor.layout is not self._layout:
            return f"is no plain dense tensor but {getattr(tensor, 'layout', type(tensor).__name__)}"
        for what, found, expected in (
            ("device", tensor.device, self._device),
            ("dtype", str(tensor.dtype).removeprefix("torch."), spec.dtype),
            ("rank", tensor.dim(), len(spec.shape)),
            ("shape", tuple(tensor.shape), spec.shape),
            ("strides", tensor.stride(), spec.stride),
        ):
            if found != expected:
                return f"has {what} {found}, expected {expected}"
        return None
