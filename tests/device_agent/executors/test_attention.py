"""The native runner's attention kernel, against NumPy."""

import itertools
import warnings

import numpy as np
import pytest
import torch

from device_agent.errors import RuntimeFailed
from device_agent.executors.process import ExecutorProcess
from device_agent.executors.runner import serve_options

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from torch.export import Dim

    from server.compiler.export.emission import Signature, emit
    from server.compiler.export.weights import Stored, write_weights
    from server.compiler.methods.attention_operator import attention_call

CONTEXT = 72  # positions of the cache: more than the kernel reads at a time
SHAPES = {"whole": (6, 2, 64), "parts": (3, 3, 84), "scalars": (2, 1, 5)}  # heads, key-value heads, size
UNUSED = Stored.of("unused", torch.zeros(4), None, "unused", None)  # the runner refuses an empty weights file


class Attend(torch.nn.Module):
    def forward(self, q, keys, values, start):
        first = start.item()
        torch._check(first >= 0)
        torch._check(first + q.shape[1] <= CONTEXT)
        return attention_call(q, keys, values, first)


class Nothing(torch.nn.Module):
    """Stands for the method that a program loads first."""

    def forward(self):
        return torch.zeros(1) + 1


@pytest.fixture(scope="module")
def served(runner_directory, tmp_path_factory):
    """A program with one method for each shape, in the native runner."""
    directory = tmp_path_factory.mktemp("attention")
    methods = {"adapter": Signature(Nothing(), ())}
    for name, (heads, kv_heads, size) in SHAPES.items():
        q, cache = torch.zeros(1, 12, heads, size), torch.zeros(1, CONTEXT, kv_heads, size)
        example = (q, cache, cache.clone(), torch.zeros(1, dtype=torch.int64))
        methods[name] = Signature(Attend(), example, {0: {1: Dim("L", min=1, max=12)}})
    with warnings.catch_warnings():  # ExecuTorch's serializer reads its schema in a deprecated way
        warnings.simplefilter("ignore")
        emit(methods, write_weights([UNUSED], directory / "w.ptd"), directory / "p.pte")
    options = serve_options(str(directory / "p.pte"), str(directory / "w.ptd"), resident=False)
    program = ExecutorProcess([str(runner_directory / "mobizo-runner"), *options], "the program")
    yield program
    program.close()


def expected(q, keys, values, start):
    """Attention of q (1, L, heads, size) at positions from `start` on, in float64; queries are scaled already."""
    (_, length, heads, _), groups = q.shape, q.shape[2] // keys.shape[2]
    output = np.empty(q.shape)
    for token, head in itertools.product(range(length), range(heads)):
        visible = slice(0, start + token + 1)
        scores = keys[0, visible, head // groups].astype(np.float64) @ q[0, token, head]
        weights = np.exp(scores - scores.max())
        output[0, token, head] = weights @ values[0, visible, head // groups] / weights.sum()
    return output


@pytest.mark.parametrize(("name", "length", "start"), [*itertools.product(SHAPES, (1, 7, 12), (0, 5, 60))])
def test_tokens_attend_to_the_filled_part_of_the_cache(served, name, length, start):
    heads, kv_heads, size = SHAPES[name]
    rng = np.random.default_rng(length + start)
    q = rng.normal(0, 3, (1, length, heads, size)).astype(np.float32)  # sharp and flat rows
    keys, values = rng.normal(0, 1, (2, 1, CONTEXT, kv_heads, size)).astype(np.float32)
    keys[:, start + length :] = values[:, start + length :] = np.nan  # not written yet
    (output,) = served.call(name, [q, keys, values, np.array([start])])
    # Scores reach 100, where float32 has steps of 8e-6; a weight is off by as much.
    np.testing.assert_allclose(output, expected(q, keys, values, start), rtol=1e-5, atol=1e-5)


def test_a_cache_that_is_full_is_refused(served):
    heads, kv_heads, size = SHAPES["whole"]
    cache = np.zeros((1, CONTEXT, kv_heads, size), np.float32)
    with pytest.raises(RuntimeFailed, match="'whole'"):
        served.call("whole", [np.zeros((1, 2, heads, size), np.float32), cache, cache, np.array([CONTEXT - 1])])
