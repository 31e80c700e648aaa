"""The inference file against transformers: the cache, the adapter, every architecture, and what the files hold."""

import warnings

import numpy as np
import pytest
import torch

from shared.program_inputs import TOKEN_DTYPE
from shared.recipe import BaseRef, Recipe
from tests.server.compiler import reference
from tests.server.compiler.conftest import COMPILED, VOCABULARY, token_batch

with warnings.catch_warnings():  # as in conftest
    warnings.simplefilter("ignore")
    from executorch.extension.pybindings.portable_lib import _load_program

    from server.compiler.checkpoints.checkpoint import inspect_base
    from server.compiler.methods.inference import CACHE_BYTES, WHOLE_CACHE, inference_context

TEXT = 30  # tokens: several times the window, more than the programs' S of 12
UNEVEN = (5, 1, 12, 2, 3, 7)


class Served:
    """A program's inference file, loaded with a random B."""

    def __init__(self, directory, manifest):
        program = _load_program(
            str(directory / manifest.file("inference").name), data_path=str(directory / manifest.file("weights").name)
        )
        self._methods = {name: program.load_method(name) for name in ("adapter", "load", "extend")}
        self.manifest = manifest
        self.b = np.random.default_rng(11).normal(0, 0.1, manifest.size).astype(np.float32)
        self("load", self.b)

    def __call__(self, method, *inputs):
        (output,) = self._methods[method].call([torch.from_numpy(np.ascontiguousarray(array)) for array in inputs])
        return output.numpy()

    def extend(self, tokens, start, picks):
        """Logits (P, V)."""
        return self("extend", *(np.array(values, TOKEN_DTYPE) for values in ([tokens], [start], picks)))

    def chunks(self, tokens, lengths):
        """Logits of each chunk's first and last token, and those tokens' places."""
        logits, places, start = [], [], 0
        for length in lengths:
            logits.append(self.extend(tokens[start : start + length], start, [0, length - 1]))
            places += [start, start + length - 1]
            start += length
        return np.concatenate(logits), places

    @torch.no_grad()
    def expected(self, model, tokens):
        """The stock model's logits (S, V) with this B."""
        with reference.lora(model, self.manifest.recipe, self.manifest.shape, self.b):
            return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()


@pytest.fixture(scope="module")
def inference_program(architectures):
    """The inference file of an architecture's program, loaded once."""
    programs = {}

    def get(name):
        if name not in programs:
            program = architectures.program(name)
            programs[name] = Served(program.directory, program.manifest)
        return programs[name]

    return get


@pytest.mark.parametrize("name", COMPILED)
def test_logits_are_those_of_transformers_however_the_text_is_cut(inference_program, architectures, name):
    ours, rng = inference_program(name), np.random.default_rng(1)
    tokens = token_batch(rng, TEXT)
    expected = ours.expected(architectures.base(name).model, tokens)
    for lengths in (UNEVEN, (1,) * TEXT, (12, 12, 6)):
        logits, places = ours.chunks(tokens, lengths)
        np.testing.assert_allclose(logits, expected[places], atol=1e-4)


def test_a_new_text_sees_nothing_of_the_last_one(inference_program, architectures):
    ours, rng = inference_program("gemma3_text"), np.random.default_rng(2)
    other, tokens = token_batch(rng, TEXT), token_batch(rng, 10)
    ours.chunks(other, UNEVEN)
    logits, places = ours.chunks(tokens, (7, 3))
    np.testing.assert_allclose(
        logits, ours.expected(architectures.base("gemma3_text").model, tokens)[places], atol=1e-4
    )


def test_the_adapter_is_the_one_that_was_loaded_last(inference_program, architectures):
    ours, rng = inference_program("gemma3_text"), np.random.default_rng(3)
    tokens, first = token_batch(rng, 6), ours.b
    before = ours.extend(tokens, 0, [5])
    ours.b = rng.normal(0, 0.1, first.size).astype(np.float32)
    assert ours("load", ours.b) == ours.b[:1]
    assert np.array_equal(ours("adapter"), ours.b)
    after = ours.extend(tokens, 0, [5])
    assert np.abs(after - before).max() > 1e-2
    np.testing.assert_allclose(after, ours.expected(architectures.base("gemma3_text").model, tokens)[[5]], atol=1e-4)
    ours.b = first
    ours("load", first)


