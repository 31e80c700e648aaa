"""The table of the server's signing keys. Private halves are files of a home, never here."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Document, Moment, Numbered, Table
from shared.succession import SignedSuccession


class ServerKey(Numbered, Table):
    """A key that signs or signed manifests; the highest number signs now. No row: the home's first key does."""

    __tablename__ = "server_keys"

    key_id: Mapped[str] = mapped_column(String(16), unique=True)
    public_key: Mapped[str] = mapped_column(String(100))
    # The key before it says that this one follows; null for a first key, and for one after a compromise.
    succession: Mapped[SignedSuccession | None] = mapped_column(Document(SignedSuccession))
    created_at: Mapped[datetime] = mapped_column(Moment)
    compromised_at: Mapped[datetime | None] = mapped_column(Moment)
    retired_at: Mapped[datetime | None] = mapped_column(Moment)  # its private half was destroyed
