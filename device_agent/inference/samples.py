"""What an adapter writes for records that it did not train on, beside the base model and the owner's own words.

The texts never leave the device.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore
from device_agent.inference.chat import ends
from device_agent.inference.personal_model import PersonalModel, load_program
from device_agent.training.data import hold_out, sample, text_format_of
from shared.errors import BadRequest, InvalidDataset
from shared.task_records import accepted_answers
from shared.zo.encoding import Example, read_jsonl
from shared.zo.writing import Encoder

BEGINNING = 16  # tokens of a document that are given


@dataclass(frozen=True)
class Prompt:
    """tokens: those before what is to be written. own: the record's. right: the texts that are right; None: `own`."""

    tokens: list[int]
    own: list[int]
    right: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Sample:
    """One held-out text. own: what the record has, base and adapter: what the models write after the prompt."""

    prompt: str
    own: str
    base: str
    adapter: str


def held_out(directory: Path, count: int) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Returns the split and up to `count` of its records, each with its place in its file; the same ones each time.

    Raises InvalidDataset if the data set has no record that training would hold out.
    """
    for split in ("test", "validation"):
        path = directory / f"{split}.jsonl"
        if path.is_file() and (records := list(read_jsonl(path))):
            return split, list(sample(records, count))
    _, records = hold_out(list(read_jsonl(directory / "train.jsonl")), directory)
    return "train", list(sample(records, count))


def write_samples(home: AgentHome, name: str, directory: Path, count: int, max_tokens: int) -> tuple[str, list[Sample]]:
    """Lets the base model and then an adapter continue the prompts of held-out records, each at temperature 0.

    Returns the split that the records are from, and their texts; of `train` they are those that training holds out.

    max_tokens: of each text. Raises BadRequest if the adapter's task does not write text, InvalidDataset if no record
    fits, and as `load_program`.
    """
    opened = AdapterStore(home).open(name, *home.config().trusted_keys())
    model = load_program(home, opened)
    try:
        if not model.task.generates:
            raise BadRequest(
                f"task {model.task.name!r} of {name!r} chooses between answers; `mobizo-agent predict` shows them"
            )
        split, prompts = held_out_prompts(model, directory, count)
        model.inference.load(np.zeros_like(opened.flat))
        base = [continue_text(model, prompt.tokens, max_tokens) for prompt in prompts]
        model.inference.load(opened.flat)
        adapted = [continue_text(model, prompt.tokens, max_tokens) for prompt in prompts]
    finally:
        model.close()
    text = model.tokenizer.decode
    return split, [
        Sample(text(prompt.tokens), text(prompt.own[:max_tokens]), first, second)
        for prompt, first, second in zip(prompts, base, adapted, strict=True)
    ]


def held_out_prompts(
    model: PersonalModel, directory: Path, count: int, now: datetime | None = None
) -> tuple[str, list[Prompt]]:
    """Returns the held-out split and the prompts of its records. Raises InvalidDataset if none fits the task."""
    split, records = held_out(directory, count)
    encoder = Encoder(model.task, model.tokenizer, model.manifest.recipe, text_format_of(model.manifest, now))
    prompts = []
    for location, record in records:
        with suppress(InvalidDataset):
            prompt = _parts(encoder.encode(record, location)[0], model.task.kind == "text")
            right = accepted_answers(model.task, record, location) if model.task.kind == "completion" else None
            prompts.append(replace(prompt, right=right))
    if not prompts:
        raise InvalidDataset(f"none of {len(records)} held-out records fits task {model.task.name!r}")
    return split, prompts


def _parts(example: Example, document: bool) -> Prompt:
    row = example.correct_row
    if document:
        tokens = [*row.prompt, *row.answer]
        cut = min(BEGINNING, max(len(tokens) // 2, 1))
        return Prompt(tokens[:cut], tokens[cut:])
    # The first turn of a conversation that counts, up to where another's turn begins.
    positions = range(len(row.answer)) if row.counted is None else row.counted
    own = [row.answer[position] for index, position in enumerate(positions) if position == index]
    return Prompt(list(row.prompt), own)


def continue_text(model: PersonalModel, prompt: list[int], max_tokens: int) -> str:
    """Returns up to `max_tokens` tokens after a prompt, as text, without the token that ends it."""
    limit = min(max_tokens, model.context - len(prompt) + 1)
    end_tokens = ends(model)
    generated = (each.token for each in model.inference.generate(prompt, limit))
    text: str = model.tokenizer.decode(list(takewhile(lambda token: token not in end_tokens, generated)))
    return text
