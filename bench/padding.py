"""`bench padding`: the share of a batch's tokens that are padding, by batch size, as in the paper's figure 6.

A program of one length pads every sequence to S. Ours (ADR 8) and the paper's pad to the longest sequence of the batch,
so that smaller batches pad less. Counted are the tokens that the network reads: the prompt, and the answer without its
last token. Batches are drawn at random, without replacement within a batch.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.programs import MOVIES, PRODUCTS, model_file, tokenizer_of
from bench.result import Claims, Row, write
from bench.runner import JsonFile, Quick
from shared.errors import InvalidDataset
from shared.recipe import BaseRef, Recipe
from shared.task_templates import named_task
from shared.zo.encoding import load_examples

BATCHES = (16, 8, 4, 2, 1)
PAPER_BATCHES = (16, 4)
DRAWS, QUICK_DRAWS = 10_000, 1000
Lengths = NDArray[np.int64]


def padding_shares(lengths: Lengths, draws: int) -> dict[int, float]:
    """Returns the share of tokens that are padding, in 0..1, by batch size.

    lengths: tokens of every sequence of a data set. draws: random batches of each size.
    """
    rng, shares = np.random.default_rng(0), {}
    for size in BATCHES:
        batches = np.stack([rng.choice(lengths, size, replace=size > len(lengths)) for _ in range(draws)])
        shares[size] = float(np.mean(1 - batches.mean(axis=1) / batches.max(axis=1)))
    return shares


def sequence_lengths(path: Path, task: str, tokenizer: Tokenizer) -> Lengths:
    """Returns the tokens that the network reads of each record's right answer, uncut."""
    base = BaseRef(name="lengths", sha256="0" * 64)
    recipe = Recipe(base=base, sequence_length=8192, answer_length=512, choices=64)
    return np.array(
        [len(example.correct_row.tokens) for example in load_examples(path, named_task(task), tokenizer, recipe)]
    )


def padding(
    json_file: JsonFile = None,
    quick: Quick = False,
    task: Annotated[str, typer.Option(help="A shipped template, for --data.")] = "sst2",
    data: Annotated[
        Path | None, typer.Option(help="JSONL of the task: a file, or a directory with train.jsonl.")
    ] = None,
) -> None:
    """Padded share of batches of 16 to 1, at a static length and at each batch's own."""
    sets = {"movie reviews": MOVIES / "train.jsonl", "product reviews": PRODUCTS / "train.jsonl"}
    if data is not None:
        sets = {f"{task}: {data.name}": data / "train.jsonl" if data.is_dir() else data}
    rows: list[Row] = []
    claims: Claims = {}
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = tokenizer_of(str(model_file()), Path(directory))
    for name, path in sets.items():
        try:
            lengths = sequence_lengths(path, task, tokenizer)
        except InvalidDataset as error:
            raise SystemExit(str(error)) from error
        shares = padding_shares(lengths, QUICK_DRAWS if quick else DRAWS)
        columns = {"data": name, "task": task, "records": len(lengths), "mean_tokens": float(lengths.mean())}
        columns |= {"longest_tokens": int(lengths.max())}
        columns |= {"static_share": float(1 - lengths.mean() / lengths.max())}
        rows += [columns | {"batch": size, "padded_share": share} for size, share in shares.items()]
        prefix = "padding_" + "".join(letter if letter.isalnum() else "_" for letter in name)
        claims |= {f"{prefix}_batch{size}": shares[size] for size in PAPER_BATCHES}
    write(json_file, rows, claims)
