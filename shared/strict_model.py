"""The base class of documents and messages that have a fixed form."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A model whose fields are never assigned again, and which refuses fields that it does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid")
