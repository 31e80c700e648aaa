"""A calibration made from a data file: base found, records encoded, directions taken. Knows no terminal."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from server.compiler.base import locate_base
from server.compiler.tokenizer import write_tokenizer
from server.local_compilation import base_name
from shared.calibration import Calibration, Kind, load_calibration
from shared.encoding import Example, answer_sizes, load_examples
from shared.errors import BadRequest
from shared.order import alternating
from shared.recipe import BaseRef, Recipe, RecipeSettings
from shared.task import Task

BATCH = 4  # examples of one gradient: few, so that many gradients are stacked; their answers alternate


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
) -> Calibration:
    """Writes a calibration made of at most `most` records of `data` to `out`, and returns it.

    source: of the base. name: that it is registered by; None: its file's. settings: targets, layers, rank (directions
    for each module), loss, sequence_length; answer_length and choices where the task's answers depend on the record.
    Records are taken in an order of their own in which answers alternate.
    Raises InvalidTask, InvalidDataset naming the line, BadRequest if `out` cannot be written, and as
    `server.compiler.calibrating.calibrate`.
    """
    files = locate_base(source)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        write_tokenizer(files, path)
        tokenizer = Tokenizer.from_file(str(path))
    length, choices = settings.answer_length, settings.choices
    if length is None or choices is None:
        of_task = answer_sizes(task, tokenizer)
        length, choices = length or of_task[0], choices or of_task[1]
    base = BaseRef(name=name or base_name(source, files), sha256=files.sha256)
    sizes = {"base": base, "effective_batch": BATCH, "answer_length": length, "choices": choices}
    recipe = Recipe.model_validate(settings.model_dump() | sizes)
    examples = _chosen(load_examples(data, task, tokenizer, recipe), most)

    from server.compiler.calibrating import calibrate

    made = calibrate(source, recipe, kind, task.name, examples, progress)
    try:
        out.write_bytes(made)
    except OSError as error:
        raise BadRequest(f"{out} cannot be written ({error.strerror})") from error
    return load_calibration(made)


def _chosen(examples: list[Example], most: int) -> list[Example]:
    order = alternating(0, 0, [example.correct for example in examples])
    return [examples[index] for index in order[:most]]
