"""`bench options`: what each choice of ours is worth: one changed at a time, the same few core-seconds for each.

The base is the recipe of the contender `replay` of `bench end-to-end`. Learning rates are not searched again but scaled
by what the change does to the gradient, so a loss of a few points may come from tuning. A is from the product reviews
where it is from data. The schedule is one of 600 steps, so it has hardly fallen at the end of a run.
"""

import re
import tempfile
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from bench.end_to_end.contenders import OURS
from bench.end_to_end.track import Track
from bench.result import notes, write
from bench.runner import JsonFile, Keep, Only, Quick, chosen
from bench.training.runs import Contender, Run

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
