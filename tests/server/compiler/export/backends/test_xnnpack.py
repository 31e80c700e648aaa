"""XNNPACK delegates: the passes that are left out change no byte of any kind of layer, in any precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from torch import nn

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.backends.xnnpack import edge_program, layer_program, mark_linear_layers, preprocess
from server.compiler.export.gradient_network import GradientNetwork
from server.compiler.export.lowering import LayerGroup, unchanged
from server.compiler.export.network import BaseNetwork, QuantizedBase
from server.compiler.methods.inference import InferenceNetwork
from shared import program
from shared.recipe import Precision
from tests.server.compiler.conftest import ADAPTED, VOCABULARY, Architectures, make_architecture

# The families whose layers have the most parts: biases and layer norms, and norms of heads and after each block.
CASES: list[tuple[str, Precision]] = [("opt", "int8"), ("gemma3_text", "int8")]
CASES += [("llama", "fp32"), ("llama", "int8-weight"), ("llama", "int4")]


@pytest.mark.parametrize(
    ("name", "precision"),
    [pytest.param(*case, marks=() if case == ("llama", "int8-weight") else pytest.mark.slow) for case in CASES],
)
def test_passes_that_are_left_out_change_no_byte(
    architectures: Architectures, tmp_path: Path, name: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = architectures.base(name)
    expected = {"DecoderLayer", "KeyedLayer", "AnswerLayer", "HeadsLayer"}
    if precision == "int4":  # of widths that are whole groups, and without exact gradients
        base = make_architecture(tmp_path, name, intermediate_size=64)
    else:
        expected |= {"KeepingLayer", "ReversePass"}
    if precision != "fp32":
        expected.add("HeadLayer")
    if precision == "int8":  # logits in several parts
        monkeypatch.setattr(program, "MAX_LOGITS", VOCABULARY)
    expected |= {"SoftmaxHead"} if precision in ("fp32", "int8") else set()
    kinds: set[str] = set()

    def compare(groups: Sequence[LayerGroup]) -> list[list[nn.Module]]:
        for group in groups:
            layer = group.layers[0]
            if type(layer).__name__ in kinds:  # of other shapes
                continue
            kinds.add(type(layer).__name__)
            fewer = preprocess(layer_program(layer, group.example))
            every = XnnpackBackend.preprocess(mark_linear_layers(edge_program(layer, group.example)), [])
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
    assert expected <= kinds
