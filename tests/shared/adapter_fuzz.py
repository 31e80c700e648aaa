"""Generates malformed adapter files from valid ones, with a fixed seed."""

import json
import random
import struct

import numpy as np

from shared.zo.lora import ADAPTER_TENSOR, dump_adapter

NUMBERS = (-1, 0, 1, 3, 4, 7, 8, 100, 2**31, 2**32 + 4, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 0.5, 1e300)
DTYPES = ("F64", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "f32", "", "F32 ", None, 32, "F4")
WILD = (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38)


def good(size, value=0.5, metadata=None):
    """Returns a valid file of `size` elements."""
    return dump_adapter(np.full(size, value, np.float32), metadata or {"job": "x"})


def packed(header, payload, length=None):
    """Returns a file of a header (text or an object) and a payload. length: the stated length of the header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length % 2**64) + text + payload


def _entry(size):
    return {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}


def _payload(size):
    return np.full(size, 0.5, "<f4").tobytes()


def _lying_length(rng, size):
    text = json.dumps({ADAPTER_TENSOR: _entry(size)}).encode()
    return packed(text, _payload(size), len(text) + rng.choice((-1, 1, -8, 8, 4 * size, *NUMBERS[4:12], -len(text))))


def _offsets(rng, size):
    offsets = [rng.choice((0, 4 * size, *NUMBERS)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3)))]
    if offsets == [0, 4 * size]:
        offsets = [4 * size, 0]
    return packed({ADAPTER_TENSOR: _entry(size) | {"data_offsets": offsets}}, _payload(size))


def _shape(rng, size):
    shape = [rng.choice((1, size - 1, size + 1, 2 * size, *NUMBERS)) for _ in range(rng.randrange(5))]
    shape = [1, size] if shape == [size] else shape
    return packed({ADAPTER_TENSOR: _entry(size) | {"shape": shape}}, _payload(size))


def _dtype(rng, size):
    return packed({ADAPTER_TENSOR: _entry(size) | {"dtype": rng.choice(DTYPES)}}, _payload(size))


def _names(rng, size):
    name = rng.choice(("lora_A", "", "LORA_B", "lora_B ", "../lora_B", "lora_B\0", "\ud800", "é" * 50, "__proto__"))
    return packed({name: _entry(size)}, _payload(size))


def _overlap(rng, size):
    """Returns two tensors with equal, adjacent or partly overlapping data offsets."""
    half = rng.randrange(size)
    other = {"dtype": "F32", "shape": [size - half], "data_offsets": [4 * half, 4 * size]}
    return packed({ADAPTER_TENSOR: _entry(size), "other": other}, _payload(size))


def _twice(rng, size):
    """Returns a header with a duplicate name, which readers interpret differently."""
    entry, other = json.dumps(_entry(size)), json.dumps(_entry(rng.choice((size, size - 1, 1))))
    return packed(f'{{"{ADAPTER_TENSOR}":{entry},"{ADAPTER_TENSOR}":{other}}}'.encode(), _payload(size))


def _values(rng, size):
    flat = np.full(size, 0.5, np.float32)
    flat[rng.randrange(size)] = rng.choice(WILD)
    return dump_adapter(flat, {})


def _torn(rng, size):
    data = good(size)
    return data[: rng.randrange(len(data))]


def _trailing(rng, size):
    return good(size) + rng.randbytes(rng.randrange(1, 64))


def _bomb(rng, size):
    """Returns a deeply nested or a very large header."""
    depth = rng.choice((10, 127, 128, 129, 1000))
    sign = rng.choice(('{"a":', "["))
    text = rng.choice(
        (
            sign * depth,
            sign * depth + "1" + ("}" if ":" in sign else "]") * depth,
            '{"__metadata__":{' + ",".join(f'"k{n}":"v"' for n in range(depth)) + "}}",
            f'{{"{ADAPTER_TENSOR}":{{"dtype":"F32","shape":[{"1," * depth}{size}],"data_offsets":[0,{4 * size}]}}}}',
            " " * depth,
            '{"__metadata__":' + "9" * depth + "}",
        )
    )
    if '"1,' in text:
        text = text.replace("1,", "2,")
    return packed(text.encode(), _payload(size))


def _metadata(rng, size):
    wrong = rng.choice((None, 1, [], "text", {"a": 1}, {"a": None}, {"a": {"b": "c"}}, [["a", "b"]]))
    return packed({"__metadata__": wrong or 1, ADAPTER_TENSOR: _entry(size)}, _payload(size))


def _not_json(rng, size):
    text = json.dumps({ADAPTER_TENSOR: _entry(size)}).encode()
    position = rng.randrange(len(text))
    return packed(
        text[:position] + rng.choice((b"\xff", b"\0", b"'", b",", b"{", b"NaN")) + text[position:], _payload(size)
    )


KINDS = (
    _lying_length,
    _offsets,
    _shape,
    _dtype,
    _names,
    _overlap,
    _twice,
    _values,
    _torn,
    _trailing,
    _bomb,
    _metadata,
    _not_json,
)


def malformed(count, size, seed=0):
    """Yields `count` pairs (kind, file). No file is a valid adapter of `size` elements for every reader."""
    rng = random.Random(seed)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        yield kind.__name__.strip("_"), kind(rng, size)
