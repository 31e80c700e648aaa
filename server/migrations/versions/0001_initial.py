"""The first schema.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapters",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("user", sa.String(length=96), nullable=False),
        sa.Column("versions", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_adapters"),
        sa.UniqueConstraint("tenant", "name", name="uq_adapters_tenant"),
    )
    op.create_table(
        "bases",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("source", sa.String(length=4096), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("parameters", sa.BigInteger(), nullable=False),
        sa.Column("tokenizer_sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_bases"),
        sa.UniqueConstraint("name", name="uq_bases_name"),
    )
    op.create_table(
        "devices",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("public_key", sa.String(length=100), nullable=False),
        sa.Column("platform", sa.String(length=200), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("number", name="pk_devices"),
        sa.UniqueConstraint("id", name="uq_devices_id"),
    )
    op.create_index("ix_devices_tenant", "devices", ["tenant"], unique=False)
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=False),
        sa.Column("seen_at", sa.DateTime(), nullable=False),
        sa.Column("peak_rss_bytes", sa.BigInteger(), nullable=False),
        sa.Column("compiler_peak_rss_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_table(
        "enrolments",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.Column("used_at", sa.DateTime(), nullable=True),
        sa.Column("device_id", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_enrolments_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_enrolments"),
        sa.UniqueConstraint("digest", name="uq_enrolments_digest"),
    )
    op.create_table(
        "programs",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("recipe_id", sa.String(length=64), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("base_number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("signed", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("ready_at", sa.DateTime(), nullable=True),
        sa.ForeignKeyConstraint(["base_number"], ["bases.number"], name="fk_programs_base_number"),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name="fk_programs_worker_id"),
        sa.PrimaryKeyConstraint("number", name="pk_programs"),
        sa.UniqueConstraint("recipe_id", name="uq_programs_recipe_id"),
    )
    op.create_index("ix_programs_state", "programs", ["state"], unique=False)
    op.create_table(
        "tokens",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("device_id", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("revoked_at", sa.DateTime(), nullable=True),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_tokens_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_tokens"),
        sa.UniqueConstraint("digest", name="uq_tokens_digest"),
        sa.UniqueConstraint("id", name="uq_tokens_id"),
    )
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("recipe_id", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=96), nullable=False),
        sa.Column("user", sa.String(length=96), nullable=False),
        sa.Column("dataset", sa.String(length=96), nullable=False),
        sa.Column("only_device_id", sa.String(length=64), nullable=True),
        sa.Column("device_id", sa.String(length=64), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("progress", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("adapter_version", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("updated_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_jobs_device_id"),
        sa.ForeignKeyConstraint(["only_device_id"], ["devices.id"], name="fk_jobs_only_device_id"),
        sa.ForeignKeyConstraint(["recipe_id"], ["programs.recipe_id"], name="fk_jobs_recipe_id"),
        sa.PrimaryKeyConstraint("number", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
    )
    op.create_index("ix_jobs_recipe_id", "jobs", ["recipe_id"], unique=False)
    op.create_index("ix_jobs_waiting", "jobs", ["tenant", "state", "dataset"], unique=False)
    op.create_table(
        "program_files",
        sa.Column("recipe_id", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["recipe_id"], ["programs.recipe_id"], name="fk_program_files_recipe_id"),
        sa.PrimaryKeyConstraint("recipe_id", "role", name="pk_program_files"),
    )
    op.create_index("ix_program_files_sha256", "program_files", ["sha256"], unique=False)
    op.create_table(
        "adapter_versions",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("adapter_number", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("device_id", sa.String(length=64), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("recipe_id", sa.String(length=64), nullable=False),
        sa.Column("a_sha256", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("size_d", sa.BigInteger(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_number"], ["adapters.number"], name="fk_adapter_versions_adapter_number"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_adapter_versions_device_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_adapter_versions_job_id"),
        sa.PrimaryKeyConstraint("number", name="pk_adapter_versions"),
        sa.UniqueConstraint("adapter_number", "version", name="uq_adapter_versions_adapter_number"),
        sa.UniqueConstraint("job_id", name="uq_adapter_versions_job_id"),
    )
    op.create_table(
        "job_events",
        sa.Column("job_number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_job_events_job_number"),
        sa.PrimaryKeyConstraint("job_number", "position", name="pk_job_events"),
    )
    op.create_table(
        "leases",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_number", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.Column("ending", sa.String(length=16), nullable=True),
        sa.Column("upload_sha256", sa.String(length=64), nullable=True),
        sa.Column("upload_size", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_leases_device_id"),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_leases_job_number"),
        sa.PrimaryKeyConstraint("number", name="pk_leases"),
        sa.UniqueConstraint("id", name="uq_leases_id"),
    )
    op.create_index("ix_leases_device", "leases", ["device_id", "ending"], unique=False)
    op.create_index(
        "ix_leases_live",
        "leases",
        ["job_number"],
        unique=True,
        sqlite_where=sa.text("ending IS NULL"),
        postgresql_where=sa.text("ending IS NULL"),
    )
    op.create_table(
        "peft_files",
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(length=100), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["version_number"], ["adapter_versions.number"], name="fk_peft_files_version_number"),
        sa.PrimaryKeyConstraint("version_number", "path", name="pk_peft_files"),
    )


def downgrade() -> None:
    op.drop_table("peft_files")
    op.drop_index(
        "ix_leases_live",
        table_name="leases",
        sqlite_where=sa.text("ending IS NULL"),
        postgresql_where=sa.text("ending IS NULL"),
    )
    op.drop_index("ix_leases_device", table_name="leases")
    op.drop_table("leases")
    op.drop_table("job_events")
    op.drop_table("adapter_versions")
    op.drop_index("ix_program_files_sha256", table_name="program_files")
    op.drop_table("program_files")
    op.drop_index("ix_jobs_waiting", table_name="jobs")
    op.drop_index("ix_jobs_recipe_id", table_name="jobs")
    op.drop_table("jobs")
    op.drop_table("tokens")
    op.drop_index("ix_programs_state", table_name="programs")
    op.drop_table("programs")
    op.drop_table("enrolments")
    op.drop_table("workers")
    op.drop_index("ix_devices_tenant", table_name="devices")
    op.drop_table("devices")
    op.drop_table("bases")
    op.drop_table("adapters")
