"""Tenants, users, and what a token may do.

Revision ID: 0003
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# As they were when this revision was made: what tokens from before it may go on doing.
_APP = "adapters:read jobs:read jobs:write"
_OPERATOR = "adapters:read devices:read devices:write jobs:read jobs:write tokens:write"
_SERVER = " metrics:read server:read"


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("suspended_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("number", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "users",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("disabled_at", sa.DateTime(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_users_tenant"),
        sa.PrimaryKeyConstraint("number", name="pk_users"),
        sa.UniqueConstraint("id", name="uq_users_id"),
        sa.UniqueConstraint("tenant", "name", name="uq_users_tenant"),
    )
    _name_tenants()
    with op.batch_alter_table("tokens") as tokens:
        tokens.add_column(sa.Column("scopes", sa.Text(), nullable=False, server_default=""))
        tokens.add_column(sa.Column("user_id", sa.String(length=64), nullable=True))
        tokens.add_column(sa.Column("expires_at", sa.DateTime(), nullable=True))
        tokens.add_column(sa.Column("last_used_at", sa.DateTime(), nullable=True))
        tokens.create_foreign_key("fk_tokens_tenant", "tenants", ["tenant"], ["name"])
        tokens.create_foreign_key("fk_tokens_user_id", "users", ["user_id"], ["id"])
        tokens.create_index("ix_tokens_tenant", ["tenant"])
    # The default was for the rows there are; a new token says what it may do.
    with op.batch_alter_table("tokens") as tokens:
        tokens.alter_column("scopes", server_default=None, existing_type=sa.Text(), existing_nullable=False)
    statement = sa.text("UPDATE tokens SET scopes = :scopes WHERE role = :role AND (tenant = 'default') = :own")
    for own in (True, False):
        more = _SERVER if own else ""
        words = " ".join(sorted((_OPERATOR + more).split()))
        op.get_bind().execute(statement, {"scopes": words, "role": "operator", "own": own})
        op.get_bind().execute(statement, {"scopes": _APP, "role": "app", "own": own})


def _name_tenants() -> None:
    """Every name of a tenant in the older tables becomes a tenant; `default` is one always."""
    bind = op.get_bind()
    names = {"default"}
    for table in ("tokens", "devices", "enrolments", "jobs", "adapters"):
        names |= set(bind.execute(sa.select(sa.column("tenant")).select_from(sa.table(table)).distinct()).scalars())
    tenants = sa.table("tenants", sa.column("name", sa.String), sa.column("created_at", sa.DateTime))
    now = datetime.now(UTC).replace(tzinfo=None)
    op.bulk_insert(tenants, [{"name": name, "created_at": now} for name in sorted(names)])


def downgrade() -> None:
    with op.batch_alter_table("tokens") as tokens:
        tokens.drop_index("ix_tokens_tenant")
        tokens.drop_constraint("fk_tokens_user_id", type_="foreignkey")
        tokens.drop_constraint("fk_tokens_tenant", type_="foreignkey")
        for column in ("last_used_at", "expires_at", "user_id", "scopes"):
            tokens.drop_column(column)
    op.drop_table("users")
    op.drop_table("tenants")
