"""Tiny random checkpoints of every architecture, and compiled programs by their settings."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.masking_utils import eager_mask
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

from device_agent.executors.torch_export import TorchExecutor
from shared.program_inputs import TOKEN_DTYPE
from shared.recipe import TARGETS, BaseRef, Recipe
from tests.programs import shared_store
from tests.server.compiler import reference

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from executorch.extension.pybindings.portable_lib import _load_program

    from server.compiler.checkpoints.checkpoint import inspect_base, load_checkpoint
    from server.compiler.export.gradient_network import GradientNetwork
    from server.compiler.export.lowering import unchanged
    from server.compiler.export.network import QuantizedBase
    from server.compiler.methods.gradient import GradientStep
    from server.compiler.model.backbone import Backbone
    from server.compiler.model.decoder import DecoderLayer, layer_shapes

VOCABULARY = 96


def pytest_configure(config):
    for library in ("executorch", "torch", "copyreg", "transformers"):
        config.addinivalue_line("filterwarnings", f"ignore:::{library}")


@dataclass(frozen=True)
class TinyBase:
    """A random model: its directory, and the stock model that wrote it."""

    directory: Path
    model: PreTrainedModel

    def recipe(self, **settings):
        """A recipe of tiny shapes for this base."""
        small = {"rank": 4, "alpha": 8, "sequence_length": 12, "effective_batch": 2, "answer_length": 2, "choices": 3}
        sha256 = inspect_base(str(self.directory)).sha256
        return Recipe(base=BaseRef(name="tiny", sha256=sha256), **(small | settings))


class Program:
    """A compiled program, all methods loaded, called with NumPy arrays."""

    def __init__(self, directory, manifest):
        self.directory, self.manifest = directory, manifest
        self._program = _load_program(
            str(directory / manifest.file("program").name), data_path=str(directory / manifest.file("weights").name)
        )
        self._methods = {name: self._program.load_method(name) for name in manifest.methods}

    def __call__(self, method, *inputs):
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        return [output.numpy() for output in self._methods[method].call(tensors)]

    def step(self, batch, *rest):
        """The method `step`; rest: its inputs after the batch's."""
        return self("step", batch.tokens, *self._inputs(batch, rest))

    def suffix(self, hidden, batch, *rest):
        """The method `suffix`, from the states hidden (E, S, H) of the frozen layers."""
        return self("suffix", hidden, *self._inputs(batch, rest))

    def _inputs(self, batch, rest):
        others = (value if isinstance(value, np.ndarray) else np.array([value], np.float32) for value in rest)
        return [batch.positions, *reference.labels(self.manifest.recipe, batch), batch.mask, *others]

    def load_some_b(self, size=0.1, seed=9):
        """Loads a random B (D,) and returns it."""
        flat = (size * np.random.default_rng(seed).standard_normal(self.manifest.size)).astype(np.float32)
        self("load", flat)
        return flat


class TorchProgram(Program):
    """A program for PyTorch, called by the runtime that devices run it with, on the CPU."""

    def __init__(self, directory, manifest):
        self.directory, self.manifest = directory, manifest
        files = (directory / manifest.file(role).name for role in ("program", "weights"))
        self._runtime = TorchExecutor(*files, device=torch.device("cpu"))

    def __call__(self, method, *inputs):
        return self._runtime.call(method, inputs)


def compile_to(directory, recipe, source, inference=False, calibration=None):
    """Returns a loaded program, from the cache if the present sources have compiled it before."""
    return Program(directory, shared_store().put(recipe, source, directory, inference, calibration))


