"""`bench end-to-end`: core-seconds to 75 % accuracy on the movie reviews, final accuracy and peak memory, for our
estimators and for MeZO, MobiZO and first order as in the paper.

All train SmolLM2-135M in float32 unless stated otherwise, on the same sentences, and are measured on the same 500 test
sentences. MeZO and MobiZO run as ExecuTorch programs of this project's compiler, which makes them faster than the
paper's own code, where MeZO runs in PyTorch. A contender that has not reached 75 % at its cap counts with the cap: its
ratio to ours is then a lower bound. Ours have no such claim if a seed does not reach the target. ExecuTorch's training
extension is left out, since it does not lower the joint graph of this model.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from bench.end_to_end.contender_runner import TARGET, ContenderRunner
from bench.end_to_end.contenders import FIRST_ORDER, TABLE, Entry
from bench.result import Claims, write
from bench.runner import SEEDS, JsonFile, Keep, Only, Quick, select_parts
from bench.step.memory import peak_memory
from bench.training.runs import Run

FURTHER_TARGETS = (0.80, 0.83)  # accuracies whose seconds are claimed too
QUICK_STEPS = 10


@dataclass
class ContenderRuns:
    """Trials of learning rates on the validation split, and a run of the best one for each seed."""

    trials: list[Run] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def core_seconds_to_target(self) -> float:
        """Returns the mean core-seconds to 75 %; a run that did not reach it counts with all its core-seconds."""
        evaluations = [(run, run.first_reaching(TARGET)) for run in self.runs]
        return mean(
            run.core_seconds if evaluation is None else evaluation.core_seconds for run, evaluation in evaluations
        )

    def claims(self, prefix: str) -> Claims:
        """Returns the accuracy after the last step, and the time to each accuracy that all seeds reached."""
        claims = {f"{prefix}final_accuracy": mean(run.accuracy for run in self.runs)}
        for accuracy in (TARGET, *FURTHER_TARGETS):
            evaluations = [evaluation for run in self.runs if (evaluation := run.first_reaching(accuracy)) is not None]
            if len(evaluations) == len(self.runs):
                suffix = "target" if accuracy == TARGET else f"{100 * accuracy:.0f}"
                claims[f"{prefix}core_seconds_to_{suffix}"] = mean(
                    evaluation.core_seconds for evaluation in evaluations
                )
        return claims


def end_to_end(json_file: JsonFile = None, quick: Quick = False, keep: Keep = None, only: Only = None) -> None:
    """Core-seconds to 75 % on movie reviews: our estimators, MeZO, MobiZO as in the paper, first order; memory."""
    entries = {entry.contender.name: entry for entry in TABLE}
    if quick:  # a short run of each contender whose rate needs no trials of its own
        short = {"steps": QUICK_STEPS, "evaluation_interval": QUICK_STEPS}
        entries = {
            name: Entry(entry.contender.with_training(**short), entry.claim)
            for name, entry in entries.items()
            if not entry.trial_cap
        }
    names = select_parts({**entries, "memory": None}, only)
    with tempfile.TemporaryDirectory() as temporary:
        directory = keep or Path(temporary)
        runner = ContenderRunner(directory, examples=16 if quick else 200)
        runs_by_contender = {
            name: _run_contender(runner, entries[name], SEEDS[: 1 if quick else None])
            for name in names
            if name in entries
        }
        claims = _comparisons(runs_by_contender)
        for name, contender_runs in runs_by_contender.items():
            if (prefix := entries[name].claim) is not None:
                claims |= contender_runs.claims(prefix)
        if "replay" in runs_by_contender:
            claims["calibration_core_seconds"] = runner.calibration_core_seconds
        if "memory" in names and not quick:
            claims |= peak_memory(directory / "memory")
    rows = [run.model_dump(mode="json") for each in runs_by_contender.values() for run in (*each.trials, *each.runs)]
    write(json_file, rows, claims)


def _best_rate(trials: Sequence[Run]) -> float:
    """Returns the learning rate whose trials end with the highest mean accuracy, and among equals the lowest loss."""

    def quality(lr: float) -> tuple[float, float]:
        runs = [run for run in trials if run.lr == lr]
        losses = [run.evaluations[-1].loss if run.evaluations else math.inf for run in runs]
        return mean(run.accuracy for run in runs), -mean(losses)

    return max(dict.fromkeys(run.lr for run in trials), key=quality)


def _run_contender(runner: ContenderRunner, entry: Entry, seeds: Sequence[int]) -> ContenderRuns:
    """Runs each seed at the grid's best learning rate; with a cap, until the cap or 75 %.

    A rate is tried with each seed, since seeds differ by more than rates; in shorter trials, with the first.
    """
    contender, capped = entry.contender, entry.cap is not None
    shorter = capped or entry.trial_steps is not None
    trial_contenders = [
        contender.with_training(lr=lr, seed=seed) for lr in entry.grid for seed in (seeds[:1] if shorter else seeds)
    ]
    if entry.trial_steps is not None:
        trial_contenders = [trial.with_training(steps=entry.trial_steps) for trial in trial_contenders]
    runner.try_out(trial_contenders, entry.trial_cap)
    trials = [runner.run(trial, split="validation", cap=entry.trial_cap) for trial in trial_contenders]
    evaluation_steps = list(entry.evaluation_steps)
    if trials:
        contender = contender.with_training(lr=_best_rate(trials))
        if entry.cap is not None and entry.trial_cap is not None:
            # One measurement on the way: it takes as long as ten steps, though it is not counted.
            steps = next(run.steps for run in trials if run.lr == contender.training.lr)
            evaluation_steps = [round(steps * entry.cap / entry.trial_cap / 2)]
    seeded_contenders = [contender.with_training(seed=seed) for seed in seeds]
    return ContenderRuns(
        trials,
        [
            runner.run(seeded, cap=entry.cap, stop=capped, evaluation_steps=evaluation_steps)
            for seeded in seeded_contenders
        ],
    )


def _comparisons(runs_by_contender: dict[str, ContenderRuns]) -> Claims:
    """Returns the claims that compare two contenders, as far as both were run."""
    claims: Claims = {}
    replay, gradient, mezo = (runs_by_contender.get(name) for name in ("replay", "gradient", "MeZO LoRA-FA"))
    same_help, first = (runs_by_contender.get(name) for name in ("first-order LoRA-FA, same help", FIRST_ORDER.name))
    paper = [runs_by_contender[name] for name in ("MobiZO q=4", "MobiZO q=16") if name in runs_by_contender]
    if gradient and same_help:
        claims["gradient_vs_first_order_same_help"] = same_help.core_seconds_to_target / gradient.core_seconds_to_target
    if replay and paper:
        # The smaller gain.
        fastest = min(contender_runs.core_seconds_to_target for contender_runs in paper)
        claims["core_seconds_vs_paper"] = fastest / replay.core_seconds_to_target
    if replay and mezo:
        claims["core_seconds_vs_mezo"] = mezo.core_seconds_to_target / replay.core_seconds_to_target
    if first:
        after_tenth, after_last = (mean(run.evaluations[index].accuracy for run in first.runs) for index in (0, -1))
        claims |= {"first_order_accuracy_tenth": after_tenth, "first_order_accuracy": after_last}
        claims["first_order_core_seconds_to_target"] = first.core_seconds_to_target
        if replay:
            # First order after a tenth of the examples of `replay`, and after as many.
            final = mean(run.accuracy for run in replay.runs)
            claims["gap_to_first_order_points"] = 100 * (after_tenth - final)
            claims["gap_to_first_order_points_same_examples"] = 100 * (after_last - final)
    return claims
