"""One graph of a `.pt2` archive, run operator by operator from the JSON that torch.export wrote.

torch's own readers trust what they read. `torch.export.load` and `load_pt2` unpickle sample inputs and every tensor or
object that the archive marks so, and load compiled libraries; their deserializer evaluates shapes and guards as Python
and calls whatever attribute of torch a node names. Here nothing is unpickled or evaluated: a node names an ATen
operator, and its arguments are tensors, numbers and lists of them. Strings are none of those, so no operator can be
told to open a file. Knows no archive and no program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

JSON = Mapping[str, Any]

# Numbers that torch's schema gives to types.
DTYPES = {2: torch.int8, 4: torch.int32, 5: torch.int64, 7: torch.float32, 12: torch.bool}
LAYOUTS = {7: torch.strided}
FORMATS = {1: torch.contiguous_format, 4: torch.preserve_format}
KEYWORD = 2  # kind of an argument

_OPERATOR = re.compile(r"torch\.ops\.aten\.(_?[a-z]\w*)\.([A-Za-z]\w*)")
_SYMBOL = re.compile(r"Symbol\('(\w+)'")
_HELD = {"buffer": "buffer_name", "parameter": "parameter_name", "tensor_constant": "tensor_constant_name"}


@dataclass(frozen=True)
class Value:
    """What an input or a node made, by its name."""

    name: str


@dataclass(frozen=True)
class Input:
    """An input as the graph was made for: the type, and the least and the most of each dimension."""

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
    """One operator, what it takes and makes, and which values nobody needs after it."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    output: str
    spent: tuple[str, ...]


class Graph:
    """One method."""

    def __init__(self, model: JSON, held: Callable[[str], Tensor], device: torch.device) -> None:
        """model: as torch.export writes it. held: the tensor of a name, which the graph reads or changes, on `device`.

        Raises ValueError for what it may not or cannot run, KeyError for what is not there.
        """
        graph, signature = model["graph_module"]["graph"], model["graph_module"]["signature"]
        self._device = device
        self._inputs: list[Input] = []
        self._held: dict[str, Tensor] = {}
        for spec in signature["input_specs"]:
            kind, body = _only(spec)
            if kind == "user_input":
                self._inputs.append(_input(body["arg"]["as_tensor"]["name"], graph, model["range_constraints"]))
            elif kind in _HELD:
                self._held[body["arg"]["name"]] = held(body[_HELD[kind]])
            else:
                raise ValueError(f"an input is a {kind}")
        self._outputs = [_output(spec) for spec in signature["output_specs"]]
        self._nodes = self._planned(graph["nodes"])

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, on the device. Raises ValueError for inputs that it was not made for."""
        values: dict[str, Any] = dict(self._held)
        for known, tensor in zip(self._inputs, tensors, strict=True):
            known.check(tensor)
            values[known.name] = tensor.to(self._device)
        for node in self._nodes:
            kwargs = {name: _filled(argument, values) for name, argument in node.kwargs.items()}
            values[node.output] = node.function(*_filled(node.args, values), **kwargs)
            for name in node.spent:
                del values[name]
        return [values[name] for name in self._outputs]

    def _planned(self, nodes: Sequence[JSON]) -> list[Node]:
        """The nodes, each of which ends the life of what it is the last to read."""
        planned: list[Node] = []
        needed = {*self._held, *self._outputs}
        for node in reversed(nodes):
            arguments = [(item, self._argument(item["arg"])) for item in node["inputs"]]
            args = [argument for item, argument in arguments if item["kind"] != KEYWORD]
            kwargs = {item["name"]: argument for item, argument in arguments if item["kind"] == KEYWORD}
            output = _made(node)
            read = {name for _, argument in arguments for name in _names(argument)}
            spent = read | {output}
            planned.append(Node(_operator(node["target"]), args, kwargs, output, tuple(spent - needed)))
            needed |= spent
        return planned[::-1]

    def _argument(self, argument: JSON) -> Any:
        """An argument with values in place of names."""
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
        raise ValueError(f"an argument is given {kind}")


def _only(union: JSON) -> tuple[str, Any]:
    """The one member that a union of torch's schema has."""
    ((kind, body),) = union.items()
    return kind, body


def _operator(target: str) -> Callable[..., Any]:
    match = _OPERATOR.fullmatch(target)
    operator: Any = getattr(getattr(torch.ops.aten, match[1], None), match[2], None) if match else None
    if not isinstance(operator, torch._ops.OpOverload):
        raise ValueError(f"{target} is no ATen operator")
    made: Callable[..., Any] = operator
    return made


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
                raise ValueError(f"input {name} has a size that is no symbol")
            allowed = ranges[symbol[1]]
            bounds.append((allowed["min_val"], allowed["max_val"]))
    return Input(name, DTYPES[meta["dtype"]], tuple(bounds))


def _output(spec: JSON) -> str:
    kind, body = _only(spec)
    if kind != "user_output":
        raise ValueError(f"an output is a {kind}")
    name: str = body["arg"]["as_tensor"]["name"]
    return name


def _made(node: JSON) -> str:
    """The name of what a node makes, or its own if it makes nothing, as checks do."""
    if not node["outputs"]:
        return str(node["name"])
    (output,) = node["outputs"]
    kind, body = _only(output)
    if kind not in ("as_tensor", "as_sym_int"):
        raise ValueError(f"{node['target']} makes {kind}")
    return str(body["name" if kind == "as_tensor" else "as_name"])


def _numbers(body: Any) -> Any:
    """Numbers as they are; the schema writes those that JSON has not as words."""
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


def _filled(argument: Any, values: Mapping[str, Any]) -> Any:
    """An argument with what was made in place of its name."""
    if isinstance(argument, list):
        return [_filled(each, values) for each in argument]
    return values[argument.name] if isinstance(argument, Value) else argument
