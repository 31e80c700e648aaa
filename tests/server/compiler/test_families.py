"""Every family of models that is accepted, as a tiny random model of transformers: logits, gradients, int8 and exports.

The layers run as they are, without a compilation, so that a family costs about a second. A family is one entry of
`FAMILIES` and its facts in `server/compiler/checkpoints/architectures.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from server.catalog.chat_templates import read_chat_template
from server.compiler.checkpoints.architectures import ARCHITECTURES, MULTIMODAL
from server.compiler.checkpoints.base import locate_base
from server.compiler.checkpoints.checkpoint import Checkpoint, load_checkpoint
from server.compiler.export.gradient_network import GradientNetwork
from server.compiler.export.lowering import unchanged
from server.compiler.export.network import BaseNetwork, QuantizedBase
from server.compiler.methods.inference import InferenceNetwork
from server.compiler.methods.step_inputs import StepInputs
from shared.recipe import BaseRef, Precision, Recipe
from shared.zo.lora import BaseShape, a_fingerprint, flat_size
from tests.server.compiler import reference
from tests.server.compiler.conftest import (
    GROUPED,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    VOCABULARY,
    WINDOW,
    eager_logits,
    write_base,
)
from tests.server.compiler.methods.test_gradient import step_inputs
from tests.server.peft_directory import write_peft

LENGTH, RANK, SIZE = 19, 3, 0.1
CLOSE = 1e-5  # relative, in float32
ROUNDED = 0.15  # nats: int8 rounds activations too
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0]}
TEXT = {**GROUPED, "head_dim": 16, "sliding_window": WINDOW}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

FF = {"block_multiple_of": 8, "block_ffn_dim_multiplier": 1.1}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama yarn": {"rope_parameters": YARN, "max_position_embeddings": 64},
    "llama yarn mscale": {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False}},
    "llama llama3": {"rope_parameters": LLAMA3_ROPE},
    "llama dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}},
    "mistral": {"sliding_window": WINDOW},
    "mistral3": {
        "text_config": {"model_type": "mistral", **GROUPED, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **VISION, "image_size": 16, "patch_size": 8},
    },
    "ministral": {
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
    },
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32}},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3 linear": {"head_dim": 16, "rope_parameters": LINEAR_ROPE},
    "gemma": {"head_dim": 16},
    "gemma2": {**TEXT, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**TEXT, "query_pre_attn_scalar": 5},
    "gemma3": {
        "text_config": {**TEXT, "query_pre_attn_scalar": 5, "sliding_window_pattern": 3},
        "vision_config": {**VISION, "image_size": 16, "patch_size": 8},
        "mm_tokens_per_image": 4,
    },
    "phi3": {"sliding_window": WINDOW},
    "phi3 longrope": {
        "partial_rotary_factor": 0.75,
        "rope_parameters": {**LONG, **FACTORS},
        "original_max_position_embeddings": 32,
    },
    "phi3 longer": {
        "partial_rotary_factor": 0.75,
        "rope_parameters": {**LONG, **FACTORS},
        "original_max_position_embeddings": 8,
    },
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 5.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
    },
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": WINDOW},
    "arcee": {"mlp_bias": True},
    "ernie4_5": {"use_bias": True, "head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "seed_oss": {"head_dim": 16, "attention_out_bias": False},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm parallel": {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "gpt_neox": {"partial_rotary_factor": 0.5},
    "gpt_neox serial": {"use_parallel_residual": False, "rotary_pct": 1.0},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "nemotron": {},
    "helium": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], **FF},
    "lfm2 attends last": {"full_attn_idxs": [0, 2], "conv_L_cache": 4, **FF},
    "opt": {"ffn_dim": 48, "init_std": 0.2},
    "gpt2": {},
}
SAMPLE = ("mistral", "phi3 longrope", "gemma2", "olmo2", "cohere2", "gpt2", "lfm2", "opt")  # all facts but a few


@dataclass(frozen=True)
class Family:
    """A tiny model of one family: its directory, what transformers computes of it, and what is read here."""

    directory: Path
    model: PreTrainedModel
    checkpoint: Checkpoint

    @property
    def shape(self) -> BaseShape:
        """As a manifest has it."""
        facts = self.checkpoint.facts
        return BaseShape(**{name: getattr(facts, name) for name in BaseShape.model_fields})

    def recipe(self, **settings: Any) -> Recipe:
        """A recipe that adapts every linear layer."""
        facts = self.checkpoint.facts
        usual = {
            "rank": RANK,
            "targets": facts.linears,
            "sequence_length": LENGTH,
            "answer_length": 2,
            "effective_batch": 2,
            "choices": 3,
            "queries": 1,
        }
        return Recipe(base=BaseRef(name="tiny", sha256=facts.sha256), **{**usual, **settings})

    def quantized(self, precision: Precision) -> QuantizedBase:
        """The base in a precision."""
        return QuantizedBase.of(self.checkpoint, precision)

    def random_b(self) -> np.ndarray:
        """B (D,) of `recipe`."""
        size = flat_size(self.recipe(), self.shape)
        return (SIZE * np.random.default_rng(6).standard_normal(size)).astype(np.float32)

    def stock_peft(self, flat: np.ndarray, directory: Path, model: nn.Module | None = None) -> nn.Module:
        """The stock model with the PEFT export of B (D,), as stock `peft` loads it."""
        recipe = self.recipe()
        write_peft(recipe, self.shape, flat, a_fingerprint(recipe, self.shape), directory)
        return peft.PeftModel.from_pretrained(model or copy.deepcopy(self.model), directory, is_trainable=True).eval()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Makes each family once."""
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            made[name] = make_family(tmp_path_factory.mktemp("family"), name.split()[0], FAMILIES[name])
        return made[name]

    return make


