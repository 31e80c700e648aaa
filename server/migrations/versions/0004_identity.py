"""Device authorization, signed requests, key rotation.

Revision ID: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "device_requests",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("device_code_digest", sa.String(length=64), nullable=False),
        sa.Column("user_code", sa.String(length=16), nullable=False),
        sa.Column("client_id", sa.String(length=100), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("public_key", sa.String(length=100), nullable=False),
        sa.Column("platform", sa.String(length=200), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("interval_seconds", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.Column("polled_at", sa.DateTime(), nullable=True),
        sa.Column("tenant", sa.String(length=96), nullable=True),
        sa.Column("decided_by", sa.String(length=64), nullable=True),
        sa.Column("decided_at", sa.DateTime(), nullable=True),
        sa.Column("device_id", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_device_requests_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_device_requests"),
        sa.UniqueConstraint("device_code_digest", name="uq_device_requests_device_code_digest"),
        sa.UniqueConstraint("user_code", name="uq_device_requests_user_code"),
    )
    op.create_index("ix_device_requests_address", "device_requests", ["address"], unique=False)
    op.create_index("ix_device_requests_expires_at", "device_requests", ["expires_at"], unique=False)
    op.create_table(
        "device_nonces",
        sa.Column("device_id", sa.String(length=64), nullable=False),
        sa.Column("nonce", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_device_nonces_device_id"),
        sa.PrimaryKeyConstraint("device_id", "nonce", name="pk_device_nonces"),
    )
    op.create_table(
        "server_keys",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("public_key", sa.String(length=100), nullable=False),
        sa.Column("succession", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("compromised_at", sa.DateTime(), nullable=True),
        sa.Column("retired_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("number", name="pk_server_keys"),
        sa.UniqueConstraint("key_id", name="uq_server_keys_key_id"),
    )


def downgrade() -> None:
    op.drop_table("server_keys")
    op.drop_table("device_nonces")
    op.drop_index("ix_device_requests_expires_at", "device_requests")
    op.drop_index("ix_device_requests_address", "device_requests")
    op.drop_table("device_requests")
