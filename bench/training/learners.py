"""Contenders in training: programs in the agent's runtime, and baselines in PyTorch, behind one interface."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bench.baselines.adapted import AdaptedModel, split_backbone
from bench.baselines.mezo_program import SequentialMezo, emit_sequential
from bench.baselines.steps import EagerMobizo, FirstOrder
from bench.programs import Batch, CompiledProgram, model_file
from device_agent.executors import F32
from device_agent.executors.program import Rates, TrainingProgram
from device_agent.training.evaluation import SplitMetrics, log_probabilities, split_metrics
from device_agent.training.prefix import PrefixCache, UpcomingTexts
from shared.program_inputs import TOKEN_DTYPE
from shared.recipe import Recipe
from shared.training_settings import TrainingSettings
from shared.zo.calibration import Calibration
from shared.zo.encoding import Example
from shared.zo.lora import BaseShape
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_step

Engine = Literal["none", "program", "mezo-program", "first-order", "mezo", "mobizo"]  # the last three in PyTorch


class Learner(ABC):
    """A contender in training on `train`."""

    def __init__(self, recipe: Recipe, train: Sequence[Example], *, dynamic: bool) -> None:
        """dynamic: batches are padded only to their longest example."""
        self.recipe, self.train, self.dynamic = recipe, train, dynamic
        self.prefix: PrefixCache | None = None
        self.frozen: PrefixCache | None = None  # of evaluated examples: evaluations must not speed up steps
        self._upcoming = UpcomingTexts()

    def expect(self, indices: Iterable[int]) -> None:
        """Declares the examples of the coming steps, in order. Their states fill rows that would be empty."""
        self._upcoming = UpcomingTexts(self.train[index].correct_row.tokens for index in indices)

    def inputs(self, indices: list[int]) -> Batch:
        """Packs training examples; with a prefix cache, hidden states stand in place of the tokens."""
        examples = [self.train[index] for index in indices]
        tokens, *labels = pack_step(examples, self.recipe, dynamic=self.dynamic)
        if self.prefix is None:
            return (tokens, *labels)
        texts = [example.correct_row.tokens for example in examples]
        return (self.prefix.hidden(texts, tokens.shape, self._upcoming), *labels)

    def _cache(self, program: TrainingProgram, size: int) -> None:
        """Keeps the frozen layers' states from now on. program: has `prefix`. size: of a hidden state."""
        rows, length = self.recipe.effective_batch, self.recipe.sequence_length
        self.prefix = PrefixCache(program, size, rows, length, dynamic=self.dynamic)
        self.frozen = PrefixCache(program, size, rows, length, dynamic=self.dynamic)

    def prepare(self) -> None:  # noqa: B027  # a stock model is in memory already
        """Loads the methods of the steps, so that their times do not include loading."""

    @abstractmethod
    def step(self, indices: list[int], number: int, settings: TrainingSettings) -> float:
        """Trains one step on these examples; returns its loss."""

    @abstractmethod
    def measure(self, examples: Sequence[Example]) -> SplitMetrics:
        """Returns accuracy and loss of the current B. Raises Diverged if a score is not finite."""

    @abstractmethod
    def close(self) -> None:
        """Frees the memory, and restores a stock model."""


class ProgramLearner(Learner):
    """The server's program in the agent's runtime, with the frozen layers' states cached, as the agent trains it."""

    def __init__(self, program: CompiledProgram) -> None:
        manifest, recipe = program.manifest, program.recipe
        super().__init__(recipe, program.examples("train"), dynamic=manifest.dynamic_length)
        self._runtime = program.open(resident=True)
        if "suffix" in manifest.methods:
            self._cache(self._runtime, manifest.shape.hidden)

    def prepare(self) -> None:
        """Loads and packs the methods of a step with cached states. A step from tokens is loaded by the first one."""
        if self.prefix is not None:
            self._runtime.prefix(np.zeros((self.recipe.effective_batch, self.recipe.sequence_length), TOKEN_DTYPE))

    def step(self, indices: list[int], number: int, settings: TrainingSettings) -> float:
        """Runs the program's step of its estimator."""
        batch, runtime, lr = self.inputs(indices), self._runtime, settings.lr_at(number)
        hidden, batch = (None, batch) if self.prefix is None else (batch[0], batch[1:])
        if self.recipe.estimator == "gradient":
            rates = Rates(lr, settings.max_norm, settings.weight_decay)
            losses, _ = runtime.gradient_step(batch, rates, hidden=hidden)
        else:
            seeds = query_seeds(settings.seed, number, self.recipe.queries)
            losses, _ = runtime.step(batch, seeds, lr, settings.eps_for(self.recipe), hidden=hidden)
        return float(losses.mean())

    def measure(self, examples: Sequence[Example]) -> SplitMetrics:
        """Measures with the program's own `score`."""
        scores = log_probabilities(self._runtime, examples, self.recipe, dynamic=self.dynamic, frozen=self.frozen)
        return split_metrics(examples, scores, self.recipe)

    def close(self) -> None:
        """Frees the program."""
        self._runtime.close()


