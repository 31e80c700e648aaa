"""The job seeds of a round: each member's own, so that members explore different directions, and others each round."""

from __future__ import annotations

from hashlib import sha256

from shared.canonical import canonical_json
from shared.recipe import MAX_SEED


def member_seed(seed: int, cohort: str, number: int, user: str) -> int:
    """The job seed of a member in round `number`, from 0 to MAX_SEED, drawn from the cohort's own seed.

    Derived and not random, so that a simulation of the same cohort trains the same runs.
    """
    digest = sha256(b"mobizo round\n" + canonical_json([seed, cohort, number, user])).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED
