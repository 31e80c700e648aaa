"""A method's graph gets the operators that ExecuTorch's own conversion gives it, in the same order."""

import pytest
from executorch.exir import to_edge
from torch.utils._pytree import tree_leaves

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.emission import edge_config, edge_program
from server.compiler.export.gradient_network import GradientNetwork
from server.compiler.export.lowering import unchanged
from server.compiler.export.network import BaseNetwork, QuantizedBase


def operators(program):
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return [
        (
            str(node.target),
            [(each.shape, each.dtype) for each in tree_leaves(node.meta["val"]) if hasattr(each, "dtype")],
        )
        for node in calls
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GradientNetwork, {"estimator": "gradient", "precision": "int8", "loss": "full", "optimizer": "adam"}),
        (BaseNetwork, {"estimator": "replay", "precision": "fp32", "layers": "last:1"}),
    ],
)
def test_operators_are_those_of_to_edge(tiny, kind, settings):
    recipe = tiny.recipe(**settings)
    base = QuantizedBase.of(load_checkpoint(str(tiny.directory)), recipe.precision)
    methods = kind(recipe, base, unchanged).methods()
    for signature in (methods["step"], methods["score"]):
        expected = to_edge(signature.export(), compile_config=edge_config()).exported_program()
        assert operators(edge_program(signature.export())) == operators(expected)