def make_tiny(directory, seed=0, **overrides):
    """Writes a random Llama in the Hugging Face form. Norm weights are random too, to tell them apart."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
        }
        | overrides
    )
    return write_base(directory, LlamaForCausalLM(config))


def write_base(directory, model):
    """Writes `model` in the Hugging Face form, its norm weights and biases made random."""
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
    model.save_pretrained(directory)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, "w0")).save(str(directory / "tokenizer.json"))
    return TinyBase(directory, model)


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.2}
WINDOW = 5  # tokens, fewer than any test's sequence
# The waves of 4 pairs at base 100 are 6, 20, 63 and 199 tokens long: kept, blended and stretched.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}

CONFIGS = {
    "llama": LlamaConfig(
        **GROUPED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE
    ),
    "qwen2": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16, rope_parameters=LINEAR_ROPE),
    "opt": OPTConfig(**SMALL, ffn_dim=48, init_std=0.2),
    "lfm2": Lfm2Config(**GROUPED, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    "gemma3_text": Gemma3TextConfig(
        **GROUPED,
        head_dim=16,
        query_pre_attn_scalar=5,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": LINEAR_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
}
# Architectures whose programs with all files are compiled. They have between them both norms, both kinds of position,
# biases, sliding windows, soft caps and head norms. Most other programs of tests are a Llama's.
COMPILED = ("gemma3_text", *(pytest.param(name, marks=pytest.mark.slow) for name in ("opt", "lfm2")))
# What each one's compiled program adapts: all linear layers, odd subsets, ranks that are no multiple of 8.
ADAPTED = {
    "llama": {"targets": TARGETS},
    "qwen2": {"targets": ("k_proj", "down_proj"), "rank": 5, "layers": "last:1"},
    "qwen3": {"targets": ("q_proj", "o_proj"), "rank": 3, "layers": (0, 2)},
    "opt": {"targets": tuple(target for target in TARGETS if target != "gate_proj"), "rank": 3},
    "gemma3_text": {"targets": ("v_proj", "gate_proj"), "rank": 8},
    "lfm2": {"targets": ("o_proj", "gate_proj"), "rank": 3},
}


def softcapped(module, *inputs, **options):
    """transformers' own eager attention with the soft cap that Gemma 3's layer holds but does not pass on."""
    return eager_attention_forward(module, *inputs, **options, softcap=module.attn_logit_softcapping)


AttentionInterface.register("softcapped", softcapped)
AttentionMaskInterface.register("softcapped", eager_mask)


def make_architecture(directory, name, **overrides):
    """Writes a random model of one of CONFIGS."""
    torch.manual_seed(5)
    config = CONFIGS[name].__class__.from_dict(CONFIGS[name].to_dict() | overrides)
    model = AutoModelForCausalLM.from_config(config)
    if name == "gemma3_text":
        model.set_attn_implementation("softcapped")
    return write_base(directory, model)


@torch.no_grad()
def eager_logits(checkpoint, tokens):
    """The decoder's logits (rows, S, V) in eager PyTorch, B zero; tokens (rows, S)."""
    rows, length = tokens.shape
    recipe = Recipe(
        base=BaseRef(name="base", sha256=checkpoint.facts.sha256),
        sequence_length=length,
        answer_length=1,
        choices=1,
    )
    backbone = Backbone(checkpoint.facts, QuantizedBase.of(checkpoint, "fp32").backbone, length)
    shapes = layer_shapes(recipe, checkpoint.facts, rows, 1, adapted=False)
    layers = [DecoderLayer(shape, weights, {}) for shape, weights in zip(shapes, checkpoint.layers, strict=True)]
    hidden = backbone.forward_layers(layers, shapes, 0, backbone.embed(tokens), None)
    return backbone.cap(backbone.logits(backbone.gather_positions(hidden, torch.arange(length).repeat(rows, 1))))


def one(value):
    return torch.tensor([value], dtype=torch.float32)


def batch_inputs(recipe, batch):
    """A training method's inputs of a batch."""
    arrays = (batch.tokens, batch.positions, *reference.labels(recipe, batch), batch.mask)
    return [torch.from_numpy(array) for array in arrays]


def eager_gradient_step(base, recipe):
    """The recipe's step in eager PyTorch, its layers as they are."""
    quantized_base = QuantizedBase.of(load_checkpoint(str(base.directory)), "fp32")
    step = GradientNetwork(recipe, quantized_base, unchanged).methods()["step"].module
    assert isinstance(step, GradientStep)
    return step


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tied"), seed=1, tie_word_embeddings=True)


class Programs:
    """Compiled programs by base and settings, each loaded once a session; every call gives B zero."""

    def __init__(self, directory, store):
        self._directory, self._store = directory, store
        self._loaded = {}

    def __call__(self, base, *, inference=False, **settings):
        recipe = base.recipe(**settings)
        key = f"{recipe.id}-{inference}"
        if key not in self._loaded:
            manifest = self._store.put(recipe, base.directory, self._directory / key, inference)
            kind = TorchProgram if recipe.backend == "torch" else Program
            self._loaded[key] = kind(self._directory / key, manifest)
        program = self._loaded[key]
        program("load", np.zeros(program.manifest.size, np.float32))
        return program


@pytest.fixture(scope="session")
def programs(tmp_path_factory, program_store):
    return Programs(tmp_path_factory.mktemp("programs"), program_store)


@pytest.fixture
def plain(programs, tiny):
    """The tiny base's program with q = 4 and no other settings."""
    return programs(tiny, queries=4)


class Architectures:
    """Tiny bases of CONFIGS and their programs (q = 1, E = 2, full loss, with the file for inference)."""

    def __init__(self, directory, programs):
        self._directory, self._programs = directory, programs
        self._bases = {}

    def base(self, name):
        """A random model of CONFIGS."""
        if name not in self._bases:
            self._bases[name] = make_architecture(self._directory / name, name)
        return self._bases[name]

    def program(self, name):
        """Its program as ADAPTED says, B zero."""
        return self._programs(self.base(name), inference=True, queries=1, **ADAPTED[name])


@pytest.fixture(scope="session")
def architectures(tmp_path_factory, programs):
    return Architectures(tmp_path_factory.mktemp("architectures"), programs)


def token_batch(rng, *shape, vocabulary=VOCABULARY):
    return rng.integers(0, vocabulary, shape).astype(TOKEN_DTYPE)
