"""Inspects a `.pte` file: methods, operators, delegates, memory, and the tensors it needs from a `.ptd`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executorch.exir import schema
from executorch.exir._serialize import _deserialize_pte_binary, _PTEFile

from shared.errors import BadRequest

MAGIC = re.compile(rb"....ET\d\d", re.DOTALL)  # magic bytes of an ExecuTorch flatbuffer
EXTERNAL = schema.TensorDataLocation.EXTERNAL
CONTENT_KEY = re.compile(rb"[0-9a-f]{64}")  # sha256 keys of delegate data
DTYPES = {"byte": "uint8", "char": "int8", "short": "int16", "int": "int32", "long": "int64"}
DTYPES |= {"half": "float16", "float": "float32", "double": "float64"}


@dataclass(frozen=True)
class Tensor:
    """An input or output. dynamic: the shape is an upper bound."""

    dtype: str
    shape: tuple[int, ...]
    dynamic: bool

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" + (" at most" if self.dynamic else "")


@dataclass(frozen=True)
class Delegates:
    """The delegated parts of one method. bytes: size of the delegates without their constants."""

    count: int
    bytes: int


@dataclass(frozen=True)
class Method:
    """One method of a program."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    planned_bytes: int
    nodes: int  # instructions, including delegate calls
    operators: dict[str, int]  # number of calls by portable kernel, most used first
    delegates: dict[str, Delegates]  # by backend


@dataclass(frozen=True)
class Inspection:
    """The contents of a program file. Sizes in bytes."""

    bytes: int
    methods: tuple[Method, ...]
    buffers: dict[str, Tensor]  # mutable buffers shared by the methods, by name
    constants: int  # constants of portable kernels in the file
    constant_bytes: int
    delegate_constants: int  # constants of delegates in the file
    delegate_constant_bytes: int
    external: tuple[str, ...]  # constants of portable kernels in the `.ptd`, by name
    external_delegate_keys: int  # number of delegate constants in the `.ptd`


def inspect_program(path: Path) -> Inspection:
    """Inspects the `.pte` at `path`. Raises BadRequest if it is not a complete ExecuTorch program."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read ({error.strerror})") from error
    if not MAGIC.match(data):
        raise BadRequest(f"{path} is not an ExecuTorch program; give a .pte file written by `mobizo-server compile`")
    try:
        return _inspection(_deserialize_pte_binary(data), len(data))
    except Exception as error:  # a damaged file can fail anywhere in the reader
        raise BadRequest(
            f"{path} is not a complete ExecuTorch program ({type(error).__name__}); compile it again"
        ) from error


def _inspection(file: _PTEFile, size: int) -> Inspection:
    plans = file.program.execution_plan
    payloads = file.program.backend_delegate_data
    named_data = {} if file.named_data is None else file.named_data.pte_data
    held_bytes = 0 if file.named_data is None else sum(len(buffer) for buffer in file.named_data.buffers)
    keys = {key.decode() for payload in payloads for key in CONTENT_KEY.findall(bytes(payload.data))}
    tensors = [tensor for plan in plans for tensor in _tensors(plan, range(len(plan.values)))]
    named_tensors = [(tensor.extra_tensor_info, tensor) for tensor in tensors if tensor.extra_tensor_info is not None]
    inside = [len(buffer.storage) for buffer in file.program.constant_buffer if buffer.storage]
    return Inspection(
        bytes=size,
        methods=tuple(_method(plan, payloads) for plan in plans),
        buffers={
            info.fully_qualified_name: _tensor(tensor)
            for info, tensor in named_tensors
            if info.location != EXTERNAL and info.fully_qualified_name
        },
        constants=len(inside),
        constant_bytes=sum(inside),
        delegate_constants=len(named_data),
        delegate_constant_bytes=held_bytes,
        external=tuple(sorted({info.fully_qualified_name for info, _ in named_tensors if info.location == EXTERNAL})),
        external_delegate_keys=len(keys - named_data.keys()),
    )


def _method(plan: schema.ExecutionPlan, payloads: list[schema.BackendDelegateInlineData]) -> Method:
    calls = [instruction.instr_args for chain in plan.chains for instruction in chain.instructions]
    operators = Counter(
        _operator(plan.operators[call.op_index]) for call in calls if isinstance(call, schema.KernelCall)
    )
    sizes: dict[str, list[int]] = {}
    for delegate in plan.delegates:
        sizes.setdefault(delegate.id, []).append(len(payloads[delegate.processed.index].data))
    return Method(
        name=plan.name,
        inputs=tuple(_tensor(tensor) for tensor in _tensors(plan, plan.inputs)),
        outputs=tuple(_tensor(tensor) for tensor in _tensors(plan, plan.outputs)),
        planned_bytes=sum(plan.non_const_buffer_sizes),
        nodes=len(calls),
        operators=dict(operators.most_common()),
        delegates={name: Delegates(len(payload_sizes), sum(payload_sizes)) for name, payload_sizes in sizes.items()},
    )


def _operator(operator: schema.Operator) -> str:
    return f"{operator.name}.{operator.overload}" if operator.overload else str(operator.name)


def _tensors(plan: schema.ExecutionPlan, indices: Iterable[int]) -> list[Any]:
    values = [plan.values[index].val for index in indices]
    return [value for value in values if isinstance(value, schema.Tensor)]


def _tensor(tensor: Any) -> Tensor:
    kind = tensor.scalar_type.name.lower()
    dynamic = tensor.shape_dynamism != schema.TensorShapeDynamism.STATIC
    return Tensor(DTYPES.get(kind, kind), tuple(tensor.sizes), dynamic)
