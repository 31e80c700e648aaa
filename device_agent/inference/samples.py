"""What an adapter writes for records that it did not train on, beside the base model and the owner's own words.

Nothing of it leaves the device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore
from device_agent.inference.personal_model import PersonalModel, load_program
from device_agent.training.data import hold_out, sample, style_of
from shared.errors import BadRequest, InvalidDataset
from shared.zo.encoding import Example, read_jsonl
from shared.zo.writing import Encoder

BEGINNING = 16  # tokens of a document that are given


@dataclass(frozen=True)
class Sample:
    """One held-out text. own: what the record has, base and adapter: what the models write after the prompt."""

    prompt: str
    own: str
    base: str
    adapter: str


@dataclass(frozen=True)
class Samples:
    """Held-out texts. split: the file that they are from; records of `train` are those that training holds out."""

    split: str
    texts: tuple[Sample, ...]


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


def write_samples(home: AgentHome, name: str, directory: Path, count: int, most: int) -> Samples:
    """Lets the base model and then an adapter continue the prompts of held-out records, each at temperature 0.

    most: tokens of each text. Raises BadRequest if the adapter's task does not write text, InvalidDataset if no record
    fits, and as `load_program`.
    """
    opened = AdapterStore(home).open(name, *home.config().trusted_keys())
    model = load_program(home, opened)
    try:
        if not model.task.generates:
            raise BadRequest(
                f"task {model.task.name!r} of {name!r} chooses between answers; `mobizo-agent predict` shows them"
            )
        split, records = held_out(directory, count)
        encoder = Encoder(model.task, model.tokenizer, model.manifest.recipe, style_of(model.manifest))
        prompts = list(_prompts(encoder, records))
        if not prompts:
            raise InvalidDataset(f"none of {len(records)} held-out records fits task {model.task.name!r}")
        model.inference.load(np.zeros_like(opened.flat))
        base = [_continue(model, prompt, most) for prompt, _ in prompts]
        model.inference.load(opened.flat)
        adapted = [_continue(model, prompt, most) for prompt, _ in prompts]
    finally:
        model.close()
    text = model.tokenizer.decode
    return Samples(
        split,
        tuple(
            Sample(text(prompt), text(own[:most]), first, second)
            for (prompt, own), first, second in zip(prompts, base, adapted, strict=True)
        ),
    )


def _prompts(encoder: Encoder, records: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the tokens before what is to be written, and the record's own."""
    for where, record in records:
        try:
            example = encoder.encode(record, where)[0]
        except InvalidDataset:
            continue
        yield _parts(example, encoder.task.kind == "text")


def _parts(example: Example, document: bool) -> tuple[list[int], list[int]]:
    row = example.right
    if document:
        whole = [*row.prompt, *row.answer]
        cut = min(BEGINNING, max(len(whole) // 2, 1))
        return whole[:cut], whole[cut:]
    # The first turn of a conversation that counts, up to where another's turn begins.
    counted = range(len(row.answer)) if row.counted is None else row.counted
    own = [row.answer[place] for index, place in enumerate(counted) if place == index]
    return list(row.prompt), own


def _continue(model: PersonalModel, prompt: list[int], most: int) -> str:
    """Returns up to `most` tokens after a prompt, as text, without the end-of-text token."""
    room = min(most, model.context - len(prompt) + 1)
    found = []
    for token in model.inference.generate(prompt, room):
        if token == model.manifest.end_of_text:
            break
        found.append(token)
    written: str = model.tokenizer.decode(found)
    return written


def as_json(samples: Samples) -> str:
    """Returns the samples as one JSON object."""
    return json.dumps({"split": samples.split, "texts": [vars(each) for each in samples.texts]})
