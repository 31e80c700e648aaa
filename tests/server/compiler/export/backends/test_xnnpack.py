"""XNNPACK delegates: the passes that are left out change no byte of any kind of layer, in any precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from torch import nn
from torch.export import export

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.backends.xnnpack import edge_program, layer_program, mark_linear_layers, preprocess
from server.compiler.export.gradient_network import GradientNetwork
from server.compiler.export.lowering import LayerGroup, unchanged
from server.compiler.export.network import BaseNetwork, QuantizedBase
from server.compiler.methods.inference import InferenceNetwork
from shared import program
from shared.recipe import Precision
from tests.server.compiler.conftest import ADAPTED, VOCABULARY, Architectures, make_architecture

# The families whose layers have the most parts (biases and layer norms, norms of heads and after each block), and the
# kinds of layers that a precision changes.
CASES: list[tuple[str, Precision, set[str]]] = [
    ("opt", "int8", {"DecoderLayer", "AnswerLayer", "HeadsLayer", "HeadLayer", "SoftmaxHead", "ReversePass"}),
    ("gemma3_text", "int8", {"KeyedLayer", "KeepingLayer", "ReversePass"}),
    ("llama", "fp32", {"DecoderLayer", "ReversePass", "SoftmaxHead"}),
    ("llama", "int8-weight", {"DecoderLayer", "ReversePass"}),
    ("llama", "int4", {"DecoderLayer", "HeadLayer"}),
]


@pytest.mark.parametrize(
    ("name", "precision", "kinds"),
    [pytest.param(*case, marks=() if case[1] == "int8-weight" else pytest.mark.slow) for case in CASES],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_passes_that_are_left_out_change_no_byte(
    architectures: Architectures,
    tmp_path: Path,
    name: str,
    precision: Precision,
    kinds: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = architectures.base(name)
    waiting = set(kinds)
    if precision == "int4":  # of widths that are whole groups, and without exact gradients
        base = make_architecture(tmp_path, name, intermediate_size=64)
    if precision == "int8":  # logits in several parts
        monkeypatch.setattr(program, "MAX_LOGITS", VOCABULARY)

    def compare(groups: Sequence[LayerGroup]) -> list[list[nn.Module]]:
        for group in groups:
            layer = group.layers[0]
            if type(layer).__name__ not in waiting:  # of another kind, or of another shape
                continue
            waiting.remove(type(layer).__name__)
            exported = export(layer, group.example, strict=False)
            fewer = preprocess(layer_program(exported))
            every = XnnpackBackend.preprocess(mark_linear_layers(edge_program(exported)), [])
            same = fewer.processed_bytes == every.processed_bytes  # pytest would compare long bytes for minutes
            assert same, type(layer).__name__
        return unchanged(groups)

    quantized_base = QuantizedBase.of(load_checkpoint(str(base.directory)), precision)
    settings = {"precision": precision, "loss": "full", **ADAPTED[name]}
    if precision != "int4":
        GradientNetwork(base.recipe(estimator="gradient", **settings), quantized_base, compare).methods()
    BaseNetwork(base.recipe(queries=2, **settings), quantized_base, compare).methods()
    answers = base.recipe(queries=2, perturbed="answers", **settings)
    BaseNetwork(answers, quantized_base, compare).methods()
    InferenceNetwork(answers, quantized_base, compare).methods()
    assert not waiting
