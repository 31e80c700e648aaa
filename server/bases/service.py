"""Registering base models and reading their tokenizers. Knows no HTTP; torch only in the process that registers."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from sqlalchemy.orm import Session
from tokenizers import Tokenizer

from server.artifacts.naming import hold
from server.artifacts.store import ArtifactStore
from server.bases.models import BaseModelEntry
from server.bases.repository import BaseRepository
from server.clock import utc_now
from shared.errors import BadRequest, Conflict, UnknownBase
from shared.lora import BaseShape

MAX_NAME = 200


def inspect(name: str, source: str, artifacts: ArtifactStore) -> BaseModelEntry:
    """What there is to register of the model at `source`: a directory, a .gguf file or a Hugging Face id.

    Imports the compiler, and torch with it. Raises UnknownBase, UnreadableCheckpoint or UnsupportedModel.
    """
    from server.compiler import inspect_base
    from server.compiler.base import locate_base
    from server.compiler.tokenizer import write_tokenizer

    if not 0 < len(name) <= MAX_NAME:
        raise BadRequest(f"a base model's name has 1 to {MAX_NAME} characters")
    path = Path(source)
    if path.exists():
        # Workers run elsewhere: a relative path would be another file there.
        source = str(path.resolve())
    facts = inspect_base(source)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = Path(directory) / "tokenizer.json"
        write_tokenizer(locate_base(source), tokenizer)
        tokenizer_sha256 = artifacts.put(tokenizer.read_bytes())
    return BaseModelEntry(
        name=name,
        source=source,
        sha256=facts.sha256,
        shape=BaseShape(**{field: getattr(facts, field) for field in BaseShape.model_fields}),
        parameters=facts.parameters,
        tokenizer_sha256=tokenizer_sha256,
        created_at=utc_now(),
    )


@lru_cache(maxsize=8)
def _tokenizer(artifacts: ArtifactStore, sha256: str) -> Tokenizer:
    return Tokenizer.from_buffer(artifacts.read(sha256))


class BaseService:
    """Base models in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        self._session = session
        self._bases = BaseRepository(session)
        self._artifacts = artifacts

    def register(self, found: BaseModelEntry) -> BaseModelEntry:
        """Adds a base model; the same model again under its name only moves its source.

        Raises Conflict if the name is another model's: recipes pin what a name meant.
        """
        known = self._bases.by_name(found.name)
        if known is None:
            hold(self._session, self._artifacts, [found.tokenizer_sha256])
            self._bases.add(found)
            return found
        if known.sha256 != found.sha256:
            raise Conflict(f"{found.name!r} is the name of another model already; choose another name")
        known.source = found.source
        return known

    def named(self, name: str) -> BaseModelEntry:
        """The base model of that name. Raises UnknownBase, telling the names there are."""
        base = self._bases.by_name(name)
        if base is None:
            names = ", ".join(entry.name for entry in self._bases.all()) or "none yet"
            raise UnknownBase(f"no base model is named {name!r}; registered are: {names}")
        return base

    def tokenizer(self, base: BaseModelEntry) -> Tokenizer:
        """The base's tokenizer."""
        return _tokenizer(self._artifacts, base.tokenizer_sha256)
