"""The table of base models."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Document, Moment, Numbered, Table
from shared.lora import BaseShape


class BaseModelEntry(Numbered, Table):
    """A base model, by the name that jobs use. Belongs to the server, not to a tenant."""

    __tablename__ = "bases"

    name: Mapped[str] = mapped_column(String(200), unique=True)
    source: Mapped[str] = mapped_column(String(4096))
    sha256: Mapped[str] = mapped_column(String(64))
    shape: Mapped[BaseShape] = mapped_column(Document(BaseShape))
    parameters: Mapped[int] = mapped_column(BigInteger)
    tokenizer_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(Moment)
