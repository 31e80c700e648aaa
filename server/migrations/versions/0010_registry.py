"""Signed manifests, states and tags of adapter versions; who did what to them.

Versions that are there already are approved, and the latest is `main`. Their manifests are made and signed by the
first worker of this release that starts: a migration has no key. Operators' tokens that could do everything can do what
is new; apps' stay as they are, and a new one can do more.

Revision ID: 0010
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_DELETED = sa.text("deleted_at IS NOT NULL")


def _columns() -> dict[str, list[sa.Column[Any]]]:
    """The new columns by table; a column object serves once."""
    return {
        "adapters": [
            sa.Column("main_version", sa.Integer(), nullable=True),
            sa.Column("rule", sa.Text(), nullable=True),
            sa.Column("deleted_at", sa.DateTime(), nullable=True),
        ],
        "adapter_versions": [
            sa.Column("manifest", sa.Text(), nullable=True),
            sa.Column("revision", sa.String(length=40), nullable=True),
            sa.Column("key_id", sa.String(length=16), nullable=True),
            sa.Column("signature", sa.String(length=100), nullable=True),
            sa.Column("kept_state", sa.String(length=16), server_default="approved", nullable=False),
            sa.Column("message", sa.Text(), server_default="", nullable=False),
            sa.Column("deleted_at", sa.DateTime(), nullable=True),
        ],
    }


def upgrade() -> None:
    for table, columns in _columns().items():
        for column in columns:
            op.add_column(table, column)
    op.execute("UPDATE adapters SET main_version = versions WHERE versions > 0")
    op.execute(
        "UPDATE tokens SET scopes = replace(scopes, 'adapters:read', 'adapters:read adapters:score adapters:write') "
        "WHERE role = 'operator' AND scopes "
        "LIKE 'adapters:read devices:read devices:write jobs:read jobs:write%tokens:write'"
    )
    op.drop_index("ix_adapters_tenant", table_name="adapters")
    op.create_index("ix_adapters_tenant", "adapters", ["tenant", "number", "deleted_at"])
    op.create_index(
        "ix_adapter_versions_state", "adapter_versions", ["adapter_number", "number", "kept_state", "deleted_at"]
    )
    op.create_index("ix_adapter_versions_revision", "adapter_versions", ["adapter_number", "revision"])
    op.create_index("ix_adapter_versions_key_id", "adapter_versions", ["key_id"])
    for table in ("adapters", "adapter_versions"):
        op.create_index(f"ix_{table}_deleted", table, ["deleted_at"], sqlite_where=_DELETED, postgresql_where=_DELETED)
    op.create_table(
        "adapter_tags",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("adapter_number", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("moved_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_number"], ["adapters.number"], name="fk_adapter_tags_adapter_number", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["version_number"], ["adapter_versions.number"], name="fk_adapter_tags_version_number", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("number", name="pk_adapter_tags"),
        sa.UniqueConstraint("adapter_number", "name", name="uq_adapter_tags_adapter_number"),
    )
    op.create_index("ix_adapter_tags_version_number", "adapter_tags", ["version_number"])
    op.create_table(
        "adapter_events",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("adapter", sa.String(length=96), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("actor_name", sa.String(length=96), nullable=False),
        sa.Column("user", sa.String(length=96), nullable=True),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("main_before", sa.Integer(), nullable=True),
        sa.Column("main_after", sa.Integer(), nullable=True),
        sa.Column("tag", sa.String(length=96), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_adapter_events"),
    )
    op.create_index("ix_adapter_events_adapter", "adapter_events", ["tenant", "adapter", "number"])
    op.create_table(
        "approval_rules",
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_approval_rules"),
    )


def downgrade() -> None:
    for table in ("approval_rules", "adapter_events", "adapter_tags"):
        op.drop_table(table)
    for table in ("adapters", "adapter_versions"):
        op.drop_index(f"ix_{table}_deleted", table, sqlite_where=_DELETED, postgresql_where=_DELETED)
    for name in ("ix_adapter_versions_key_id", "ix_adapter_versions_revision", "ix_adapter_versions_state"):
        op.drop_index(name, table_name="adapter_versions")
    op.drop_index("ix_adapters_tenant", table_name="adapters")
    op.create_index("ix_adapters_tenant", "adapters", ["tenant", "number"])
    for table, columns in _columns().items():
        for column in columns:
            op.drop_column(table, column.name)
