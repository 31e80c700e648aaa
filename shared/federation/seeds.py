"""Job seeds of a round.

Each member has a different seed in each round, so that members explore different directions.
"""

from __future__ import annotations

from hashlib import sha256

from shared.canonical import canonical_json
from shared.recipe import MAX_SEED


def member_seed(seed: int, cohort: str, number: int, user: str) -> int:
    """Returns a member's job seed in round `number`, from 0 to MAX_SEED, derived from the cohort's seed.

    The seed is derived and not random, so that a simulation of the same cohort trains the same runs.
    """
    digest = sha256(b"mobizo round\n" + canonical_json([seed, cohort, number, user])).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED
