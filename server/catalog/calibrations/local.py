"""Makes a calibration from a data file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from server.compiler.checkpoints.base import base_name, locate_base
from server.compiler.checkpoints.checkpoint import open_checkpoint
from server.compiler.checkpoints.tokenizer import write_tokenizer
from shared.errors import BadRequest
from shared.recipe import BaseRef, Recipe, RecipeSettings
from shared.task import Task
from shared.tokenizer import read_tokenizer
from shared.zo.calibration import Calibration, Kind, load_calibration
from shared.zo.encoding import Example, answer_sizes, load_examples
from shared.zo.example_order import alternating

BATCH = 4  # examples of one gradient; few, so that many gradients are stacked


def calibrate_from(
    source: str,
    name: str | None,
    settings: RecipeSettings,
    kind: Kind,
    task: Task,
    data: Path,
    most: int,
    out: Path,
    progress: Callable[[str, float], None] | None = None,
    *,
    balance: bool = False,
) -> Calibration:
    """Writes a calibration made of at most `most` records of `data` to `out`, and returns it.

    source: of the base. name: its registered name; None: the name of its file. settings: targets, layers, rank
    (directions for each module), loss, sequence_length; answer_length and choices where the task's answers depend on
    the record. balance: scale each module's A so that gradients are equally large in all.
    Records are taken in an order in which answers alternate.
    Raises InvalidTask, InvalidDataset naming the line, BadRequest if `out` cannot be written, and as
    `server.compiler.calibrate.calibrate`.
    """
    files = locate_base(source)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        write_tokenizer(files, path)
        tokenizer = read_tokenizer(path.read_bytes())
    length, choices = settings.answer_length, settings.choices
    if length is None or choices is None:
        task_length, task_choices = answer_sizes(task, tokenizer)
        length, choices = length or task_length, choices or task_choices
    base = BaseRef(name=name or base_name(source, files), sha256=files.sha256)
    sizes = {"base": base, "effective_batch": BATCH, "answer_length": length, "choices": choices}
    recipe = Recipe.model_validate(settings.model_dump() | sizes)
    facts, _ = open_checkpoint(files)
    examples = _sample(load_examples(data, task, tokenizer, recipe, facts.vocabulary), most)

    from server.compiler.calibrate import calibrate

    try:
        content = calibrate(source, recipe, kind, task.name, examples, progress, out.absolute().parent, balance=balance)
        out.write_bytes(content)
    except OSError as error:
        raise BadRequest(f"{out} cannot be written ({error.strerror})") from error
    return load_calibration(content)


def _sample(examples: list[Example], most: int) -> list[Example]:
    order = alternating(0, 0, [example.correct for example in examples])
    return [examples[index] for index in order[:most]]