def make_family(directory: Path, model_type: str, settings: dict[str, Any]) -> Family:
    """Writes a random model with a chat template."""
    torch.manual_seed(3)
    usual = GPT2 if model_type == "gpt2" else {} if model_type in MULTIMODAL else GROUPED
    config = AutoConfig.for_model(model_type, **{**usual, **settings})
    kind = AutoModelForImageTextToText if model_type in MULTIMODAL else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager")
    base = write_base(directory, model)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return Family(directory, base.model, load_checkpoint(str(directory)))


GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
PARAMETERS = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in FAMILIES]


def relative(actual: Any, expected: Any) -> float:
    actual, expected = (torch.as_tensor(each).double() for each in (actual, expected))
    return float((actual - expected).norm() / expected.norm())


def test_every_supported_model_type_is_in_the_table() -> None:
    assert {name.split()[0] for name in FAMILIES} == {*ARCHITECTURES, *MULTIMODAL}
    assert len(ARCHITECTURES) + len(MULTIMODAL) >= 30


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_family_computes_what_transformers_does(family: Callable[[str], Family], name: str) -> None:
    """The decoder, and the file for inference, without an adapter."""
    made = family(name)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        expected = copy.deepcopy(made.model).double()(tokens).logits
        assert relative(eager_logits(made.checkpoint, tokens), expected) < CLOSE
        extend = InferenceNetwork(made.recipe(), made.quantized("fp32"), unchanged).methods()["extend"].module
        extend.cache.clear()
        picks = torch.tensor([0, LENGTH - 1], dtype=torch.int32)
        logits = extend(tokens[:1].to(torch.int32), torch.zeros(1, dtype=torch.int32), picks)
    assert relative(logits, expected[0, picks.long()]) < CLOSE


