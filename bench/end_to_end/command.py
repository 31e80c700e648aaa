"""`bench end-to-end`: core-seconds to 75 % accuracy on the movie reviews, final accuracy and peak memory, for our
estimators and for MeZO, MobiZO and first order as in the paper. `bench options`: what each choice of ours is worth.

All train SmolLM2-135M in float32 unless stated otherwise, on the same sentences, and are measured on the same 500 test
sentences. MeZO and MobiZO run as ExecuTorch programs of this project's compiler, which makes them faster than the
paper's own code, where MeZO runs in PyTorch. A contender that has not reached 75 % at its cap counts with the cap: its
ratio to ours is then a lower bound. Ours have no such claim if a seed does not reach the target. ExecuTorch's training
extension is left out, since it does not lower the joint graph of this model.

Options: one choice of the contender `replay` is changed at a time, with the same few core-seconds for each. Learning
rates are not searched again but scaled by what the change does to the gradient, so a loss of a few points may come from
tuning. A is from the product reviews where it is from data. The schedule is one of 600 steps, so it has hardly fallen
at the end of a run.
"""

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from bench.end_to_end.contenders import FIRST_ORDER, OURS, TABLE, Entry
from bench.end_to_end.track import TARGET, Track
from bench.result import Claims, notes, write
from bench.runner import JsonFile, Keep, Only, Quick, chosen
from bench.step.memory import peak_memory
from bench.training.runs import Contender, Run

SEEDS = 3
FURTHER = (0.80, 0.83)  # accuracies whose seconds are claimed too
QUICK_STEPS = 10


@dataclass
class Tried:
    """Trials of learning rates on the validation split, and a run of the best one for each seed."""

    trials: list[Run] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def spent(self) -> float:
        """Returns the mean core-seconds to 75 %, or all that a run took without reaching it."""
        looks = [(run, run.reached(TARGET)) for run in self.runs]
        return mean(run.core_seconds if look is None else look.core_seconds for run, look in looks)

    def claims(self, prefix: str) -> Claims:
        """Returns the accuracy after the last step, and the time to each accuracy that all seeds reached."""
        found = {f"{prefix}final_accuracy": mean(run.accuracy for run in self.runs)}
        for accuracy in (TARGET, *FURTHER):
            looks = [look for run in self.runs if (look := run.reached(accuracy)) is not None]
            if len(looks) == len(self.runs):
                to = "target" if accuracy == TARGET else f"{100 * accuracy:.0f}"
                found[f"{prefix}core_seconds_to_{to}"] = mean(look.core_seconds for look in looks)
                found[f"{prefix}seconds_to_{to}"] = mean(look.seconds for look in looks)
        return found


def end_to_end(
    json_file: JsonFile = None,
    quick: Quick = False,
    keep: Keep = None,
    only: Only = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = SEEDS,
) -> None:
    """Core-seconds to 75 % on movie reviews: our estimators, MeZO, MobiZO as in the paper, first order; memory."""
    entries = {entry.contender.name: entry for entry in TABLE}
    names = chosen({**entries, "memory": None}, only)
    with tempfile.TemporaryDirectory() as directory:
        place = keep or Path(directory)
        track = Track(place, examples=16 if quick else 200)
        if quick:
            some = [entries[name].contender for name in names if name in entries and not entries[name].trial]
            runs = [track.run(each.at(steps=QUICK_STEPS, evaluation_interval=QUICK_STEPS)) for each in some]
            costs = {f"{run.contender}: core_seconds_per_step": run.core_seconds / run.steps for run in runs}
            write(json_file, [run.model_dump(mode="json") for run in runs], costs)
            return
        tried: dict[str, Tried] = {}
        for name in names:
            if name in entries:
                tried[name] = _tried(track, entries[name], range(seeds))
        claims: Claims = {}
        for name, each in tried.items():
            if (prefix := entries[name].claim) is not None:
                claims |= each.claims(prefix)
        claims |= _comparisons(tried)
        if "replay" in tried:
            claims["calibration_core_seconds"] = track.calibration_core_seconds
        rows = [run.model_dump(mode="json") for each in tried.values() for run in (*each.trials, *each.runs)]
        if "memory" in names:
            memory_rows, named = peak_memory(place / "memory")
            rows, claims = rows + memory_rows, claims | named
    write(json_file, rows, claims)


def _best_rate(trials: Sequence[Run]) -> float:
    """Returns the learning rate whose trials end with the highest mean accuracy, and among equals the lowest loss."""

    def quality(lr: float) -> tuple[float, float]:
        runs = [run for run in trials if run.lr == lr]
        return mean(run.accuracy for run in runs), -mean(run.seen[-1].loss if run.seen else math.inf for run in runs)

    return max(dict.fromkeys(run.lr for run in trials), key=quality)


