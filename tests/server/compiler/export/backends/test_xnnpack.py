"""XNNPACK delegates: the passes that are left out change no byte of any kind of layer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from torch import nn

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.backends.xnnpack import Example, marked_program, preprocess
from server.compiler.export.gradient_network import GradientNetwork
from server.compiler.export.network import BaseNetwork, QuantizedBase
from server.compiler.methods.inference import InferenceNetwork
from server.compiler.model.rounding import Scheme
from tests.server.compiler.conftest import ADAPTED, CONFIGS, Architectures


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "opt" else pytest.mark.slow) for name in CONFIGS]
)
def test_passes_that_are_left_out_change_no_byte(architectures: Architectures, name: str) -> None:
    base = architectures.base(name)
    kinds: list[str] = []

    def compare(layers: Sequence[nn.Module], example: Example, scheme: Scheme | None) -> list[nn.Module]:
        kinds.append(type(layers[0]).__name__)
        fewer, every = (marked_program(layers[0], example) for _ in range(2))
        assert preprocess(fewer).processed_bytes == XnnpackBackend.preprocess(every, []).processed_bytes, kinds[-1]
        return list(layers)

    quantized_base = QuantizedBase.of(load_checkpoint(str(base.directory)), "int8")
    settings = {"precision": "int8", "loss": "full", **ADAPTED[name]}
    GradientNetwork(base.recipe(estimator="gradient", **settings), quantized_base, compare).methods()
    BaseNetwork(base.recipe(queries=2, **settings), quantized_base, compare).methods()
    answers = base.recipe(queries=2, perturbed="answers", **settings)
    BaseNetwork(answers, quantized_base, compare).methods()
    InferenceNetwork(answers, quantized_base, compare).methods()
    training = {"DecoderLayer", "KeepingLayer", "ReversePass", "KeyedLayer", "AnswerLayer"}
    assert {*training, "HeadLayer", "HeadsLayer"} <= set(kinds)