class MezoProgram(ProgramLearner):
    """MeZO LoRA-FA, one path at a time; measured by the program of the same recipe."""

    def __init__(self, program: CompiledProgram) -> None:
        super().__init__(program)
        path, weights = program.directory / "sequential.pte", program.path("weights")
        if not path.exists():
            emit_sequential(self.recipe, str(model_file()), path)
        self.prefix = self.frozen = None
        self._mezo = SequentialMezo(self.recipe, program.manifest.size, path, weights)

    def step(self, indices: list[int], number: int, settings: TrainingSettings) -> float:
        """Runs two passes per query, and the update."""
        seeds = query_seeds(settings.seed, number, self.recipe.queries)
        lr, eps = settings.lr_at(number), settings.eps_for(self.recipe)
        return float(self._mezo.step(self.inputs(indices), seeds, lr, eps)[0].mean())

    def measure(self, examples: Sequence[Example]) -> SplitMetrics:
        """Measures with the `score` of the recipe's program."""
        self._runtime.load(self._mezo.adapter())
        return super().measure(examples)


class TorchLearner(Learner):
    """A baseline in PyTorch. `close` removes its hooks from the model."""

    def __init__(self, stepper: FirstOrder | EagerMobizo, train: Sequence[Example]) -> None:
        self._stepper, self.model = stepper, stepper.adapted
        super().__init__(self.model.recipe, train, dynamic=True)

    def cache_prefix(self) -> None:
        """Computes the frozen layers below the first adapted one only once for each training example."""
        shape = self.model.shape
        frozen = self.recipe.frozen_layers(shape.layers)
        below, self.model.upper = split_backbone(self.model.model.model, frozen)
        runtime: Any = _LowerLayers(below)
        self._cache(runtime, shape.hidden)

    @property
    def b(self) -> Tensor:
        """Returns the current B (D,)."""
        return self._stepper.b.detach()

    def step(self, indices: list[int], number: int, settings: TrainingSettings) -> float:
        """Runs one step: by autograd, or in the directions that the product uses."""
        batch, lr = self.inputs(indices), settings.lr_at(number)
        if isinstance(self._stepper, FirstOrder):
            return self._stepper.step(batch, lr)[0]
        seeds = query_seeds(settings.seed, number, self.recipe.queries)
        return float(self._stepper.step(batch, seeds, lr, settings.eps_for(self.recipe))[0].mean())

    def measure(self, examples: Sequence[Example]) -> SplitMetrics:
        """Measures in PyTorch."""
        return self.measure_at(self.b, examples)

    def measure_at(self, b: Tensor, examples: Sequence[Example]) -> SplitMetrics:
        """Measures another B."""
        runtime: Any = _Scorer(self.model, b)
        scores = log_probabilities(runtime, examples, self.recipe, dynamic=True, frozen=self.frozen)
        return split_metrics(examples, scores, self.recipe)

    def close(self) -> None:
        """Removes the hooks from the model."""
        self.model.remove()


def torch_learner(
    engine: Engine,
    model: Any,
    recipe: Recipe,
    shape: BaseShape,
    train: Sequence[Example],
    calibration: Calibration | None = None,
) -> TorchLearner:
    """Returns a baseline of a stock model, before its first step."""
    if engine == "first-order":
        return TorchLearner(FirstOrder(model, recipe, shape, calibration=calibration), train)
    adapted = AdaptedModel(model, recipe, shape, calibration)
    return TorchLearner(EagerMobizo(adapted, paths_at_once=1 if engine == "mezo" else recipe.paths), train)


class _LowerLayers:
    """The `prefix` method of a runtime, for the lower layers of a model in PyTorch."""

    def __init__(self, backbone: Any) -> None:
        self._backbone = backbone

    @torch.no_grad()
    def prefix(self, tokens: Any) -> F32:
        states: F32 = self._backbone(torch.from_numpy(tokens), use_cache=False).last_hidden_state.numpy()
        return states


class _Scorer:
    """The method `score` of a program, for a B in PyTorch."""

    def __init__(self, model: AdaptedModel, b: Tensor) -> None:
        self._model, self._b = model, b

    def score(self, inputs: Any, hidden: F32 | None = None) -> Any:
        return self._model.score(inputs if hidden is None else (hidden, *inputs), self._b)
