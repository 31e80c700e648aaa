"""Runs of contenders on SmolLM2-135M and the movie reviews, with the programs and calibrations that they need."""

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from bench.baselines.rounding import load_model
from bench.programs import (
    PRODUCTS,
    Compiled,
    compile_cold,
    model_file,
    movie_reviews,
    smollm2_recipe,
    tokenizer_of,
)
from bench.result import notes
from bench.training.learners import Learner, MezoProgram, ProgramLearner, torch_learner
from bench.training.runs import Contender, Run, Split, begin, kept_run, train
from device_agent.runtimes import use_threads
from server.compiler import inspect_base
from shared.canonical import sha256_hex
from shared.recipe import Recipe
from shared.zo.calibration import Kind, read_calibration
from shared.zo.encoding import Example

TARGET = 0.75
PROCESSES = 2  # that make trials at a time
TESTED = 500  # sentences of a split; with 200, seeds and the choice of sentences differ by more than settings
CALIBRATION = ["--layers", "last:8", "--targets", "v_proj,o_proj,down_proj", "--width", "4", "--loss", "candidates"]
CALIBRATION += ["--sequence-length", "36", "--task", "sst2", "--data", str(PRODUCTS / "train.jsonl"), "--json"]


@dataclass
class Track:
    """The directory of runs and of their programs. Finished runs are not repeated."""

    keep: Path
    examples: int = 200  # of the calibration

    def run(
        self,
        contender: Contender,
        *,
        split: Split = "test",
        cap: float | None = None,
        stop: bool = False,
        looks: Sequence[int] = (),
    ) -> Run:
        """Trains until its steps are done, `cap` core-seconds are spent or, if `stop`, TARGET is reached.

        looks: steps after which it is measured, besides the evaluation interval and the last step.
        """
        facts = {"split": split, "cap": cap, "stop": stop, "looks": list(looks)}
        return kept_run(self.keep, facts, contender, lambda: self._run(contender, split, cap, stop, looks))

    def try_out(self, trials: Sequence[Contender], cap: float | None) -> None:
        """Makes the trials on the validation split that are not kept yet, two at a time, each in a process of its own.

        Of a trial only the accuracy counts, so that it need not have the machine to itself.
        """
        for contender in trials:
            if contender.engine in ("program", "mezo-program"):
                self.program(contender)  # once, before both processes need it
        spawn = get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, mp_context=spawn, max_tasks_per_child=1) as pool:
            list(pool.map(partial(self.run, split="validation", cap=cap), trials))

    def _run(self, contender: Contender, split: Split, cap: float | None, stop: bool, looks: Sequence[int]) -> Run:
        # One thread: a second one waits for the first for a tenth of its time and more.
        use_threads(1)
        torch.set_num_threads(1)
        learner, tested = self._learner(contender, split)
        run = begin(contender, split, cap=cap)
        for look in train(learner, run, contender.training, tested[:TESTED], looks):
            if stop and look.accuracy >= TARGET:
                break
        learner.close()
        return run

    def _learner(self, contender: Contender, split: Split) -> tuple[Learner, Sequence[Example]]:
        """Returns the contender at its start, and the examples of a split."""
        if contender.engine in ("program", "mezo-program"):
            program = self.program(contender)
            return (ProgramLearner if contender.engine == "program" else MezoProgram)(program), program.examples(split)
        recipe, base = self.recipe(contender), str(model_file())
        tokenizer, shape = tokenizer_of(base, self.keep), inspect_base(base)
        train, tested = (movie_reviews(name, tokenizer, recipe) for name in ("train", split))
        given = None if contender.calibration is None else read_calibration(self.calibration(contender.calibration))
        model = load_model(base, "cpu", "float32")
        learner = torch_learner(contender.engine, model, recipe, shape, train, calibration=given)
        if recipe.frozen_layers(shape.layers):
            learner.keep_prefix()
        return learner, tested

    def recipe(self, contender: Contender) -> Recipe:
        """Returns the contender's whole recipe."""
        settings = contender.recipe.model_dump(exclude_none=True)
        if contender.calibration is not None:
            settings["calibration"] = sha256_hex(self.calibration(contender.calibration).read_bytes())
        return smollm2_recipe(**settings)

    def calibration(self, kind: Kind = "gradients") -> Path:
        """Returns the calibration on product reviews; makes it if needed and writes its core-seconds beside it."""
        path = self.keep / f"calibration-{kind}.safetensors"
        if not path.exists():
            notes.print(f"calibrating on the product reviews, {kind}")
            path.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-W", "ignore", "-m", "server.cli.main", "calibrate", *CALIBRATION]
            command += ["--base", str(model_file()), "--examples", str(self.examples)]
            command += ["--kind", kind, "--to", str(path)]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            path.with_suffix(".json").write_text(json.dumps({"core_seconds": spent}))
        return path

    @property
    def calibration_core_seconds(self) -> float:
        """Returns the cost of our calibration, made once for a base and a task, process start included."""
        return float(json.loads(self.calibration().with_suffix(".json").read_text())["core_seconds"])

    def program(self, contender: Contender) -> Compiled:
        """Returns the contender's program, compiled once."""
        recipe = self.recipe(contender)
        notes.print(f"opening the program of {contender.name}")
        given = None if contender.calibration is None else self.calibration(contender.calibration)
        return compile_cold(recipe, self.keep / "programs" / recipe.id[:24], calibration=given)
