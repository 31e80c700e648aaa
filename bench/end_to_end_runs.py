"""Runs of `bench end-to-end`: one contender, seed and learning rate each, on the movie reviews, in core-seconds.

A core-second is a second that one core works for the process, whichever of its threads works (`time.process_time`):
what a battery pays for, whether one core does it or two. Steps are counted, and the frozen layers' states that they ask
for; reading, compiling and measuring accuracy are not, for any contender.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from bench.accuracy_model import load_model
from bench.accuracy_runs import Scorer
from bench.baselines.first_order import FirstOrder
from bench.baselines.mezo import Passes, emit_passes
from bench.programs import DATA, Compiled, compile_cold, model_file, reopen, smollm2_recipe
from bench.step import notes
from device_agent.evaluation import Measured, measure
from device_agent.order import ExampleOrder
from device_agent.prefix import PrefixCache
from device_agent.runtimes import use_threads
from shared.calibration import Kind
from shared.canonical import canonical_json, sha256_hex
from shared.encoding import Example, pack_step
from shared.job import TrainingSettings
from shared.noise import query_seeds
from shared.recipe import Recipe, RecipeSettings

Engine = Literal["mobizo", "mezo", "first-order"]
TESTED, VALIDATED = 500, 200
TARGET = 0.75
CALIBRATION = ["--layers", "last:8", "--targets", "v_proj,o_proj", "--width", "4"]
CALIBRATION += ["--loss", "candidates", "--seq-len", "36"]


class Contender(BaseModel):
    """One way to train. calibrated: its A comes from a calibration on the product reviews."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    engine: Engine
    recipe: RecipeSettings
    training: TrainingSettings  # steps: the most
    calibrated: bool = False
    kind: Kind = Field("gradients", exclude_if=lambda kind: kind == "gradients")  # of the calibration

    def at(self, *, seed: int = 0, lr: float | None = None) -> Contender:
        """The contender with a seed, and a learning rate if one is given. A is the same for all seeds."""
        changed = {"seed": seed} | ({} if lr is None else {"lr": lr})
        return self.model_copy(update={"training": self.training.model_copy(update=changed)})


class Seen(BaseModel):
    """What a run had come to after some steps."""

    step: int
    core_seconds: float
    seconds: float
    accuracy: float
    loss: float


class Run(BaseModel):
    """One run. cap: core-seconds after which it was ended, if it was. seen: on the split that it was measured on."""

    contender: str
    seed: int
    lr: float
    split: Literal["validation", "test"]
    steps: int
    core_seconds: float
    seconds: float
    examples: int  # seen by its steps, repeated ones counted again
    cap: float | None
    seen: list[Seen]
    diverged: bool = False

    def reached(self, accuracy: float = TARGET) -> Seen | None:
        """The first measurement at or over an accuracy."""
        return next((each for each in self.seen if each.accuracy >= accuracy), None)

    @property
    def final(self) -> float:
        """Accuracy after the last step; of a run that diverged no answer is right."""
        return 0.0 if self.diverged else self.seen[-1].accuracy


class Learner(Protocol):
    """A contender under way."""

    def step(self, indices: list[int], number: int, settings: TrainingSettings) -> float:
        """One step on these training examples; its loss."""

    def measure(self, examples: Sequence[Example]) -> Measured:
        """Accuracy and loss of what it has trained."""

    def close(self) -> None:
        """Frees its memory."""


class Program:
    """MobiZO: a program as the server compiles it, by the agent's runtime, its frozen layers' states kept."""

    def __init__(self, program: Compiled) -> None:
        manifest = program.manifest
        self._recipe, self._dynamic = manifest.recipe, manifest.dynamic_length
        self._runtime = program.open(resident=True)
        self._examples = program.examples("train")
        self._prefix = None
        if "suffix" in manifest.methods:
            self._prefix = PrefixCache(
                self._runtime, manifest.shape.hidden, self._recipe.sequence_length, dynamic=self._dynamic
            )

    def step(self, indices: list[int], number: int, settings: TrainingSettings) -> float:
        """As the agent's trainer does it."""
        examples = [self._examples[index] for index in indices]
        batch = pack_step(examples, self._recipe, dynamic=self._dynamic)
        seeds = query_seeds(settings.seed, number, self._recipe.queries)
        lr, eps = settings.lr_at(number), settings.eps_for(self._recipe)
        if self._prefix is None:
            losses, _ = self._runtime.step(batch, seeds, lr, eps)
        else:
            tokens, *labels = batch
            hidden = self._prefix.hidden(indices, examples, tokens)
            losses, _ = self._runtime.suffix(hidden, tuple(labels), seeds, lr, eps)
        return float(losses.mean())

    def measure(self, examples: Sequence[Example]) -> Measured:
        """By the program's own `score`."""
        return measure(self._runtime, examples, self._recipe, dynamic=self._dynamic)

    def close(self) -> None:
        """Frees its memory."""
        self._runtime.close()


class Mezo:
    """MeZO LoRA-FA, one path at a time; measured by the program of the same recipe."""

    def __init__(self, program: Compiled) -> None:
        self._manifest, self._recipe = program.manifest, program.manifest.recipe
        path = program.directory / "sequential.pte"
        if not path.exists():
            emit_passes(self._recipe, str(model_file()), program.file("weights"), path, "sequential")
        self._passes = Passes(self._recipe, self._manifest.size, path, program.file("weights"), "sequential")
        self._examples = program.examples("train")
        self._runtime = program.open(resident=True)

    def step(self, indices: list[int], number: int, settings: TrainingSettings) -> float:
        """Two passes a query, and the update."""
        batch = pack_step([self._examples[index] for index in indices], self._recipe, dynamic=True)
        seeds = query_seeds(settings.seed, number, self._recipe.queries)
        losses, _ = self._passes.step(batch, seeds, settings.lr_at(number), settings.eps_for(self._recipe))
        return float(losses.mean())

    def measure(self, examples: Sequence[Example]) -> Measured:
        """By the `score` of the recipe's program."""
        self._runtime.load(self._passes.adapter())
        return measure(self._runtime, examples, self._recipe, dynamic=True)

    def close(self) -> None:
        """Frees its memory."""
        self._runtime.close()


class Autograd:
    """First-order LoRA-FA in PyTorch."""

    def __init__(self, recipe: Recipe, program: Compiled) -> None:
        """program: any of the base, for its tokenizer and shape."""
        self._learner = FirstOrder(load_model(str(model_file()), "cpu", "float32"), recipe, program.manifest.shape)
        self._recipe, self._examples = recipe, program.examples("train")

    def step(self, indices: list[int], number: int, settings: TrainingSettings) -> float:
        """One step of SGD."""
        batch = pack_step([self._examples[index] for index in indices], self._recipe, dynamic=True)
        return self._learner.step(batch, settings.lr_at(number))[0]

    def measure(self, examples: Sequence[Example]) -> Measured:
        """By PyTorch."""
        scorer = Scorer(self._learner.adapted, self._learner.b.detach())
        return measure(scorer, examples, self._recipe, dynamic=True)

    def close(self) -> None:
        """Nothing to free."""