# Relative. Gradients are rounded, and with int8 activations too, which turns some of a rectifier's on or off.
GRADIENT_ERRORS: dict[Precision, float] = {"fp32": CLOSE, "int8-weight": 0.05, "int8": 0.6}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_familys_gradients_are_those_of_stock_peft_with_its_export(
    family: Callable[[str], Family], tmp_path: Path, name: str
) -> None:
    """In eight bits: of the stock model with rounded weights."""
    made = family(name)
    flat = made.random_b()
    # Where the export puts each element of B: its elements are numbered from 1.
    places = made.stock_peft(np.arange(1, len(flat) + 1, dtype=np.float32), tmp_path / "places").state_dict()
    for precision, largest_error in GRADIENT_ERRORS.items():
        recipe = made.recipe(estimator="gradient", optimizer="sgd", precision=precision)
        batch = reference.random_batch(np.random.default_rng(4), recipe, VOCABULARY)
        model = copy.deepcopy(made.model) if precision == "fp32" else reference.round_weights(made.model)
        adapted = made.stock_peft(flat, tmp_path / precision, model.double())
        loss = reference.mean_loss(answer_logits(adapted, batch), recipe, batch)
        loss.backward()
        expected = torch.zeros(len(flat), dtype=torch.float64)
        for parameter, tensor in adapted.named_parameters():
            if "lora_B" in parameter:
                place = places[parameter].long()
                expected[place[place > 0] - 1] = tensor.grad[place > 0].double()
        first, *inputs = step_inputs(recipe, batch, 1.0)
        step = GradientNetwork(recipe, made.quantized(precision), unchanged).methods()["step"].module
        step.state.assign(torch.from_numpy(flat))
        with torch.no_grad():
            ours, gradient = step.differentiate(first, StepInputs.of(recipe, inputs))
        assert precision != "fp32" or relative(ours, loss.detach().reshape(1)) < CLOSE
        assert relative(gradient, expected) < largest_error, precision


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_familys_other_layers_compute_the_same(family: Callable[[str], Family], tmp_path: Path, name: str) -> None:
    """Steps at the answer's positions alone, in float32; scores in int8, against the rounded model; chat."""
    made = family(name)
    recipe, flat = made.recipe(estimator="replay", perturbed="answers", queries=2), made.random_b()
    batch = reference.random_batch(np.random.default_rng(5), recipe, VOCABULARY)
    paths = torch.from_numpy(flat).repeat(recipe.answer_paths, 1)
    first, *inputs = step_inputs(recipe, batch, 1.0)
    step = BaseNetwork(recipe, made.quantized("fp32"), unchanged).methods()["step"].module
    step.state.assign(torch.from_numpy(flat))
    adapted = made.stock_peft(flat, tmp_path / "adapter", copy.deepcopy(made.model))
    with torch.no_grad():
        nll = step.nll(step.backbone.embed(first), StepInputs.of(recipe, inputs), paths)[:2]
        log_p = torch.log_softmax(answer_logits(adapted, batch), -1)
    expected = -log_p.gather(2, torch.from_numpy(batch.choices.astype(np.int64)))[..., 0]
    mask = torch.from_numpy(batch.mask)
    assert relative(nll * mask, expected * mask) < CLOSE

    recipe = made.recipe(precision="int8")
    score = BaseNetwork(recipe, made.quantized("int8"), unchanged).methods()["score"].module
    score.state.assign(torch.from_numpy(flat))
    rounded = made.stock_peft(flat, tmp_path / "rounded", reference.round_weights(made.model))
    rows = [torch.from_numpy(array).repeat(2, *[1] * (array.ndim - 1)) for array in vars(batch).values()]
    with torch.no_grad():
        scores = score(*rows[:3])[:2]
        log_p = torch.log_softmax(answer_logits(rounded, batch), -1)
    expected = log_p.gather(2, torch.from_numpy(batch.choices.astype(np.int64)))
    assert float((scores - expected).abs().max()) < ROUNDED

    template = read_chat_template(locate_base(str(made.directory)))
    assert template is not None
    assert template.render([{"role": "user", "content": "hello"}]) == "<user>hello"


def answer_logits(model: nn.Module, batch: reference.Batch) -> torch.Tensor:
    """The model's logits (E, T, V) that predict the answer tokens."""
    logits = model(torch.from_numpy(batch.tokens.astype(np.int64))).logits
    return logits[torch.arange(len(batch.tokens))[:, None], torch.from_numpy(batch.positions.astype(np.int64))]
