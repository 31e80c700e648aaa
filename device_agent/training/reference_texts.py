"""Reference texts: public texts whose loss a run measures at its start and at its end, so that an adapter which has
lost general language is noticed.

`reference_texts.txt` has the agent's own texts, in English, which `run_plan.own_texts` reads. A lease may have others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tokenizers import Tokenizer

from device_agent.training.data import sample
from shared.errors import InvalidDataset
from shared.recipe import Recipe
from shared.task import Task
from shared.zo.encoding import Example
from shared.zo.writing import Encoder, TextFormat

MAX_READ = 2_048  # tokens in the sequences of one measurement
PIECES = 8  # of one text, so that an idle agent stays small
_TASK = Task(name="reference", kind="text")


def full_loss(recipe: Recipe) -> Recipe:
    """Returns the recipe by which reference texts are encoded and scored: a program's `score` takes the whole
    vocabulary into account, whatever its loss is.
    """
    return recipe.model_copy(update={"loss": "full"})


def reference_examples(
    texts: Sequence[str], tokenizer: Tokenizer, recipe: Recipe, vocabulary: int, *, dynamic: bool
) -> list[Example]:
    """Returns pieces of the texts as examples for a recipe's `score`; the same ones whenever the texts are the same.

    A piece has at most T tokens that count, and a text at most PIECES pieces. There are as many pieces as MAX_READ
    tokens have room for, at least one: the measurement takes about as long as a few steps. Texts with tokens that the
    base lacks are left out. vocabulary: rows of the embedding table. dynamic: sequences are only as long as the texts.
    """
    # Without the base's end token: whether a text has ended is a matter of its kind, and not of language.
    encoder = Encoder(_TASK, tokenizer, full_loss(recipe), TextFormat(vocabulary=vocabulary))
    pieces: list[Example] = []
    for number, text in enumerate(texts, 1):
        with suppress(InvalidDataset):
            pieces += sample(encoder.encode({"text": text}, f"reference text {number}"), PIECES)
    length = max((piece.length for piece in pieces), default=1) if dynamic else recipe.sequence_length
    return list(sample(pieces, max(MAX_READ // length, 1)))