@dataclass
class Track:
    """Where runs lie, and the programs that they need. A run whose file is there is read and not run again."""

    keep: Path
    examples: int = 200  # of the calibration

    def run(
        self,
        contender: Contender,
        *,
        split: Literal["validation", "test"] = "test",
        cap: float | None = None,
        stop: bool = False,
        looks: Sequence[int] = (),
    ) -> Run:
        """Trains until its steps are done, `cap` core-seconds are spent or, if `stop`, TARGET is reached.

        looks: steps after which it is measured, besides the evaluation interval's and the last.
        """
        facts = contender.model_dump(mode="json") | {"split": split, "cap": cap, "stop": stop, "looks": list(looks)}
        path = self.keep / f"{sha256_hex(canonical_json(facts))[:24]}.json"
        if not path.exists():
            found = self._run(contender, split, cap, stop, looks)
            path.with_suffix(".part").write_text(found.model_dump_json(indent=2))
            path.with_suffix(".part").replace(path)
        return Run.model_validate_json(path.read_bytes())

    def _run(
        self,
        contender: Contender,
        split: Literal["validation", "test"],
        cap: float | None,
        stop: bool,
        looks: Sequence[int],
    ) -> Run:
        # One thread: a second one spends a tenth and more in waiting for the first.
        use_threads(1)
        torch.set_num_threads(1)
        recipe, settings = self.recipe(contender), contender.training
        program = self._program(contender, recipe)
        learner: Learner = (
            Autograd(recipe, program)
            if contender.engine == "first-order"
            else (Mezo if contender.engine == "mezo" else Program)(program)
        )
        train = program.examples("train")
        tested = program.examples(split)[: TESTED if split == "test" else VALIDATED]
        order = ExampleOrder(settings.seed, tuple(example.correct for example in train), recipe.effective_batch)
        run = Run(
            contender=contender.name,
            seed=settings.seed,
            lr=settings.lr,
            split=split,
            steps=0,
            core_seconds=0,
            seconds=0,
            examples=0,
            cap=cap,
            seen=[],
        )
        while run.steps < settings.steps and not (cap is not None and run.core_seconds >= cap):
            indices = order.indices(run.steps)
            cores, clock = time.process_time(), time.monotonic()
            loss = learner.step(indices, run.steps, settings)
            run.core_seconds += time.process_time() - cores
            run.seconds += time.monotonic() - clock
            run.steps += 1
            run.examples += len(indices)
            if not np.isfinite(loss):
                run.diverged = True
                break
            due = run.steps % settings.evaluation_interval == 0 or run.steps in looks
            if due and self._look(run, learner.measure, tested) >= TARGET and stop:
                break
        if not run.diverged and (not run.seen or run.seen[-1].step != run.steps):
            self._look(run, learner.measure, tested)
        learner.close()
        return run

    def _look(self, run: Run, measured: Callable[[Sequence[Example]], Measured], tested: Sequence[Example]) -> float:
        found = measured(tested)
        run.seen.append(
            Seen(
                step=run.steps,
                core_seconds=run.core_seconds,
                seconds=run.seconds,
                accuracy=found.accuracy,
                loss=found.loss,
            )
        )
        notes.print(
            f"{run.contender}, lr {run.lr:g}, seed {run.seed}: {found.accuracy:.1%} of {len(tested)} {run.split} "
            f"sentences, loss {found.loss:.3f}, after {run.steps} steps, {run.core_seconds:.0f} core-seconds"
        )
        return found.accuracy

    def recipe(self, contender: Contender) -> Recipe:
        """The contender's whole recipe."""
        settings = contender.recipe.model_dump(exclude_none=True)
        if contender.calibrated:
            settings["calibration"] = sha256_hex(self.calibration(contender.kind).read_bytes())
        return smollm2_recipe(**settings)

    def calibration(self, kind: Kind = "gradients") -> Path:
        """The calibration on product reviews, made if it is not there; what it took lies beside it."""
        path = self.keep / ("calibration.safetensors" if kind == "gradients" else f"calibration-{kind}.safetensors")
        if not path.exists():
            notes.print(f"calibrating on the product reviews, {kind}")
            command = [sys.executable, "-W", "ignore", "-m", "server.cli", "calibrate", "--base", str(model_file())]
            command += ["--task", "sst2", "--data", str(DATA.parent / "product_reviews" / "train.jsonl")]
            command += [*CALIBRATION, "--examples", str(self.examples), "--kind", kind, "--out", str(path), "--json"]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            path.with_suffix(".json").write_text(json.dumps({"core_seconds": spent}))
        return path

    @property
    def calibration_core_seconds(self) -> float:
        """What making ours took, once for a base and a task, the process's start included."""
        return float(json.loads(self.calibration().with_suffix(".json").read_text())["core_seconds"])

    def _program(self, contender: Contender, recipe: Recipe) -> Compiled:
        directory = self.keep / "programs" / recipe.id[:24]
        if (directory / "manifest.json").exists():
            return reopen(directory)
        notes.print(f"compiling for {contender.name}")
        calibration = self.calibration(contender.kind) if contender.calibrated else None
        return compile_cold(recipe, directory, calibration=calibration)
