"""The whole schema of the first release.

Revision ID: 0001
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# In the order in which they can be dropped.
TABLES = (
    "trajectory_steps",
    "conversion_files",
    "trajectories",
    "peft_files",
    "conversions",
    "adapter_tags",
    "privacy_spendings",
    "masked_members",
    "leases",
    "job_events",
    "declines",
    "cohort_updates",
    "adapter_versions",
    "sessions",
    "tokens",
    "task_requests",
    "program_files",
    "masked_rounds",
    "lanes",
    "jobs",
    "users",
    "tasks",
    "programs",
    "enrollments",
    "device_users",
    "device_requests",
    "device_nonces",
    "cohort_rounds",
    "cohort_members",
    "calibrations",
    "adapter_grants",
    "workers",
    "worker_hosts",
    "tenants",
    "task_turns",
    "start_tags",
    "server_keys",
    "runners",
    "privacy_limits",
    "login_requests",
    "kept_answers",
    "devices",
    "collections",
    "cohorts",
    "bases",
    "approval_rules",
    "adapters",
    "adapter_events",
    "access_events",
)


def upgrade() -> None:
    """Creates every table."""
    op.create_table(
        "access_events",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("actor_name", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=True),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(96), nullable=False),
        sa.Column("subject_id", sa.String(64), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_access_events"),
    )
    op.create_index("ix_access_events_tenant", "access_events", ["tenant", "number"])
    op.create_table(
        "adapter_events",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("adapter", sa.String(96), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("actor_name", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=True),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("main_before", sa.Integer(), nullable=True),
        sa.Column("main_after", sa.Integer(), nullable=True),
        sa.Column("tag", sa.String(96), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_adapter_events"),
    )
    op.create_index("ix_adapter_events_adapter", "adapter_events", ["tenant", "adapter", "number"])
    op.create_index("ix_adapter_events_tenant", "adapter_events", ["tenant", "number"])
    op.create_table(
        "adapters",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("versions", sa.Integer(), nullable=False),
        sa.Column("main_version", sa.Integer(), nullable=True),
        sa.Column("rule", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("deleted_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_adapters"),
        sa.UniqueConstraint("tenant", "name", name="uq_adapters_tenant"),
    )
    op.create_index(
        "ix_adapters_deleted",
        "adapters",
        ["deleted_at"],
        sqlite_where=sa.text("deleted_at IS NOT NULL"),
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    )
    op.create_index("ix_adapters_tenant", "adapters", ["tenant", "number", "deleted_at"])
    op.create_table(
        "approval_rules",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_approval_rules"),
    )
    op.create_table(
        "bases",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("source", sa.String(4096), nullable=False),
        sa.Column("hub_id", sa.String(200), nullable=True),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("parameters", sa.BigInteger(), nullable=False),
        sa.Column("tokenizer_sha256", sa.String(64), nullable=False),
        sa.Column("chat_template", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_bases"),
        sa.UniqueConstraint("name", name="uq_bases_name"),
    )
    op.create_table(
        "cohorts",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("recipe_id", sa.String(64), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("a_sha256", sa.String(64), nullable=False),
        sa.Column("size_d", sa.BigInteger(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("opens", sa.Boolean(), nullable=False),
        sa.Column("busy", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_cohorts"),
        sa.UniqueConstraint("tenant", "name", name="uq_cohorts_tenant"),
    )
    op.create_index(
        "ix_cohorts_next",
        "cohorts",
        ["number"],
        sqlite_where=sa.text("opens AND NOT busy"),
        postgresql_where=sa.text("opens AND NOT busy"),
    )
    op.create_index("ix_cohorts_tenant", "cohorts", ["tenant", "number"])
    op.create_table(
        "collections",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=True),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.Column("deleted", sa.BigInteger(), nullable=False),
        sa.Column("freed_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_collections"),
    )
    op.create_table(
        "devices",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("public_key", sa.String(100), nullable=False),
        sa.Column("platform", sa.String(200), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(), nullable=True),
        sa.Column("revoked_at", sa.DateTime(), nullable=True),
        sa.Column("labels", sa.Text(), server_default="{}", nullable=False),
        sa.Column("report", sa.Text(), nullable=True),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cooldown_until", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_devices"),
        sa.UniqueConstraint("id", name="uq_devices_id"),
    )
    op.create_index("ix_devices_tenant", "devices", ["tenant", "number"])
    op.create_table(
        "kept_answers",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("kept_until", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_kept_answers"),
        sa.UniqueConstraint("id", name="uq_kept_answers_id"),
    )
    op.create_index("ix_kept_answers_kept_until", "kept_answers", ["kept_until"])
    op.create_table(
        "privacy_limits",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("epsilon", sa.Float(), nullable=True),
        sa.Column("delta", sa.Float(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_privacy_limits"),
        sa.UniqueConstraint("tenant", "user", name="uq_privacy_limits_tenant"),
    )
    op.create_table(
        "runners",
        sa.Column("platform", sa.String(100), nullable=False),
        sa.Column("signed", sa.Text(), nullable=False),
        sa.Column("added_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_runners"),
        sa.UniqueConstraint("platform", name="uq_runners_platform"),
    )
    op.create_table(
        "server_keys",
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("public_key", sa.String(100), nullable=False),
        sa.Column("rotation", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("compromised_at", sa.DateTime(), nullable=True),
        sa.Column("retired_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_server_keys"),
        sa.UniqueConstraint("key_id", name="uq_server_keys_key_id"),
    )
    op.create_table(
        "start_tags",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("start_tag", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "user", name="pk_start_tags"),
    )
    op.create_table(
        "task_turns",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "kind", name="pk_task_turns"),
    )
    op.create_index("ix_task_turns_turn", "task_turns", ["turn"])
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("suspended_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "worker_hosts",
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("limited", sa.Boolean(), nullable=False),
        sa.Column("seen_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_worker_hosts"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid_space", sa.String(255), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=False),
        sa.Column("seen_at", sa.DateTime(), nullable=False),
        sa.Column("peak_rss_bytes", sa.BigInteger(), nullable=False),
        sa.Column("compiler_peak_rss_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_table(
        "adapter_grants",
        sa.Column("adapter_number", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.String(64), nullable=False),
        sa.Column("granted_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_number"], ["adapters.number"], name="fk_adapter_grants_adapter_number", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_adapter_grants_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_adapter_grants"),
        sa.UniqueConstraint("adapter_number", "device_id", name="uq_adapter_grants_adapter_number"),
    )
    op.create_index("ix_adapter_grants_adapter", "adapter_grants", ["adapter_number", "number"])
    op.create_index("ix_adapter_grants_device", "adapter_grants", ["device_id", "adapter_number"])
    op.create_table(
        "calibrations",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("base_number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("task", sa.String(200), nullable=False),
        sa.Column("examples", sa.BigInteger(), nullable=False),
        sa.Column("modules", sa.Integer(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["base_number"], ["bases.number"], name="fk_calibrations_base_number"),
        sa.PrimaryKeyConstraint("number", name="pk_calibrations"),
        sa.UniqueConstraint("sha256", name="uq_calibrations_sha256"),
    )
    op.create_table(
        "cohort_members",
        sa.Column("cohort_number", sa.Integer(), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("device_id", sa.String(64), nullable=False),
        sa.Column("joined_at", sa.DateTime(), nullable=False),
        sa.Column("left_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["cohort_number"], ["cohorts.number"], name="fk_cohort_members_cohort_number"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_cohort_members_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_cohort_members"),
        sa.UniqueConstraint("cohort_number", "user", name="uq_cohort_members_cohort_number"),
    )
    op.create_index("ix_cohort_members_cohort", "cohort_members", ["cohort_number", "number"])
    op.create_index(
        "ix_cohort_members_device",
        "cohort_members",
        ["cohort_number", "device_id"],
        unique=True,
        sqlite_where=sa.text("left_at IS NULL"),
        postgresql_where=sa.text("left_at IS NULL"),
    )
    op.create_index("ix_cohort_members_of_device", "cohort_members", ["device_id", "cohort_number"])
    op.create_table(
        "cohort_rounds",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("cohort_number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("start", sa.Text(), nullable=True),
        sa.Column("start_sha256", sa.String(64), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("members", sa.Integer(), nullable=False),
        sa.Column("updates", sa.Integer(), nullable=False),
        sa.Column("optimizer_sha256", sa.String(64), nullable=True),
        sa.Column("opened_at", sa.DateTime(), nullable=False),
        sa.Column("deadline", sa.DateTime(), nullable=False),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["cohort_number"], ["cohorts.number"], name="fk_cohort_rounds_cohort_number"),
        sa.PrimaryKeyConstraint("number", name="pk_cohort_rounds"),
        sa.UniqueConstraint("cohort_number", "position", name="uq_cohort_rounds_cohort_number"),
        sa.UniqueConstraint("id", name="uq_cohort_rounds_id"),
    )
    op.create_index("ix_cohort_rounds_cohort", "cohort_rounds", ["cohort_number", "number"])
    op.create_index(
        "ix_cohort_rounds_open",
        "cohort_rounds",
        ["cohort_number"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_index("ix_cohort_rounds_optimizer_sha256", "cohort_rounds", ["optimizer_sha256"])
    op.create_index("ix_cohort_rounds_start_sha256", "cohort_rounds", ["start_sha256"])
    op.create_index(
        "ix_cohort_rounds_state",
        "cohort_rounds",
        ["state", "number"],
        sqlite_where=sa.text("state IN ('open', 'aggregating')"),
        postgresql_where=sa.text("state IN ('open', 'aggregating')"),
    )
    op.create_table(
        "device_nonces",
        sa.Column("device_id", sa.String(64), nullable=False),
        sa.Column("nonce", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_device_nonces_device_id"),
        sa.PrimaryKeyConstraint("device_id", "nonce", name="pk_device_nonces"),
    )
    op.create_table(
        "device_requests",
        sa.Column("device_code_digest", sa.String(64), nullable=False),
        sa.Column("user_code", sa.String(16), nullable=False),
        sa.Column("client_id", sa.String(100), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("public_key", sa.String(100), nullable=False),
        sa.Column("platform", sa.String(200), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("interval_seconds", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.Column("polled_at", sa.DateTime(), nullable=True),
        sa.Column("tenant", sa.String(96), nullable=True),
        sa.Column("decided_by", sa.String(64), nullable=True),
        sa.Column("decided_at", sa.DateTime(), nullable=True),
        sa.Column("device_id", sa.String(64), nullable=True),
        sa.Column("users", sa.Text(), server_default="[]", nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_device_requests_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_device_requests"),
        sa.UniqueConstraint("device_code_digest", name="uq_device_requests_device_code_digest"),
        sa.UniqueConstraint("user_code", name="uq_device_requests_user_code"),
    )
    op.create_index("ix_device_requests_address", "device_requests", ["address"])
    op.create_index("ix_device_requests_expires_at", "device_requests", ["expires_at"])
    op.create_table(
        "login_requests",
        sa.Column("user_code_digest", sa.String(64), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("device_code_digest", sa.String(64), nullable=False),
        sa.Column("client_id", sa.String(100), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("interval_seconds", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.Column("polled_at", sa.DateTime(), nullable=True),
        sa.Column("tenant", sa.String(96), nullable=True),
        sa.Column("decided_by", sa.String(64), nullable=True),
        sa.Column("decided_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_login_requests"),
        sa.UniqueConstraint("device_code_digest", name="uq_login_requests_device_code_digest"),
        sa.UniqueConstraint("user_code_digest", name="uq_login_requests_user_code_digest"),
    )
    op.create_index("ix_login_requests_address", "login_requests", ["address"])
    op.create_index("ix_login_requests_expires_at", "login_requests", ["expires_at"])
    op.create_table(
        "device_users",
        sa.Column("device_id", sa.String(64), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("bound_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_device_users_device_id"),
        sa.PrimaryKeyConstraint("device_id", "user", name="pk_device_users"),
    )
    op.create_index("ix_device_users_user", "device_users", ["user", "device_id"])
    op.create_table(
        "enrollments",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.Column("used_at", sa.DateTime(), nullable=True),
        sa.Column("device_id", sa.String(64), nullable=True),
        sa.Column("users", sa.Text(), server_default="[]", nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_enrollments_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_enrollments"),
        sa.UniqueConstraint("digest", name="uq_enrollments_digest"),
    )
    op.create_table(
        "programs",
        sa.Column("recipe_id", sa.String(64), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("base_number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("signed", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=True),
        sa.Column("ready_at", sa.DateTime(), nullable=True),
        sa.Column("progress", sa.Text(), nullable=True),
        sa.Column("recompiling", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["base_number"], ["bases.number"], name="fk_programs_base_number"),
        sa.PrimaryKeyConstraint("number", name="pk_programs"),
        sa.UniqueConstraint("recipe_id", name="uq_programs_recipe_id"),
    )
    op.create_index("ix_programs_state", "programs", ["state"])
    op.create_table(
        "tasks",
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.DateTime(), nullable=True),
        sa.Column("worker_id", sa.String(64), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name="fk_tasks_worker_id"),
        sa.PrimaryKeyConstraint("number", name="pk_tasks"),
        sa.UniqueConstraint("kind", "subject", name="uq_tasks_kind"),
    )
    op.create_index("ix_tasks_state", "tasks", ["state", "number"])
    op.create_index("ix_tasks_worker_id", "tasks", ["worker_id"])
    op.create_table(
        "users",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("disabled_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_users_tenant"),
        sa.PrimaryKeyConstraint("number", name="pk_users"),
        sa.UniqueConstraint("id", name="uq_users_id"),
        sa.UniqueConstraint("tenant", "name", name="uq_users_tenant"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("recipe_id", sa.String(64), nullable=False),
        sa.Column("estimator_reason", sa.Text(), nullable=True),
        sa.Column("adapter", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("dataset", sa.String(96), nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("start", sa.Text(), nullable=True),
        sa.Column("start_user", sa.String(96), nullable=True),
        sa.Column("round", sa.Text(), nullable=True),
        sa.Column("hides_figures", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("only_device_id", sa.String(64), nullable=True),
        sa.Column("device_id", sa.String(64), nullable=True),
        sa.Column("start_tag", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lane_number", sa.Integer(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("purged", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("progress", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("adapter_version", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("times", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("updated_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_jobs_device_id"),
        sa.ForeignKeyConstraint(["only_device_id"], ["devices.id"], name="fk_jobs_only_device_id"),
        sa.ForeignKeyConstraint(["recipe_id"], ["programs.recipe_id"], name="fk_jobs_recipe_id"),
        sa.PrimaryKeyConstraint("number", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
    )
    op.create_index("ix_jobs_adapter", "jobs", ["tenant", "adapter", "number", "state", "user"])
    op.create_index(
        "ix_jobs_ended",
        "jobs",
        ["updated_at", "number"],
        sqlite_where=sa.text("NOT purged AND state IN ('succeeded', 'failed', 'cancelled')"),
        postgresql_where=sa.text("NOT purged AND state IN ('succeeded', 'failed', 'cancelled')"),
    )
    op.create_index("ix_jobs_lane", "jobs", ["lane_number", "start_tag", "number"])
    op.create_index(
        "ix_jobs_queued",
        "jobs",
        ["tenant", sa.literal_column("priority DESC"), "number", "recipe_id"],
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index("ix_jobs_recipe", "jobs", ["recipe_id", "state", "tenant", "number"])
    op.create_index("ix_jobs_state", "jobs", ["tenant", "state", "number", "user", "adapter", "recipe_id"])
    op.create_index("ix_jobs_tenant", "jobs", ["tenant", "number"])
    op.create_index("ix_jobs_user", "jobs", ["tenant", "user", "number", "state", "adapter"])
    op.create_table(
        "lanes",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("dataset", sa.String(96), nullable=False),
        sa.Column("only_device_id", sa.String(64), nullable=True),
        sa.Column("recipe_id", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("needs", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["only_device_id"], ["devices.id"], name="fk_lanes_only_device_id"),
        sa.ForeignKeyConstraint(["recipe_id"], ["programs.recipe_id"], name="fk_lanes_recipe_id"),
        sa.PrimaryKeyConstraint("number", name="pk_lanes"),
        sa.UniqueConstraint("key", name="uq_lanes_key"),
    )
    op.create_index("ix_lanes_user", "lanes", ["tenant", "user", "dataset", "only_device_id"])
    op.create_table(
        "masked_rounds",
        sa.Column("round_number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parameters", sa.Text(), nullable=False),
        sa.Column("phase_seconds", sa.Float(), nullable=False),
        sa.Column("least", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("closes_at", sa.DateTime(), nullable=True),
        sa.Column("why", sa.Text(), nullable=True),
        sa.Column("roster", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["round_number"], ["cohort_rounds.number"], name="fk_masked_rounds_round_number"),
        sa.PrimaryKeyConstraint("round_number", name="pk_masked_rounds"),
    )
    op.create_index("ix_masked_rounds_closes_at", "masked_rounds", ["closes_at"])
    op.create_table(
        "program_files",
        sa.Column("recipe_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["recipe_id"], ["programs.recipe_id"], name="fk_program_files_recipe_id"),
        sa.PrimaryKeyConstraint("recipe_id", "version", "role", name="pk_program_files"),
    )
    op.create_index("ix_program_files_sha256", "program_files", ["sha256"])
    op.create_table(
        "task_requests",
        sa.Column("task_number", sa.Integer(), nullable=False),
        sa.Column("requester", sa.String(96), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["task_number"], ["tasks.number"], name="fk_task_requests_task_number", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("number", name="pk_task_requests"),
        sa.UniqueConstraint("requester", name="uq_task_requests_requester"),
    )
    op.create_index(
        "ix_task_requests_order",
        "task_requests",
        ["tenant", "kind", sa.literal_column("priority DESC"), "number", "task_number"],
    )
    op.create_index("ix_task_requests_task_number", "task_requests", ["task_number"])
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("device_id", sa.String(64), nullable=True),
        sa.Column("user_id", sa.String(64), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=True),
        sa.Column("last_used_at", sa.DateTime(), nullable=True),
        sa.Column("revoked_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_tokens_device_id"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_tokens_tenant"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_tokens_user_id"),
        sa.PrimaryKeyConstraint("number", name="pk_tokens"),
        sa.UniqueConstraint("digest", name="uq_tokens_digest"),
        sa.UniqueConstraint("id", name="uq_tokens_id"),
    )
    op.create_index("ix_tokens_tenant", "tokens", ["tenant", "number", "role"])
    op.create_table(
        "sessions",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("token_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name="fk_sessions_token_id"),
        sa.PrimaryKeyConstraint("number", name="pk_sessions"),
        sa.UniqueConstraint("digest", name="uq_sessions_digest"),
    )
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"])
    op.create_table(
        "adapter_versions",
        sa.Column("adapter_number", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=True),
        sa.Column("device_id", sa.String(64), nullable=True),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("recipe_id", sa.String(64), nullable=False),
        sa.Column("a_sha256", sa.String(64), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("size_d", sa.BigInteger(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("verified", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("from_trajectory", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=True),
        sa.Column("revision", sa.String(40), nullable=True),
        sa.Column("key_id", sa.String(16), nullable=True),
        sa.Column("signature", sa.String(100), nullable=True),
        sa.Column("kept_state", sa.String(16), server_default="approved", nullable=False),
        sa.Column("message", sa.Text(), server_default="", nullable=False),
        sa.Column("deleted_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_number"], ["adapters.number"], name="fk_adapter_versions_adapter_number"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_adapter_versions_device_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_adapter_versions_job_id"),
        sa.PrimaryKeyConstraint("number", name="pk_adapter_versions"),
        sa.UniqueConstraint("adapter_number", "version", name="uq_adapter_versions_adapter_number"),
        sa.UniqueConstraint("job_id", name="uq_adapter_versions_job_id"),
    )
    op.create_index(
        "ix_adapter_versions_deleted",
        "adapter_versions",
        ["deleted_at"],
        sqlite_where=sa.text("deleted_at IS NOT NULL"),
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    )
    op.create_index("ix_adapter_versions_device", "adapter_versions", ["device_id", "adapter_number"])
    op.create_index(
        "ix_adapter_versions_held",
        "adapter_versions",
        ["adapter_number", "number"],
        sqlite_where=sa.text("kept_state = 'held' AND deleted_at IS NULL"),
        postgresql_where=sa.text("kept_state = 'held' AND deleted_at IS NULL"),
    )
    op.create_index("ix_adapter_versions_key_id", "adapter_versions", ["key_id"])
    op.create_index("ix_adapter_versions_revision", "adapter_versions", ["adapter_number", "revision"])
    op.create_index("ix_adapter_versions_sha256", "adapter_versions", ["sha256"])
    op.create_index(
        "ix_adapter_versions_state", "adapter_versions", ["adapter_number", "number", "kept_state", "deleted_at"]
    )
    op.create_table(
        "cohort_updates",
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("member_number", sa.Integer(), nullable=False),
        sa.Column("job_number", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("start_version", sa.Integer(), nullable=True),
        sa.Column("start_sha256", sa.String(64), nullable=True),
        sa.Column("sha256", sa.String(64), nullable=True),
        sa.Column("sent_bytes", sa.BigInteger(), nullable=True),
        sa.Column("claimed_examples", sa.BigInteger(), nullable=True),
        sa.Column("examples", sa.BigInteger(), nullable=True),
        sa.Column("norm", sa.Float(), nullable=True),
        sa.Column("staleness", sa.Integer(), nullable=True),
        sa.Column("start_accuracy", sa.Float(), nullable=True),
        sa.Column("tuned_accuracy", sa.Float(), nullable=True),
        sa.Column("updated_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_cohort_updates_job_number"),
        sa.ForeignKeyConstraint(["member_number"], ["cohort_members.number"], name="fk_cohort_updates_member_number"),
        sa.ForeignKeyConstraint(["round_number"], ["cohort_rounds.number"], name="fk_cohort_updates_round_number"),
        sa.PrimaryKeyConstraint("number", name="pk_cohort_updates"),
        sa.UniqueConstraint("job_number", name="uq_cohort_updates_job_number"),
        sa.UniqueConstraint("round_number", "member_number", name="uq_cohort_updates_round_number"),
    )
    op.create_index("ix_cohort_updates_member_number", "cohort_updates", ["member_number"])
    op.create_index("ix_cohort_updates_round", "cohort_updates", ["round_number", "state", "number"])
    op.create_index("ix_cohort_updates_sha256", "cohort_updates", ["sha256"])
    op.create_index("ix_cohort_updates_start_sha256", "cohort_updates", ["start_sha256"])
    op.create_table(
        "declines",
        sa.Column("device_id", sa.String(64), nullable=False),
        sa.Column("recipe_id", sa.String(64), nullable=False),
        sa.Column("job_number", sa.Integer(), nullable=False),
        sa.Column("needed_bytes", sa.BigInteger(), nullable=False),
        sa.Column("available_bytes", sa.BigInteger(), nullable=False),
        sa.Column("enough_bytes", sa.BigInteger(), nullable=False),
        sa.Column("declined_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_declines_device_id"),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_declines_job_number"),
        sa.ForeignKeyConstraint(["recipe_id"], ["programs.recipe_id"], name="fk_declines_recipe_id"),
        sa.PrimaryKeyConstraint("device_id", "recipe_id", name="pk_declines"),
    )
    op.create_table(
        "job_events",
        sa.Column("job_number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_job_events_job_number"),
        sa.PrimaryKeyConstraint("job_number", "position", name="pk_job_events"),
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("job_number", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.Column("ending", sa.String(16), nullable=True),
        sa.Column("upload_sha256", sa.String(64), nullable=True),
        sa.Column("upload_size", sa.BigInteger(), nullable=True),
        sa.Column("upload_norm", sa.Float(), nullable=True),
        sa.Column("trajectory_sha256", sa.String(64), nullable=True),
        sa.Column("trajectory_size", sa.BigInteger(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_leases_device_id"),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_leases_job_number"),
        sa.PrimaryKeyConstraint("number", name="pk_leases"),
        sa.UniqueConstraint("id", name="uq_leases_id"),
    )
    op.create_index("ix_leases_device", "leases", ["device_id", "ending", "number", "job_number"])
    op.create_index(
        "ix_leases_expiry",
        "leases",
        ["expires_at", "number", "job_number", "ending"],
        sqlite_where=sa.text("ending IS NULL"),
        postgresql_where=sa.text("ending IS NULL"),
    )
    op.create_index("ix_leases_job", "leases", ["job_number", "number"])
    op.create_index(
        "ix_leases_live",
        "leases",
        ["job_number"],
        unique=True,
        sqlite_where=sa.text("ending IS NULL"),
        postgresql_where=sa.text("ending IS NULL"),
    )
    op.create_index("ix_leases_trajectory_sha256", "leases", ["trajectory_sha256"])
    op.create_index("ix_leases_upload_sha256", "leases", ["upload_sha256"])
    op.create_table(
        "masked_members",
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("member", sa.String(64), nullable=False),
        sa.Column("job_number", sa.Integer(), nullable=False),
        sa.Column("roster_number", sa.Integer(), nullable=True),
        sa.Column("last_phase", sa.String(16), nullable=False),
        sa.Column("advertisement", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=True),
        sa.Column("commitment", sa.LargeBinary(), nullable=True),
        sa.Column("vector_sha256", sa.String(64), nullable=True),
        sa.Column("signature", sa.LargeBinary(), nullable=True),
        sa.Column("seeds", sa.LargeBinary(), nullable=True),
        sa.Column("keys", sa.LargeBinary(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_masked_members_job_number"),
        sa.ForeignKeyConstraint(["member"], ["devices.id"], name="fk_masked_members_member"),
        sa.ForeignKeyConstraint(
            ["round_number"], ["masked_rounds.round_number"], name="fk_masked_members_round_number"
        ),
        sa.PrimaryKeyConstraint("number", name="pk_masked_members"),
    )
    op.create_index("ix_masked_members_job_number", "masked_members", ["job_number"])
    op.create_index("ix_masked_members_round", "masked_members", ["round_number", "member"], unique=True)
    op.create_index("ix_masked_members_vector_sha256", "masked_members", ["vector_sha256"])
    op.create_table(
        "privacy_spendings",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("cohort", sa.String(96), nullable=True),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("dataset", sa.String(96), nullable=False),
        sa.Column("device_id", sa.String(64), nullable=True),
        sa.Column("sampling_rate", sa.Float(), nullable=False),
        sa.Column("noise_multiplier", sa.Float(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("spent_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_privacy_spendings_device_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_privacy_spendings_job_id"),
        sa.PrimaryKeyConstraint("number", name="pk_privacy_spendings"),
        sa.UniqueConstraint("job_id", "device_id", name="uq_privacy_spendings_job_id"),
    )
    op.create_index("ix_privacy_spendings_cohort", "privacy_spendings", ["tenant", "cohort", "user"])
    op.create_index(
        "ix_privacy_spendings_dataset",
        "privacy_spendings",
        ["device_id", "dataset", "user", "sampling_rate", "noise_multiplier", "steps"],
    )
    op.create_index("ix_privacy_spendings_user", "privacy_spendings", ["tenant", "user", "number"])
    op.create_table(
        "adapter_tags",
        sa.Column("adapter_number", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("moved_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
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
        "conversions",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("form", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=True),
        sa.Column("ready_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_number"], ["adapter_versions.number"], name="fk_conversions_version_number", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("number", name="pk_conversions"),
        sa.UniqueConstraint("id", name="uq_conversions_id"),
        sa.UniqueConstraint("version_number", "form", name="uq_conversions_version_number"),
    )
    op.create_index("ix_conversions_state", "conversions", ["state"])
    op.create_table(
        "peft_files",
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(100), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["version_number"], ["adapter_versions.number"], name="fk_peft_files_version_number"),
        sa.PrimaryKeyConstraint("version_number", "path", name="pk_peft_files"),
    )
    op.create_index("ix_peft_files_sha256", "peft_files", ["sha256"])
    op.create_table(
        "trajectories",
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("start_sha256", sa.String(64), nullable=True),
        sa.Column("head", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_number"], ["adapter_versions.number"], name="fk_trajectories_version_number", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("version_number", name="pk_trajectories"),
    )
    op.create_index("ix_trajectories_sha256", "trajectories", ["sha256"])
    op.create_table(
        "conversion_files",
        sa.Column("conversion_number", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(100), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["conversion_number"],
            ["conversions.number"],
            name="fk_conversion_files_conversion_number",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("conversion_number", "path", name="pk_conversion_files"),
    )
    op.create_index("ix_conversion_files_sha256", "conversion_files", ["sha256"])
    op.create_table(
        "trajectory_steps",
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("head", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_number"],
            ["trajectories.version_number"],
            name="fk_trajectory_steps_version_number",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("version_number", "step", name="pk_trajectory_steps"),
    )

    # The one row that garbage collection locks, and the tenant that is always there.
    op.execute("INSERT INTO collections (number, deleted, freed_bytes) VALUES (1, 0, 0)")
    tenants = sa.table("tenants", sa.column("name", sa.String), sa.column("created_at", sa.DateTime))
    op.bulk_insert(tenants, [{"name": "default", "created_at": datetime.now(UTC).replace(tzinfo=None)}])


def downgrade() -> None:
    """Drops every table."""
    for name in TABLES:
        op.drop_table(name)
