"""Runs of contenders on SmolLM2-135M and the movie reviews, with the programs and calibrations that they need."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.baselines.adapted import load_model
from bench.programs import (
    PRODUCTS,
    CompiledProgram,
    compile_cold,
    model_file,
    movie_reviews,
    smollm2_recipe,
    tokenizer_of,
)
from bench.result import notes
from bench.training.learners import Learner, MezoProgram, ProgramLearner, TorchLearner, torch_learner
from bench.training.runs import Calibrated, Contender, Evaluation, Run, Split, load_or_run, new_run, train
from device_agent.executors.python import use_threads
from device_agent.training.data import sample
from server.compiler.checkpoints.checkpoint import inspect_base
from shared.canonical import sha256_hex
from shared.recipe import Recipe
from shared.zo.calibration import read_calibration
from shared.zo.encoding import Example

TARGET = 0.75
PROCESSES = 2  # trials at a time
TEST_SENTENCES = 500  # sentences of a split; with 200, seeds and the choice of sentences differ by more than settings
CALIBRATION = ["--task", "sst2", "--data", str(PRODUCTS / "train.jsonl"), "--json"]
CALIBRATED = {"layers": "last:8", "targets": ["v_proj", "o_proj", "down_proj"], "rank": 4, "loss": "candidates"}
CALIBRATED |= {"sequence_length": 36}


@dataclass
class ContenderRunner:
    """Runs contenders and keeps runs and programs in a directory. Finished runs are not repeated."""

    keep: Path
    examples: int = 200  # of the calibration

    def run(
        self,
        contender: Contender,
        *,
        split: Split = "test",
        cap: float | None = None,
        stop: bool = False,
        evaluation_steps: Sequence[int] = (),
    ) -> Run:
        """Trains until its steps are done, `cap` core-seconds are spent or, if `stop`, TARGET is reached.

        evaluation_steps: further steps after which it is evaluated, besides the evaluation interval and the last step.
        """
        facts = {"split": split, "cap": cap, "stop": stop, "looks": list(evaluation_steps)}
        compute = partial(self._in_own_process, self._train, contender, split, cap, stop, evaluation_steps)
        return load_or_run(self.keep, facts, contender, compute)

    def run_tested(self, contender: Contender, validated: int, tested: int) -> Run:
        """Trains a contender in PyTorch; returns its run with test accuracies. validated, tested: sentences of each."""
        facts = {"validated": validated, "tested": tested}
        compute = partial(self._in_own_process, self._train_and_test, contender, validated, tested)
        return load_or_run(self.keep, facts, contender, compute)

    def _in_own_process(self, method: Callable[..., Run], *arguments: Any) -> Run:
        """Runs a method in a process of its own.

        The agent's runtime makes the C library return large blocks to the system. In a process that had opened programs
        before, first order in PyTorch took half as many core-seconds again.
        """
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(method, *arguments).result()

    def try_out(self, trials: Sequence[Contender], cap: float | None) -> None:
        """Runs the trials on the validation split that are not kept yet, two at a time.

        Only the accuracy of a trial counts, so it may share the machine.
        """
        for contender in trials:
            if contender.engine in ("program", "mezo-program"):
                self.program(contender)  # once, before both processes need it
        with ThreadPoolExecutor(PROCESSES) as pool:
            list(pool.map(partial(self.run, split="validation", cap=cap), trials))

    def _train(
        self, contender: Contender, split: Split, cap: float | None, stop: bool, evaluation_steps: Sequence[int]
    ) -> Run:
        # One thread: a second one would wait for the first at least a tenth of the time.
        use_threads(1)
        torch.set_num_threads(1)
        learner, examples = self._learner(contender, split)
        run = new_run(contender, split, cap=cap)
        for evaluation in train(learner, run, contender.training, examples[:TEST_SENTENCES], evaluation_steps):
            if stop and evaluation.accuracy >= TARGET:
                break
        learner.close()
        return run

    def _train_and_test(self, contender: Contender, validated: int, tested: int) -> Run:
        learner, sentences = self._learner(contender, "validation")
        assert isinstance(learner, TorchLearner)
        validation, test = sample(sentences, validated), sample(self._sentences(contender, "test"), tested)
        before, best_b = learner.measure(validation), learner.b.clone()
        run = new_run(contender, "validation")
        zero_shot = Evaluation(step=0, core_seconds=0, seconds=0, accuracy=before.accuracy, loss=before.loss)
        run.evaluations, best = [zero_shot], zero_shot.rank
        if contender.engine != "none":
            for evaluation in train(learner, run, contender.training, validation):
                if evaluation.rank > best:
                    best, run.best_step, best_b = evaluation.rank, evaluation.step, learner.b.clone()
        run.best = learner.measure_at(best_b, test).accuracy
        run.final = 0.0 if run.diverged else learner.measure(test).accuracy
        return run

    def _sentences(self, contender: Contender, split: str) -> list[Example]:
        """Returns the sentences of a split, encoded for a contender."""
        return movie_reviews(split, tokenizer_of(str(model_file()), self.keep), self.recipe(contender))

    def _learner(self, contender: Contender, split: Split) -> tuple[Learner, Sequence[Example]]:
        """Returns the contender before its first step, and the examples of a split."""
        if contender.engine in ("program", "mezo-program"):
            program = self.program(contender)
            return (ProgramLearner if contender.engine == "program" else MezoProgram)(program), program.examples(split)
        recipe, shape = self.recipe(contender), inspect_base(str(model_file()))
        train, examples = (self._sentences(contender, name) for name in ("train", split))
        calibration = (
            None if contender.calibration is None else read_calibration(self.calibration(contender.calibration))
        )
        learner = torch_learner(contender.engine, load_model(), recipe, shape, train, calibration)
        if recipe.frozen_layers(shape.layers):
            learner.cache_prefix()
        return learner, examples

    def recipe(self, contender: Contender) -> Recipe:
        """Returns the contender's whole recipe."""
        settings = contender.recipe.model_dump(exclude_none=True)
        if contender.calibration is not None:
            settings["calibration"] = sha256_hex(self.calibration(contender.calibration).read_bytes())
        return smollm2_recipe(**settings)

    def calibration(self, kind: Calibrated = "gradients") -> Path:
        """Returns the calibration on product reviews; computes it if needed and writes its core-seconds beside it."""
        path = self.keep / f"calibration-{kind}.safetensors"
        if not path.exists():
            notes.print(f"calibrating on the product reviews, {kind}")
            path.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-W", "ignore", "-m", "server.cli.main", "calibrate", *CALIBRATION]
            path.with_name("calibration-recipe.json").write_text(json.dumps(CALIBRATED))
            command += ["--recipe", str(path.with_name("calibration-recipe.json"))]
            command += ["--base", str(model_file()), "--examples", str(self.examples)]
            command += ["--balance"] if kind == "balanced" else ["--kind", kind]
            command += ["--to", str(path)]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            core_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            path.with_suffix(".json").write_text(json.dumps({"core_seconds": core_seconds}))
        return path

    @property
    def calibration_core_seconds(self) -> float:
        """Returns the cost of our calibration, made once for a base and a task, process start included."""
        return float(json.loads(self.calibration("balanced").with_suffix(".json").read_text())["core_seconds"])

    def program(self, contender: Contender) -> CompiledProgram:
        """Returns the contender's program, compiled once."""
        recipe = self.recipe(contender)
        notes.print(f"opening the program of {contender.name}")
        calibration = None if contender.calibration is None else self.calibration(contender.calibration)
        return compile_cold(recipe, self.keep / "programs" / recipe.id[:24], calibration=calibration)
