"""Names for new things: identifiers that say their kind, and bearer tokens that only their digest is kept of."""

from __future__ import annotations

import secrets

from shared.canonical import sha256_hex


def new_id(kind: str) -> str:
    """`kind` and 96 random bits, such as `job_1f3a...`: safe in URLs and paths."""
    return f"{kind}_{secrets.token_hex(12)}"


def new_token(kind: str) -> str:
    """A bearer token of 256 random bits; its prefix lets people and secret scanners tell what it is."""
    return f"mobizo-{kind}-{secrets.token_urlsafe(32)}"


def token_digest(token: str) -> str:
    """What is stored of a token. One round suffices: 256 random bits cannot be guessed from it."""
    return sha256_hex(token.encode())
