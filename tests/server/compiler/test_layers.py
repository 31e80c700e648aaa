"""Layer subsets: steps against Algorithm 1, the frozen prefix that may be cached, and what a step then costs."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.cost import step_flops
from server.compiler.export.lowering import unchanged
from server.compiler.export.network import BaseNetwork, QuantizedBase
from shared.zo.noise import query_seeds
from tests.server.compiler import reference
from tests.server.compiler.checks import check_split, check_steps
from tests.server.compiler.conftest import VOCABULARY, make_tiny, token_batch

LR, EPS, STEPS = 0.05, 0.02, 4
LAYERS, FROZEN = (1, 3), 1  # of 4 layers: one frozen below the first adapted one, another between the two


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("deep"), seed=2, num_hidden_layers=4)


@pytest.fixture
def subset(programs, deep):
    return programs(deep, layers=LAYERS, queries=2, effective_batch=3)


def batches(program):
    rng = np.random.default_rng(7)
    return [reference.random_batch(rng, program.manifest.recipe, VOCABULARY) for _ in range(STEPS)]


@pytest.mark.slow
def test_steps_follow_the_algorithm(subset, deep):
    subset.load_some_b()
    check_steps(subset, deep.model, batches(subset), LR, EPS)


@pytest.mark.slow
def test_prefix_and_suffix_are_step_to_the_bit_with_states_cached_from_other_batches(subset):
    queries = subset.manifest.recipe.queries
    check_split(subset, batches(subset), [(query_seeds(5, number, queries), LR, EPS) for number in range(STEPS)])


@pytest.mark.slow
def test_the_prefix_is_the_stock_models_state(subset, deep):
    recipe = subset.manifest.recipe
    tokens = token_batch(np.random.default_rng(4), recipe.effective_batch, recipe.sequence_length)
    with torch.no_grad():
        states = deep.model(torch.from_numpy(tokens), output_hidden_states=True).hidden_states
    for length in (recipe.sequence_length, 7, 2):
        expected = states[FROZEN][:, :length].numpy()
        np.testing.assert_allclose(subset("prefix", tokens[:, :length])[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": "all"},
        {"layers": (1, 3), "targets": ("q_proj", "gate_proj", "down_proj")},
        {"layers": "last:75%", "loss": "candidates", "queries": 1},
        {"layers": (1, 3), "perturbed": "answers", "answer_length": 2},
    ],
)
def test_flops_are_what_torch_counts_in_the_step(deep, settings):
    recipe = deep.recipe(**({"queries": 2, "effective_batch": 3} | settings))
    base = QuantizedBase.of(load_checkpoint(str(deep.directory)), "fp32")
    step = BaseNetwork(recipe, base, unchanged).methods()["step"]
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        step.module(*step.example)
    # Norms take their means by a matrix product, which is no part of the count.
    norms = sum(
        sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
        if name.rsplit(".", 1)[-1] in ("norm", "final_norm")
    )
    assert norms > 0
    assert step_flops(recipe, base.facts) == counter.get_total_flops() - norms
