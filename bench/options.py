"""`bench options`: what each choice of ours is worth: one changed at a time, the same few core-seconds for each.

The base is `bench end-to-end`'s own contender. What changes is named; learning rates are not searched again but scaled
by what the change does to the gradient, so a loss of a few points may be a loss of tuning.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.end_to_end import OURS
from bench.end_to_end_runs import TESTED, Contender, Track
from bench.result import Plot, Table, write
from bench.step import notes

CAP = 60.0  # core-seconds of a run
INTERVAL = 40  # steps between two looks


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


def compare(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    keep: Annotated[Path | None, typer.Option(help="finished runs stay here and are not run again")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="run nothing: what would be compared")] = False,
    only: Annotated[list[str] | None, typer.Option(help="names of options; all if none is given")] = None,
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
        runs = []
        for each in chosen:
            notes.print(each.name)
            runs.append(track.run(each, cap=CAP))
    table = Table(
        name="options",
        title=f"One choice changed at a time, {CAP:.0f} core-seconds each",
        columns=(
            "option",
            "steps",
            "core-seconds a step",
            "last accuracy, %",
            "best seen, %",
            "mean of the last three, %",
        ),
        rows=tuple(
            (
                run.contender,
                run.steps,
                run.core_seconds / run.steps,
                100 * run.final,
                100 * max(seen.accuracy for seen in run.seen),
                100 * sum(seen.accuracy for seen in run.seen[-3:]) / len(run.seen[-3:]),
            )
            for run in runs
        ),
        notes=(
            f"Accuracy on {TESTED} test sentences, one seed: 2 points are noise. A is from the product reviews where "
            "it is from data. Learning rates are scaled, not searched, where a choice changes the gradient's size. The "
            "schedule is that of 600 steps, so it has hardly fallen."
        ),
    )
    plot = Plot(
        name="options",
        title="One choice changed at a time",
        x="core-seconds",
        y="accuracy, %",
        series={run.contender: tuple((seen.core_seconds, 100 * seen.accuracy) for seen in run.seen) for run in runs},
    )
    claims = {"accuracy_ours": runs[0].final} if runs[0].contender == "ours" else {}
    write(json_file, [run.model_dump(mode="json") for run in runs], claims, [table], [plot])
