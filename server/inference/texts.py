"""Texts, and the models that read them, as the server gives them to the scorer's process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shared.recipe import Recipe
from shared.zo.lora import BaseShape, flat_size, lora_modules


@dataclass(frozen=True)
class ServedBaseRef:
    """A base model: the files at `source` and their sha256.

    nbytes: of its weights as float32. token_bytes: of the keys and values of one token. tokenizer: sha256 of the stored
    tokenizer.json.
    """

    sha256: str
    source: str
    nbytes: int
    token_bytes: int
    tokenizer: str


@dataclass(frozen=True)
class ServedAdapterRef:
    """An adapter file in the store."""

    sha256: str
    recipe: Recipe
    shape: BaseShape

    def __hash__(self) -> int:
        return hash(self.sha256)

    @cached_property
    def family(self) -> str:
        """What determines A and the layout of B: base, rank, alpha, targets, layers and the origin of A."""
        recipe, layers = self.recipe, self.recipe.adapted_layers(self.shape.layers)
        origin = (recipe.a_seed, recipe.calibration)
        return str((recipe.base.sha256, recipe.rank, recipe.alpha, recipe.targets, layers, *origin))

    @cached_property
    def nbytes(self) -> int:
        """Memory of A and B."""
        elements = sum(module.in_features * module.rank for module in lora_modules(self.recipe, self.shape))
        return 4 * (elements + flat_size(self.recipe, self.shape))


@dataclass(frozen=True)
class Text:
    """Tokens to read.

    To score: picks, the tokens whose log-probabilities are needed after a position. To generate: at most
    `max_tokens` tokens, up to one of `ends`; drawn: how many of the tokens to read were generated before; likeliest:
    number of the likeliest tokens to report at each position with log-probabilities; schema: JSON schema that the text
    satisfies, as JSON.
    """

    tokens: tuple[int, ...]
    adapter: ServedAdapterRef | None
    picks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    max_tokens: int = 0  # 0: a text to score
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    drawn: int = 0
    ends: tuple[int, ...] = ()
    likeliest: int | None = None
    schema: str | None = None

    @property
    def limit(self) -> int:
        """Most tokens that it may have."""
        return len(self.tokens) + self.max_tokens
