"""The messages between the server and its scorer process: length-prefixed JSON objects on a private socket.

To the scorer:
    {"id", "kind": "score", "base", "adapters", "texts"}
    {"id", "kind": "generate", "base", "adapters", "text"}
    {"id", "kind": "cancel"}
From the scorer:
    {"id", "scores"}                       result of a score
    {"id", "token", ...}                   each token of a generate (see `GeneratedToken`)
    {"id", "finish"}                       end of a generate: "stop" or "length"
    {"id", "problem"}                      failure of either, as a problem document
    {"kind": "batch", ...}                 statistics of a batch (see `Batch`)
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.recipe import Recipe, Sha256
from shared.zo.lora import BaseShape

HEADER_BYTES = 4
MOST_BYTES = 1 << 28  # of one frame; more is a broken stream


class _Frame(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServedBaseRef(_Frame):
    """A base model: the directory of its files and their sha256. nbytes: size of its weights as float32."""

    sha256: Sha256
    source: str
    nbytes: int


class ServedAdapterRef(_Frame):
    """An adapter file in the store."""

    sha256: Sha256
    recipe: Recipe
    shape: BaseShape


class TextToScore(_Frame):
    """Tokens to read, and answers whose tokens are predicted from position `start` on. adapter: its index."""

    tokens: tuple[int, ...] = Field(min_length=1)
    start: int
    answers: tuple[tuple[int, ...], ...]
    adapter: int | None


class TextToGenerate(_Frame):
    """A prompt to continue by at most `most` tokens. ends: tokens that end a text.

    likeliest: how many of the likeliest tokens are reported at each place, with log-probabilities; None: nothing is.
    """

    tokens: tuple[int, ...] = Field(min_length=1)
    most: int
    adapter: int | None
    temperature: float
    top_p: float
    seed: int
    ends: tuple[int, ...]
    likeliest: int | None = None


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
    text: TextToGenerate


class Batch(_Frame):
    """Statistics of one batch and of the scorer after it."""

    kind: Literal["batch"] = "batch"
    work: Literal["score", "read", "generate"]  # read: prompts of texts to generate
    rows: int
    tokens: int  # computed, padding included
    adapters: int  # distinct adapters in the batch
    seconds: float
    held_adapters: int
    held_adapter_bytes: int
    held_bases: int
    held_base_bytes: int
    evicted_adapters: int  # since it started
    evicted_bases: int
    waiting_texts: int
    generating_texts: int
    rss_bytes: int


def pack(message: dict[str, Any]) -> bytes:
    """Encodes a message as a frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """Returns the size of the body that follows a header. Raises ValueError if it exceeds MOST_BYTES."""
    length = int.from_bytes(header, "big")
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length


def unpack(body: bytes) -> dict[str, Any]:
    """Decodes the body of a frame."""
    frame: dict[str, Any] = json.loads(body)
    return frame
