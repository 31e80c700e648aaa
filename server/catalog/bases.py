"""Base models that the operator registered: their table, their SQL and their rules.

The compiler is imported only in the process that registers a model.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from sqlalchemy import JSON, BigInteger, String, select
from sqlalchemy.orm import Mapped, Session, mapped_column
from tokenizers import Tokenizer

from server.catalog.chat_templates import read_chat_template
from server.database.columns import Document, Numbered, Table, UtcTime, utc_now, view_of
from server.database.database import Repository
from server.storage.store import ArtifactStore, FileColumn, hold
from shared.catalog import BaseView
from shared.chat_template import ChatTemplate
from shared.errors import BadRequest, Conflict, UnknownBase
from shared.recipe import trainable_precisions
from shared.tokenizer import check_known, read_tokenizer
from shared.zo.lora import BaseShape

MAX_NAME = 200
_OF_SHAPE = ("architecture", "layers", "hidden", "vocabulary", "context_length")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class BaseModelEntry(Numbered, Table):
    """A base model, by the name that jobs use. It belongs to the server and not to a tenant."""

    __tablename__ = "bases"

    name: Mapped[str] = mapped_column(String(200), unique=True)
    source: Mapped[str] = mapped_column(String(4096))
    hub_id: Mapped[str | None] = mapped_column(String(MAX_NAME))
    sha256: Mapped[str] = mapped_column(String(64))
    shape: Mapped[BaseShape] = mapped_column(Document(BaseShape))
    parameters: Mapped[int] = mapped_column(BigInteger)
    tokenizer_sha256: Mapped[str] = mapped_column(String(64))
    chat_template: Mapped[ChatTemplate | None] = mapped_column(Document(ChatTemplate))
    end_tokens: Mapped[list[int] | None] = mapped_column(JSON)  # null: registered by an earlier release
    created_at: Mapped[datetime] = mapped_column(UtcTime)

    def view(self) -> BaseView:
        """As the API shows it."""
        shape = {name: getattr(self.shape, name) for name in _OF_SHAPE}
        has_template = self.chat_template is not None
        return view_of(BaseView, self, **shape, precisions=trainable_precisions(), chat_template=has_template)


FILES = (FileColumn(BaseModelEntry.tokenizer_sha256),)


class BaseRepository(Repository):
    """Base models in one session."""

    def by_name(self, name: str) -> BaseModelEntry | None:
        """Returns the base model of that name."""
        return self._one(BaseModelEntry, BaseModelEntry.name == name)

    def get(self, name: str) -> BaseModelEntry:
        """Returns the base model of that name. Raises UnknownBase, whose message lists the registered names."""
        base = self.by_name(name)
        if base is None:
            names = ", ".join(entry.name for entry in self.all()) or "none yet"
            raise UnknownBase(f"no base model is named {name!r}; registered are: {names}")
        return base

    def all(self) -> Sequence[BaseModelEntry]:
        """Returns every base model, by name."""
        return self._session.scalars(select(BaseModelEntry).order_by(BaseModelEntry.name)).all()


def check_names(name: str, hub_id: str | None) -> None:
    """Raises BadRequest for a name or a Hub id that a base cannot have."""
    if not 0 < len(name) <= MAX_NAME:
        raise BadRequest(f"a base model's name has 1 to {MAX_NAME} characters")
    if hub_id is not None and not (len(hub_id) <= MAX_NAME and HUB_ID.fullmatch(hub_id)):
        raise BadRequest(f"{hub_id[:MAX_NAME]!r} is not an id of the Hugging Face Hub; it looks like OWNER/NAME")


def inspect(name: str, source: str, artifacts: ArtifactStore, hub_id: str | None = None) -> BaseModelEntry:
    """Reads the model at `source` (a directory, a .gguf file or a Hugging Face id) and returns its unsaved row.

    hub_id: the model's id on the Hugging Face Hub, which exported adapters name; by default `source` if it is one.
    The headers and the chat template are checked before the tokenizer is converted and the files are hashed. Raises
    UnknownBase, UnreadableCheckpoint, UnsupportedModel, UnknownToken, or BadRequest as `check_names`.
    """
    from server.compiler.checkpoints.base import locate_base
    from server.compiler.checkpoints.checkpoint import check_headers, open_checkpoint
    from server.compiler.checkpoints.tokenizer import end_tokens, write_tokenizer

    check_names(name, hub_id)
    path = Path(source)
    if path.exists():
        # A relative path would be another file in the working directory of a worker.
        source = str(path.resolve())
    else:
        hub_id = hub_id or source
    files = locate_base(source)
    check_headers(files)
    chat_template = read_chat_template(files)
    facts, _ = open_checkpoint(files)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = Path(directory) / "tokenizer.json"
        write_tokenizer(files, tokenizer)
        content = tokenizer.read_bytes()
    check_known(read_tokenizer(content).encode("x").ids, facts.vocabulary, "the tokenizer's encoding of a short text")
    return BaseModelEntry(
        name=name,
        source=source,
        hub_id=hub_id,
        sha256=files.sha256,
        shape=view_of(BaseShape, facts),
        parameters=facts.parameters,
        tokenizer_sha256=artifacts.put(content),
        chat_template=chat_template,
        end_tokens=list(end_tokens(files, facts.vocabulary)),
        created_at=utc_now(),
    )


@lru_cache(maxsize=8)
def _tokenizer(artifacts: ArtifactStore, sha256: str) -> Tokenizer:
    return read_tokenizer(artifacts.read(sha256))


class BaseService(BaseRepository):
    """Base models and their files in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        super().__init__(session)
        self._artifacts = artifacts

    def register(self, base: BaseModelEntry) -> BaseModelEntry:
        """Adds a base model. Registering the same model under its name again updates what its files say and its Hub id.

        Raises Conflict if the name belongs to another model, because recipes pin the name.
        """
        existing = self.by_name(base.name)
        hold(self._session, self._artifacts, [base.tokenizer_sha256])
        if existing is None:
            self.add(base)
            return base
        if existing.sha256 != base.sha256:
            raise Conflict(f"{base.name!r} is already the name of another model; choose another name")
        existing.source, existing.hub_id, existing.chat_template = base.source, base.hub_id, base.chat_template
        existing.tokenizer_sha256, existing.end_tokens = base.tokenizer_sha256, base.end_tokens
        return existing

    def tokenizer(self, base: BaseModelEntry) -> Tokenizer:
        """Returns the base's tokenizer."""
        return _tokenizer(self._artifacts, base.tokenizer_sha256)
