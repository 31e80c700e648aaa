"""What the server and its scorer say to each other over their private socket: JSON objects, each after its length.

To the scorer:
    {"id", "kind": "score", "base", "adapters", "texts"}
    {"id", "kind": "generate", "base", "adapters", "text"}
    {"id", "kind": "cancel"}
From the scorer:
    {"id", "scores"}                       of a score, its last word
    {"id", "token"}                        of a generate, each token as it is found
    {"id", "finish"}                       its last word: "stop" or "length"
    {"id", "problem"}                      a problem document: the last word of either
    {"kind": "batch", ...}                 what a batch held and took (see `Batch`)

Knows no sockets.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.lora import BaseShape
from shared.recipe import Recipe, Sha256

HEADER_BYTES = 4
MOST_BYTES = 1 << 28  # of one frame; more is a broken stream


class _Frame(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServedBaseRef(_Frame):
    """A base model: where its files are, and what they must hash to. nbytes: of its weights as float32."""

    sha256: Sha256
    source: str
    nbytes: int


class ServedAdapterRef(_Frame):
    """An adapter file in the store."""

    sha256: Sha256
    recipe: Recipe
    shape: BaseShape


class TextToScore(_Frame):
    """Tokens to read, and the answers, whose tokens are predicted from position `start` on. adapter: an index."""

    tokens: tuple[int, ...] = Field(min_length=1)
    start: int
    answers: tuple[tuple[int, ...], ...]
    adapter: int | None


class TextToGrow(_Frame):
    """Tokens to go on from, by at most `most` more. ends: tokens that end a text."""

    tokens: tuple[int, ...] = Field(min_length=1)
    most: int
    adapter: int | None
    temperature: float
    top_p: float
    seed: int
    ends: tuple[int, ...]


class ScoreTask(_Frame):
    """One request to score."""

    id: int
    kind: Literal["score"] = "score"
    base: ServedBaseRef
    adapters: tuple[ServedAdapterRef, ...]
    texts: tuple[TextToScore, ...]


class GenerateTask(_Frame):
    """One request to generate."""

    id: int
    kind: Literal["generate"] = "generate"
    base: ServedBaseRef
    adapters: tuple[ServedAdapterRef, ...]
    text: TextToGrow


class Batch(_Frame):
    """One batch that the scorer ran, and how it stands after it."""

    kind: Literal["batch"] = "batch"
    work: Literal["score", "read", "grow"]  # read: the prompts of texts to grow
    rows: int
    tokens: int  # computed, padding included
    adapters: int  # different ones in the batch
    seconds: float
    held_adapters: int
    held_adapter_bytes: int
    held_bases: int
    held_base_bytes: int
    evicted_adapters: int  # since it started
    evicted_bases: int
    waiting_texts: int
    growing_texts: int
    rss_bytes: int


def pack(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """Bytes that follow a header. Raises ValueError for more than a frame may have."""
    length = int.from_bytes(header, "big")
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length


def unpack(body: bytes) -> dict[str, Any]:
    """The message in a body."""
    found: dict[str, Any] = json.loads(body)
    return found
