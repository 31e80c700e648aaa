"""The schema of the first release, from which the next migrations lead here.

A new database is created from the tables of the release (`server.schema`), so no database applies this migration.

Revision ID: 0001
"""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Does nothing: the databases of the first release have its tables."""
