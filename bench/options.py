"""`bench options`: what each choice of ours is worth: one changed at a time, the same few core-seconds for each.

The base is `bench end-to-end`'s own contender. What changes is named; learning rates are not searched again but scaled
by what the change does to the gradient, so a loss of a few points may be a loss of tuning.
"""

from __future__ import annotations

import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from bench.accuracy_tables import spread
from bench.end_to_end import OURS
from bench.end_to_end_runs import TESTED, Contender, Run, Track
from bench.result import Plot, Table, write
from bench.step import notes

CAP = 60.0  # core-seconds of a run
INTERVAL = 40  # steps between two looks
LAST = 3  # looks


def changed(
    name: str, *, recipe: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **of: Any
) -> Contender:
    """Ours, otherwise. recipe, training: fields of these; of: of the contender itself."""
    return OURS.model_copy(
        update={
            "name": name,
            "recipe": OURS.recipe.model_copy(update=recipe or {}),
            "training": OURS.training.model_copy(update={"evaluation_interval": INTERVAL} | (training or {})),
            **of,
        }
    )


def options() -> list[Contender]:
    """Ours, and what differs from it in one choice each."""
    rate = OURS.training.lr
    random = {"calibrated": False}
    wide = {"rank": 16, "alpha": 32}
    return [
        changed("ours"),
        changed("A random, r = 16", recipe=wide, training={"lr": 10 * rate, "eps": 5e-2}, **random),
        changed("A random, r = 1", training={"lr": 10 * rate, "eps": 5e-2}, **random),
        changed("A from activations", kind="activations"),
        changed("A from gradients, r = 4", recipe={"rank": 4, "alpha": 32}),
        changed("loss over the full vocabulary", recipe={"loss": "full"}, training={"lr": rate / 4}),
        changed("q = 4, E = 4", recipe={"queries": 4, "effective_batch": 4}, training={"lr": rate / 2}),
        changed("q = 16, E = 1", recipe={"queries": 16, "effective_batch": 1}, training={"lr": 2 * rate}),
        changed("v_proj alone", recipe={"targets": ("v_proj",)}),
        changed("o_proj alone", recipe={"targets": ("o_proj",)}),
        changed("Gaussian noise", recipe={"noise": "gaussian"}),
        changed("constant learning rate", training={"schedule": "constant"}),
        changed("three times the learning rate", training={"lr": 3 * rate}),
        changed("fp32", recipe={"precision": "fp32"}),
    ]


def settled(run: Run) -> float:
    """Accuracy in percent, mean over a run's last looks: less of chance than the last alone. 0 of one that diverged."""
    return 0.0 if run.diverged else 100 * mean(seen.accuracy for seen in run.seen[-LAST:])


def compare(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    keep: Annotated[Path | None, typer.Option(help="finished runs stay here and are not run again")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="run nothing: what would be compared")] = False,
    only: Annotated[list[str] | None, typer.Option(help="names of options; all if none is given")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="how many")] = 1,
) -> None:
    """What each choice of ours is worth: one changed at a time, on the movie reviews."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())) if keep is None else keep
        place.mkdir(parents=True, exist_ok=True)
        track = Track(place)
        chosen = [each for each in options() if not only or each.name in only]
        if not chosen:
            raise SystemExit(f"--only: there are {', '.join(repr(each.name) for each in options())}")
        if quick:
            names = tuple((each.name,) for each in chosen)
            write(json_file, [], {}, [Table(name="options", title="Options compared", columns=("option",), rows=names)])
            return
        runs = {}
        for each in chosen:
            notes.print(each.name)
            runs[each.name] = [track.run(each.at(seed=seed), cap=CAP) for seed in range(seeds)]
    claims = {f"accuracy_{slug(name)}": mean(map(settled, of)) for name, of in runs.items()}
    rows = [run.model_dump(mode="json") for of in runs.values() for run in of]
    write(json_file, rows, claims, [_table(runs, seeds)], [_plot(runs)])


def _table(runs: dict[str, list[Run]], seeds: int) -> Table:
    return Table(
        name="options",
        title=f"One choice changed at a time, {CAP:.0f} core-seconds each",
        columns=(
            "option",
            "steps",
            "core-seconds a step",
            "last accuracy, %",
            "best seen, %",
            f"mean of the last {LAST} looks, %",
            "± of seeds",
        ),
        rows=tuple(
            (
                name,
                round(mean(run.steps for run in of)),
                mean(run.core_seconds / run.steps for run in of),
                mean(100 * run.final for run in of),
                mean(100 * max((seen.accuracy for seen in run.seen), default=0.0) for run in of),
                mean(map(settled, of)),
                spread([*map(settled, of)]),
            )
            for name, of in runs.items()
        ),
        notes=(
            f"Accuracy on {TESTED} test sentences, mean over {seeds} seed{'s' * (seeds > 1)}; the last look is after "
            f"the last step, the others every {INTERVAL}. A is from the product reviews where it is from data. "
            "Learning rates are scaled, not searched, where a choice changes the gradient's size. The schedule is that "
            "of 600 steps, so it has hardly fallen."
        ),
    )


def _plot(runs: dict[str, list[Run]]) -> Plot:
    return Plot(
        name="options",
        title="One choice changed at a time, first seed",
        x="core-seconds",
        y="accuracy, %",
        series={
            name: tuple((seen.core_seconds, 100 * seen.accuracy) for seen in of[0].seen) for name, of in runs.items()
        },
    )


def slug(name: str) -> str:
    """An option's name as a claim's."""
    return "_".join(re.findall(r"[a-z0-9]+", name.lower()))
