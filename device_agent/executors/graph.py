"""Runs one graph of a `.pt2` archive operator by operator, from the JSON that torch.export wrote.

torch's own readers trust their input: `torch.export.load` and `load_pt2` unpickle sample inputs and any tensor or
object that the archive marks for it, and load compiled libraries; their deserializer evaluates shapes and guards as
Python and calls any attribute of torch that a node names. This module unpickles and evaluates nothing. A node names an
ATen operator, and its arguments are tensors, numbers and lists of them. Strings are not allowed, so no operator can
open a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

JSON = Mapping[str, Any]

# Types by their number in torch's schema.
DTYPES = {2: torch.int8, 4: torch.int32, 5: torch.int64, 7: torch.float32, 12: torch.bool}
LAYOUTS = {7: torch.strided}
FORMATS = {1: torch.contiguous_format, 4: torch.preserve_format}
KEYWORD = 2  # the kind of a keyword argument

_OPERATOR = re.compile(r"torch\.ops\.aten\.(_?[a-z]\w*)\.([A-Za-z]\w*)")
_SYMBOL = re.compile(r"Symbol\('(\w+)'")
_TENSOR_NAME_FIELDS = {
    "buffer": "buffer_name",
    "parameter": "parameter_name",
    "tensor_constant": "tensor_constant_name",
}


@dataclass(frozen=True)
class Value:
    """The name of a value: an input, a stored tensor or a node's output."""

    name: str


@dataclass(frozen=True)
class Input:
    """An input of the graph: its type, and the minimum and maximum of each dimension."""

    name: str
    dtype: torch.dtype
    bounds: tuple[tuple[int, int], ...]

    def check(self, tensor: Tensor) -> None:
        """Raises ValueError for another type or shape."""
        sizes = tuple(tensor.shape)
        if tensor.dtype != self.dtype:
            raise ValueError(f"{self.name} is {tensor.dtype}, not {self.dtype}")
        if len(sizes) != len(self.bounds) or any(
            not low <= size <= high for size, (low, high) in zip(sizes, self.bounds, strict=True)
        ):
            raise ValueError(f"{self.name} has shape {sizes}; its dimensions may be {self.bounds}")


@dataclass(frozen=True)
class Node:
    """One operator, its arguments, the name of its output, and the values that are not used after it."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    output: str
    last_uses: tuple[str, ...]


class Graph:
    """One method."""

    def __init__(self, model: JSON, find_tensor: Callable[[str], Tensor], device: torch.device) -> None:
        """model: the JSON of torch.export. find_tensor: returns the stored tensor of a name on `device`.

        Raises ValueError for a graph that is not allowed or not supported, KeyError for a missing entry.
        """
        graph, signature = model["graph_module"]["graph"], model["graph_module"]["signature"]
        self._device = device
        self._inputs: list[Input] = []
        self._stored_tensors: dict[str, Tensor] = {}
        for spec in signature["input_specs"]:
            kind, body = _only(spec)
            if kind == "user_input":
                self._inputs.append(_input(body["arg"]["as_tensor"]["name"], graph, model["range_constraints"]))
            elif kind in _TENSOR_NAME_FIELDS:
                self._stored_tensors[body["arg"]["name"]] = find_tensor(body[_TENSOR_NAME_FIELDS[kind]])
            else:
                raise ValueError(f"an input is a {kind}")
        self._outputs = [_output(spec) for spec in signature["output_specs"]]
        self._nodes = self._plan(graph["nodes"])

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs on the device. Raises ValueError for inputs of another type or shape."""
        values: dict[str, Any] = dict(self._stored_tensors)
        for graph_input, tensor in zip(self._inputs, tensors, strict=True):
            graph_input.check(tensor)
            values[graph_input.name] = tensor.to(self._device)
        for node in self._nodes:
            kwargs = {name: _resolve(argument, values) for name, argument in node.kwargs.items()}
            values[node.output] = node.function(*_resolve(node.args, values), **kwargs)
            for name in node.last_uses:
                del values[name]
        return [values[name] for name in self._outputs]

    def _plan(self, nodes: Sequence[JSON]) -> list[Node]:
        """Returns the nodes in order; each lists the values of which it is the last reader."""
        planned: list[Node] = []
        needed = {*self._stored_tensors, *self._outputs}
        for node in reversed(nodes):
            arguments = [(item, self._argument(item["arg"])) for item in node["inputs"]]
            args = [argument for item, argument in arguments if item["kind"] != KEYWORD]
            kwargs = {item["name"]: argument for item, argument in arguments if item["kind"] == KEYWORD}
            output = _output_name(node)
            read = {name for _, argument in arguments for name in _names(argument)}
            used_names = read | {output}
            planned.append(Node(_operator(node["target"]), args, kwargs, output, tuple(used_names - needed)))
            needed |= used_names
        return planned[::-1]

    def _argument(self, argument: JSON) -> Any:
        """Returns an argument with a `Value` in place of each name."""
        kind, body = _only(argument)
        if kind == "as_none":
            return None
        if kind in ("as_int", "as_float", "as_bool", "as_ints", "as_floats", "as_bools"):
            return _numbers(body)
        if kind == "as_tensor":
            return Value(body["name"])
        if kind == "as_tensors":
            return [Value(each["name"]) for each in body]
        if kind == "as_sym_int":
            return _symbolic(body)
        if kind == "as_sym_ints":
            return [_symbolic(each) for each in body]
        if kind == "as_device":
            return self._device
        if kind == "as_scalar_type":
            return DTYPES[body]
        if kind == "as_layout":
            return LAYOUTS[body]
        if kind == "as_memory_format":
            return FORMATS[body]
        raise ValueError(f"an argument of kind {kind} is not allowed")