def _tried(track: Track, entry: Entry, seeds: Sequence[int]) -> Tried:
    """Runs each seed at the grid's best learning rate; with a cap, until the cap or 75 %.

    A rate is tried with each seed, since seeds differ by more than rates; in shorter trials, with the first.
    """
    contender, capped = entry.contender, entry.cap is not None
    shorter = capped or entry.trial_steps is not None
    tried = [contender.at(lr=lr, seed=seed) for lr in entry.grid for seed in (seeds[:1] if shorter else seeds)]
    if entry.trial_steps is not None:
        tried = [each.at(steps=entry.trial_steps) for each in tried]
    track.try_out(tried, entry.trial)
    trials, looks = [track.run(each, split="validation", cap=entry.trial) for each in tried], list(entry.looks)
    if trials:
        contender = contender.at(lr=_best_rate(trials))
        if entry.cap is not None and entry.trial is not None:
            # One measurement on the way: it takes as long as ten steps, though it is not counted.
            steps = next(run.steps for run in trials if run.lr == contender.training.lr)
            looks = [round(steps * entry.cap / entry.trial / 2)]
    chosen_rate = [contender.at(seed=seed) for seed in seeds]
    return Tried(trials, [track.run(each, cap=entry.cap, stop=capped, looks=looks) for each in chosen_rate])


def _comparisons(tried: dict[str, Tried]) -> Claims:
    """Returns the claims that set two contenders against each other, of those that were run."""
    claims: Claims = {}
    replay, gradient, mezo = (tried.get(name) for name in ("replay", "gradient", "MeZO LoRA-FA"))
    helped, first = (tried.get(name) for name in ("first-order LoRA-FA, same help", FIRST_ORDER.name))
    paper = [tried[name] for name in ("MobiZO q=4", "MobiZO q=16") if name in tried]
    if gradient and helped:
        claims["gradient_vs_first_order_same_help"] = helped.spent / gradient.spent
    if gradient and replay:
        claims["gradient_vs_replay"] = replay.spent / gradient.spent
    if replay and paper:
        claims["core_seconds_vs_paper"] = min(each.spent for each in paper) / replay.spent  # the smaller gain
    if replay and mezo:
        claims["core_seconds_vs_mezo"] = mezo.spent / replay.spent
    if first:
        tenth, last = (mean(run.seen[at].accuracy for run in first.runs) for at in (0, -1))
        claims |= {"first_order_accuracy_tenth": tenth, "first_order_accuracy": last}
        claims["first_order_core_seconds_to_target"] = first.spent
        if replay:
            # After a tenth of our examples, and after as many.
            final = mean(run.accuracy for run in replay.runs)
            claims["gap_to_first_order_points"] = 100 * (tenth - final)
            claims["gap_to_first_order_points_same_examples"] = 100 * (last - final)
    return claims


CAP = 60.0  # core-seconds of a run
INTERVAL = 40  # steps between two measurements
LAST = 3  # measurements that the claims average
BASE = OURS.at(steps=600, lr=3e-3)


def changed(
    name: str, *, recipe: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **fields: Any
) -> Contender:
    """Returns ours with some fields changed: of the recipe, of the training settings, of the contender itself."""
    settings = BASE.training.model_copy(update={"evaluation_interval": INTERVAL} | (training or {}))
    recipe_settings = BASE.recipe.model_copy(update=recipe or {})
    return BASE.model_copy(update={"name": name, "recipe": recipe_settings, "training": settings, **fields})


RATE = BASE.training.lr
RANDOM_A: dict[str, Any] = {"calibration": None, "training": {"lr": 10 * RATE, "eps": 5e-2}}
OPTIONS = {
    each.name: each
    for each in (
        changed("ours"),
        changed("A random, r = 16", recipe={"rank": 16, "alpha": 32}, **RANDOM_A),
        changed("A random, r = 1", **RANDOM_A),
        changed("A from activations", calibration="activations"),
        changed("A from gradients, r = 4", recipe={"rank": 4, "alpha": 32}),
        changed("loss over the full vocabulary", recipe={"loss": "full"}, training={"lr": RATE / 4}),
        changed("q = 4, E = 4", recipe={"queries": 4, "effective_batch": 4}, training={"lr": RATE / 2}),
        changed("q = 16, E = 1", recipe={"queries": 16, "effective_batch": 1}, training={"lr": 2 * RATE}),
        changed("v_proj alone", recipe={"targets": ("v_proj",)}),
        changed("o_proj alone", recipe={"targets": ("o_proj",)}),
        changed("Gaussian noise", recipe={"noise": "gaussian"}),
        changed("constant learning rate", training={"schedule": "constant"}),
        changed("three times the learning rate", training={"lr": 3 * RATE}),
        changed("fp32", recipe={"precision": "fp32"}),
    )
}


def settled(run: Run) -> float:
    """Returns the mean accuracy in percent over the last measurements, which varies less; 0 after divergence."""
    return 0.0 if run.diverged else 100 * mean(seen.accuracy for seen in run.seen[-LAST:])


def options(
    json_file: JsonFile = None,
    quick: Quick = False,
    keep: Keep = None,
    only: Only = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 1,
) -> None:
    """What each choice of ours is worth: one changed at a time, on the movie reviews. --quick only lists them."""
    names = chosen(OPTIONS, only)
    if quick:
        write(json_file, [{"option": name} for name in names], {})
        return
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as directory:
        track = Track(keep or Path(directory))
        for name in names:
            notes.print(name)
            runs[name] = [track.run(OPTIONS[name].at(seed=seed), cap=CAP) for seed in range(seeds)]
    claims = {f"accuracy_{slug(name)}": mean(map(settled, of)) for name, of in runs.items()}
    write(json_file, [run.model_dump(mode="json") for of in runs.values() for run in of], claims)


def slug(name: str) -> str:
    """Returns an option's name in the form of a claim."""
    return "_".join(re.findall(r"[a-z0-9]+", name.lower()))
