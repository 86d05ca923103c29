"""Trade arithmetic for memory: keep a function's inputs for the backward, not what it computed on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        tensors = [
            tensor.detach().requires_grad_(need)
            for tensor, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.function(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, grads))
        return None, *(next(found) if need else None for need in needed)


def recomputed(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Call `function(*tensors)`; its backward calls it again.

    In a traced graph, what the second call computes and no gradient needs is dead code: a matrix product at
    the end of `function` is not done twice.
    """
    return _Recomputed.apply(function, *tensors)


def called(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Call `function(*tensors)`; the twin of `recomputed`."""
    return function(*tensors)
