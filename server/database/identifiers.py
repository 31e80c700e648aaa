"""Generates identifiers with a prefix for their kind, and bearer tokens, of which only a digest is stored."""

from __future__ import annotations

import secrets

from shared.canonical import sha256_hex


def new_id(kind: str) -> str:
    """Returns `kind` and 96 random bits, such as `job_1f3a...`, safe in URLs and paths."""
    return f"{kind}_{secrets.token_hex(12)}"


def new_token(kind: str) -> str:
    """Returns a bearer token of 256 random bits. Its prefix identifies it for people and secret scanners."""
    return f"mobizo-{kind}-{secrets.token_urlsafe(32)}"


def token_digest(token: str) -> str:
    """Returns the stored digest of a token. One hash round suffices, because 256 random bits cannot be guessed."""
    return sha256_hex(token.encode())