def _only(union: JSON) -> tuple[str, Any]:
    """Returns the only member of a union of torch's schema."""
    ((kind, body),) = union.items()
    return kind, body


def _operator(target: str) -> Callable[..., Any]:
    match = _OPERATOR.fullmatch(target)
    operator: Any = getattr(getattr(torch.ops.aten, match[1], None), match[2], None) if match else None
    if not isinstance(operator, torch._ops.OpOverload):
        raise ValueError(f"{target} is not an ATen operator")
    function: Callable[..., Any] = operator
    return function


def _input(name: str, graph: JSON, ranges: JSON) -> Input:
    meta = graph["tensor_values"][name]
    bounds = []
    for size in meta["sizes"]:
        kind, body = _only(size)
        if kind == "as_int":
            bounds.append((body, body))
        else:
            symbol = _SYMBOL.search(body["expr_str"])
            if symbol is None:
                raise ValueError(f"input {name} has a size that is not a symbol")
            allowed = ranges[symbol[1]]
            bounds.append((allowed["min_val"], allowed["max_val"]))
    return Input(name, DTYPES[meta["dtype"]], tuple(bounds))


def _output(spec: JSON) -> str:
    kind, body = _only(spec)
    if kind != "user_output":
        raise ValueError(f"an output is a {kind}")
    name: str = body["arg"]["as_tensor"]["name"]
    return name


def _output_name(node: JSON) -> str:
    """Returns the name of a node's output, or of the node if it has none, as checks do."""
    if not node["outputs"]:
        return str(node["name"])
    (output,) = node["outputs"]
    kind, body = _only(output)
    if kind not in ("as_tensor", "as_sym_int"):
        raise ValueError(f"{node['target']} has an output of kind {kind}")
    return str(body["name" if kind == "as_tensor" else "as_name"])


def _numbers(body: Any) -> Any:
    """Returns numbers; the schema writes infinities and NaN, which JSON lacks, as strings."""
    if isinstance(body, list):
        return [_numbers(each) for each in body]
    return float(body) if isinstance(body, str) else body


def _symbolic(body: JSON) -> Value | int:
    kind, value = _only(body)
    return Value(value) if kind == "as_name" else int(value)


def _names(argument: Any) -> list[str]:
    if isinstance(argument, list):
        return [each.name for each in argument if isinstance(each, Value)]
    return [argument.name] if isinstance(argument, Value) else []


def _resolve(argument: Any, values: Mapping[str, Any]) -> Any:
    """Returns an argument with the computed value in place of each `Value`."""
    if isinstance(argument, list):
        return [_resolve(each, values) for each in argument]
    return values[argument.name] if isinstance(argument, Value) else argument