def test_quantized_layers_keep_their_biases(architectures, programs):
    base = architectures.base("opt")
    program = programs(base, inference=True, queries=1, precision="int8-weight")
    ours, tokens = Served(program.directory, program.manifest), token_batch(np.random.default_rng(5), 9)
    logits, places = ours.chunks(tokens, (5, 4))
    np.testing.assert_allclose(logits, ours.expected(reference.round_weights(base.model), tokens)[places], atol=1e-4)


def test_a_text_over_the_context_is_refused(inference_program):
    ours = inference_program("gemma3_text")
    context = ours.manifest.inference_context
    assert context == 64  # all that the tiny base knows
    assert ours.extend([1], context - 1, [0]).shape == (1, VOCABULARY)
    with pytest.raises(RuntimeError):
        ours.extend([1], context, [0])


@pytest.fixture(scope="module")
def int8(tiny, programs):
    """An int8 program of estimator `stored`, whose B the inference file holds plainly; and its training program."""
    settings = {"precision": "int8", "estimator": "stored", "queries": 1, "targets": ("q_proj", "up_proj")}
    program = programs(tiny, inference=True, **settings)
    return Served(program.directory, program.manifest), program


@pytest.mark.parametrize("precision", ["fp32", pytest.param("int8", marks=pytest.mark.slow)])
def test_scores_are_those_of_the_training_program(precision, inference_program, architectures, request):
    if precision == "int8":
        ours, program = request.getfixturevalue("int8")
    else:
        ours, program = inference_program("gemma3_text"), architectures.program("gemma3_text")
    recipe, rng = program.manifest.recipe, np.random.default_rng(5)
    rows, t = recipe.score_rows, recipe.answer_length
    tokens, choices = token_batch(rng, rows, recipe.sequence_length), token_batch(rng, rows, t, recipe.choices)
    positions = np.sort(rng.integers(0, recipe.sequence_length, (rows, t))).astype(TOKEN_DTYPE)
    program("load", ours.b)
    (expected,) = program("score", tokens, positions, choices)
    for row in range(rows):
        logits = torch.from_numpy(ours.extend(tokens[row], 0, positions[row]))
        log_p = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(choices[row]))
        np.testing.assert_allclose(log_p, expected[row], atol=1e-4)


@pytest.mark.slow
def test_an_int8_text_is_the_same_however_it_is_cut(int8):
    ours, tokens = int8[0], token_batch(np.random.default_rng(6), TEXT)
    at_once, places = ours.chunks(tokens, (12, 12, 6))
    one_by_one, _ = ours.chunks(tokens, (1,) * TEXT)
    np.testing.assert_allclose(one_by_one[[2 * place for place in places]], at_once, atol=1e-3)


def test_the_context_is_the_bases_own_within_the_cost_of_its_cache_and_never_less_than_training(tiny):
    facts = inspect_base(str(tiny.directory))
    recipe = Recipe(base=BaseRef(name="x", sha256="0" * 64), answer_length=2, choices=2, sequence_length=48)
    assert inference_context(recipe, facts) == facts.context_length
    # SmolLM2-135M takes 377 MB at its own 8,192 tokens; of Llama 3.1 8B, 131,072 tokens would take 34 GB.
    smollm2 = facts.model_copy(update={"context_length": 8192, "layers": 30, "kv_heads": 3, "head_dim": 64})
    large = facts.model_copy(update={"context_length": 131072, "layers": 32, "kv_heads": 8, "head_dim": 128})
    assert [inference_context(recipe, each) for each in (smollm2, large)] == [8192, 2048]
    assert CACHE_BYTES == 2048 * 32 * 2 * 8 * 128 * 4
    capped = smollm2.model_copy(update={"attention_softcap": 50.0})
    assert inference_context(recipe, capped) == WHOLE_CACHE == 512
    assert inference_context(recipe.model_copy(update={"sequence_length": 1024}), capped) == 1024
