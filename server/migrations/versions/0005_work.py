"""What a queue of compilations needs: priorities, turns, tries put off, memory, progress, and programs made anew.

Revision ID: 0005
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_QUEUED = sa.text("state = 'queued'")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("priority", sa.Integer(), server_default="0", nullable=False))
    op.create_index(
        "ix_jobs_queued",
        "jobs",
        ["tenant", "priority", "number"],
        sqlite_where=_QUEUED,
        postgresql_where=_QUEUED,
    )
    op.add_column("programs", sa.Column("started_at", sa.DateTime(), nullable=True))
    op.add_column("programs", sa.Column("next_attempt_at", sa.DateTime(), nullable=True))
    op.add_column("programs", sa.Column("memory_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("programs", sa.Column("progress", sa.Text(), nullable=True))
    op.add_column("programs", sa.Column("anew", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("workers", sa.Column("host", sa.String(length=255), server_default="", nullable=False))
    op.add_column("workers", sa.Column("pid_space", sa.String(length=255), server_default="", nullable=False))
    op.create_table(
        "worker_hosts",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("limited", sa.Boolean(), nullable=False),
        sa.Column("seen_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_worker_hosts"),
    )
    op.create_table(
        "compile_turns",
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_compile_turns"),
    )
    op.create_index("ix_compile_turns_turn", "compile_turns", ["turn"])
    # Whose jobs wait already have turns from now on, too.
    op.execute("INSERT INTO compile_turns (tenant, turn) SELECT DISTINCT tenant, 0 FROM jobs")
    # One more column in the key: the table is made anew, which every database can.
    _remake_files(["recipe_id", "version", "role"])


def downgrade() -> None:
    _remake_files(["recipe_id", "role"])
    op.drop_index("ix_compile_turns_turn", table_name="compile_turns")
    op.drop_table("compile_turns")
    op.drop_table("worker_hosts")
    for name in ("pid_space", "host"):
        op.drop_column("workers", name)
    for name in ("anew", "progress", "memory_bytes", "next_attempt_at", "started_at"):
        op.drop_column("programs", name)
    op.drop_index("ix_jobs_queued", table_name="jobs")
    op.drop_column("jobs", "priority")


def _remake_files(key: list[str]) -> None:
    """`program_files` with that key; files without a version get that of their program's manifest."""
    connection = op.get_bind()
    old = sa.Table("program_files", sa.MetaData(), autoload_with=connection, resolve_fks=False)
    programs = sa.Table("programs", sa.MetaData(), autoload_with=connection, resolve_fks=False)
    versions = {
        row.recipe_id: json.loads(row.signed)["manifest"].get("version", 1)
        for row in connection.execute(
            sa.select(programs.c.recipe_id, programs.c.signed).where(programs.c.signed.is_not(None))
        )
    }
    latest = [
        {name: row[name] for name in ("recipe_id", "role", "name", "sha256")}
        | {"version": versions.get(row["recipe_id"], 1)}
        for row in connection.execute(sa.select(old)).mappings()
        if row.get("version") in (None, versions.get(row["recipe_id"], 1))
    ]
    op.drop_index("ix_program_files_sha256", table_name="program_files")
    op.drop_table("program_files")
    columns: dict[str, sa.Column[Any]] = {
        "recipe_id": sa.Column("recipe_id", sa.String(length=64), nullable=False),
        "version": sa.Column("version", sa.Integer(), nullable=False),
        "role": sa.Column("role", sa.String(length=16), nullable=False),
    }
    made = op.create_table(
        "program_files",
        *[columns[name] for name in key],
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["recipe_id"], ["programs.recipe_id"], name="fk_program_files_recipe_id"),
        sa.PrimaryKeyConstraint(*key, name="pk_program_files"),
    )
    op.create_index("ix_program_files_sha256", "program_files", ["sha256"], unique=False)
    if latest:
        names = {column.name for column in made.columns}
        op.bulk_insert(made, [{name: value for name, value in row.items() if name in names} for row in latest])
