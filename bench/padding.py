"""`bench padding`: what share of a batch's tokens are padding, by batch size, as in the paper's figure 6.

A program of one length pads every sequence to S; ours (ADR 8) and the paper's pad to the batch's own longest, so that
smaller batches, which more queries at fixed compute mean, pad less. Counted are tokens that the network reads: prompt,
and all of the answer but its last token. Batches are drawn at random, without replacement within a batch.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.paper_tables import PADDING
from bench.programs import DATA, model_file
from bench.result import Plot, Table, write
from bench.step import notes
from shared.encoding import load_examples
from shared.errors import InvalidDataset
from shared.recipe import BaseRef, Recipe
from shared.tasks import named_task

BATCHES = (16, 8, 4, 2, 1)
PAPER_BATCHES = (16, 4)
DRAWS, QUICK_DRAWS = 10_000, 1000
SHIPPED = {"movie reviews": DATA, "product reviews": DATA.parent / "product_reviews"}
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Padding:
    """Of one data set: shares of tokens that are padding, in 0..1."""

    static: float  # every sequence padded to the data's longest
    batched: dict[int, float]  # to the batch's longest; the mean over random batches, by batch size
    fewer: dict[int, float]  # tokens that a static program computes, over ours


def padding_of(lengths: Lengths, draws: int) -> Padding:
    """lengths: tokens of every sequence of a data set. draws: random batches of each size."""
    rng = np.random.default_rng(0)
    batched, fewer = {}, {}
    for size in BATCHES:
        batches = np.stack([rng.choice(lengths, size, replace=size > len(lengths)) for _ in range(draws)])
        longest = batches.max(axis=1)
        batched[size] = float(np.mean(1 - batches.mean(axis=1) / longest))
        fewer[size] = float(lengths.max() / longest.mean())
    return Padding(float(1 - lengths.mean() / lengths.max()), batched, fewer)


def sequence_lengths(path: Path, task: str, tokenizer: Tokenizer) -> Lengths:
    """Tokens that the network reads of the right answer's row of each record, none of them cut."""
    recipe = Recipe(
        base=BaseRef(name="lengths", sha256="0" * 64),
        sequence_length=8192,
        answer_length=512,
        choices=64,
    )
    return np.array([len(example.right.tokens) for example in load_examples(path, named_task(task), tokenizer, recipe)])


def padding(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer random batches")] = False,
    task: Annotated[str, typer.Option(help="a shipped template, for --data")] = "sst2",
    data: Annotated[
        Path | None, typer.Option(help="JSONL of that task: a file, or a directory with train.jsonl")
    ] = None,
    base: Annotated[Path | None, typer.Option(help="whose tokenizer; default: SmolLM2-135M")] = None,
) -> None:
    """Padded share of batches of 16 to 1, at a static length and at each batch's own."""
    sets = {name: (path / "train.jsonl", "sst2") for name, path in SHIPPED.items()}
    if data is not None:
        sets = {f"{task}: {data.name}": (data / "train.jsonl" if data.is_dir() else data, task)}
    tokenizer = tokenizer_of(base or model_file())
    rows: list[dict[str, Any]] = []
    found: dict[str, Padding] = {}
    for name, (path, task_name) in sets.items():
        notes.print(name)
        try:
            lengths = sequence_lengths(path, task_name, tokenizer)
        except InvalidDataset as error:
            raise SystemExit(str(error)) from error
        found[name] = padding_of(lengths, QUICK_DRAWS if quick else DRAWS)
        rows += rows_of(name, task_name, lengths, found[name])
    claims: dict[str, float] = {}
    for name, shares in found.items():
        prefix = "padding_" + "".join(letter if letter.isalnum() else "_" for letter in name)
        claims[f"{prefix}_static"] = shares.static
        claims |= {f"{prefix}_batch{size}": shares.batched[size] for size in PAPER_BATCHES}
    tasks = {name: task_name for name, (_, task_name) in sets.items()}
    write(json_file, rows, claims, [table_of(found, tasks)], [plot_of(found, tasks)])


def tokenizer_of(source: Path) -> Tokenizer:
    """A base model's tokenizer, as programs carry it."""
    from server.compiler.base import locate_base
    from server.compiler.tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(locate_base(str(source)), Path(name) / "tokenizer.json")
        return Tokenizer.from_file(str(Path(name) / "tokenizer.json"))


def rows_of(name: str, task: str, lengths: Lengths, shares: Padding) -> list[dict[str, Any]]:
    """One row a batch size."""
    return [
        {
            "data": name,
            "task": task,
            "records": len(lengths),
            "mean_tokens": float(lengths.mean()),
            "longest_tokens": int(lengths.max()),
            "batch": size,
            "static_share": shares.static,
            "padded_share": shares.batched[size],
            "static_tokens_over_ours": shares.fewer[size],
        }
        for size in BATCHES
    ]


def paper_share(task: str, size: int) -> float | None:
    """The paper's figure 6, in percent; None where it has none."""
    known = PADDING.get(task)
    return known[PAPER_BATCHES.index(size)] if known and size in PAPER_BATCHES else None


def table_of(found: dict[str, Padding], tasks: dict[str, str]) -> Table:
    """Percents, the paper's beside ours."""
    return Table(
        name="padding",
        title="Padding, % of a batch's tokens",
        columns=(
            "data",
            "batch",
            "static S",
            "to the batch's longest",
            "paper, same template",
            "tokens, static over ours",
            "same setting?",
        ),
        rows=tuple(
            (
                name,
                size,
                100 * shares.static,
                100 * shares.batched[size],
                paper_share(tasks[name], size),
                shares.fewer[size],
                "no: other data, other tokenizer" if paper_share(tasks[name], size) is not None else None,
            )
            for name, shares in found.items()
            for size in BATCHES
        ),
        notes="The mean of the batches' shares, training split, random batches; nothing is cut. Static S is the data's "
        "longest sequence: what a program of one length must have to cut nothing. The paper's figure 6 says neither "
        "split nor tokenizer, and its sst2 is GLUE's.",
    )


def plot_of(found: dict[str, Padding], tasks: dict[str, str]) -> Plot:
    """Bars by batch size, which stand in a row from 16 to 1."""
    series = {
        name: tuple((float(at), 100 * shares.batched[size]) for at, size in enumerate(BATCHES))
        for name, shares in found.items()
    }
    for task in sorted(set(tasks.values()) & set(PADDING)):
        series[f"paper, {task}"] = tuple(
            (float(BATCHES.index(size)), share) for size, share in zip(PAPER_BATCHES, PADDING[task], strict=True)
        )
    return Plot(
        name="padding",
        title="Padding to the batch's longest sequence",
        x="batch size",
        y="% of tokens",
        series=series,
        kind="bars",
        groups=tuple(map(str, BATCHES)),
    )
