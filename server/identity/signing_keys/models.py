"""The table of the server's signing keys. Private keys are files and are never stored in the database."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Document, Moment, Numbered, Table
from shared.key_rotation import SignedKeyRotation


class ServerKey(Numbered, Table):
    """A current or former signing key; the one with the highest number is current. Without rows, the key file is."""

    __tablename__ = "server_keys"

    key_id: Mapped[str] = mapped_column(String(16), unique=True)
    public_key: Mapped[str] = mapped_column(String(100))
    # Statement of the previous key; null for the first key and after a compromise.
    rotation: Mapped[SignedKeyRotation | None] = mapped_column(Document(SignedKeyRotation))
    created_at: Mapped[datetime] = mapped_column(Moment)
    compromised_at: Mapped[datetime | None] = mapped_column(Moment)
    retired_at: Mapped[datetime | None] = mapped_column(Moment)  # its private key was destroyed
