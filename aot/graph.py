"""A canonical text of an exported graph, and its hash: equal graphs are equal text, others a readable diff.

Nodes are numbered in order and written as operator, arguments, result (dtype, shape, stride, device);
floats are hexadecimal, constants are digests, subgraphs are written in place. Names, folders, stack traces
and hash seeds leave no mark. Kernels behind opaque operators are covered by the source digest alone.
"""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

INDENT = "    "


def graph_hash(exported: ExportedProgram) -> str:
    """Return the SHA-256 of `graph_lines`, as 64 hex digits."""
    return hashlib.sha256("\n".join(graph_lines(exported)).encode()).hexdigest()


def graph_lines(exported: ExportedProgram) -> list[str]:
    """Return one line per node, inputs first, subgraphs indented under the node that names them."""
    signature = exported.graph_signature
    kinds = [spec.kind.name.lower() for spec in (*signature.input_specs, *signature.output_specs)]
    # A tensor made of Python numbers inside the function becomes a buffer; other values may be constants.
    values = {**exported.state_dict, **exported.constants}
    constants = [
        f"constant {index} {_text(values[spec.target], {})}"
        for index, spec in enumerate(signature.input_specs)
        if spec.target in values
    ]
    return [f"signature {' '.join(kinds)}", *constants, *_graph(exported.graph, exported.graph_module, "")]


def _graph(graph: Graph, owner: torch.nn.Module, indent: str) -> Iterator[str]:
    import torch

    indices: dict[Node, int] = {}
    for index, node in enumerate(graph.nodes):
        indices[node] = index
        line = f"{indent}%{index} = {node.op}"
        attribute = None
        if node.op == "get_attr":
            attribute = operator.attrgetter(node.target)(owner)
            if not isinstance(attribute, torch.nn.Module):
                line += f" {_text(attribute, indices)}"
        elif node.op == "call_function":
            line += f" {_target(node.target)}"
        elif node.op not in ("placeholder", "output"):
            raise AssertionError(f"an exported graph has no {node.op} nodes")
        arguments = [_text(argument, indices) for argument in node.args if node.op != "placeholder"]
        arguments += [f"{name}={_text(value, indices)}" for name, value in sorted(node.kwargs.items())]
        line += f"({', '.join(arguments)})" if arguments else ""
        yield f"{line} -> {_value(node.meta['val'])}" if "val" in node.meta else line
        if isinstance(attribute, torch.fx.GraphModule):
            yield from _graph(attribute.graph, attribute, indent + INDENT)


def _target(target: Any) -> str:
    import torch

    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def _value(value: Any) -> str:
    """Describe what a node yields."""
    import torch

    if isinstance(value, torch.Tensor):
        return (
            f"{_text(value.dtype, {})}{list(value.shape)} stride {list(value.stride())} {value.device.type}"
        )
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value(item) for item in value)})"
    return _text(value, {})


def _text(value: Any, indices: dict[Node, int]) -> str:
    """Write an argument so that equal arguments have one spelling in every process."""
    import torch

    if isinstance(value, torch.fx.Node):
        return f"%{indices[value]}"
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, (torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"{_value(value)} {_tensor_digest(value)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, indices) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(item, indices)}' for key, item in sorted(value.items()))}}}"
    if isinstance(value, slice):
        return f"slice({_text([value.start, value.stop, value.step], indices)})"
    if callable(value):
        return _target(value)
    raise AssertionError(f"no canonical text for a {type(value).__name__} in a graph")


def _tensor_digest(tensor: torch.Tensor) -> str:
    import torch

    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()
