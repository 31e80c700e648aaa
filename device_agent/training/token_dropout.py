"""Leaves tokens of prompts out of training steps.

Of a few hundred records a model soon knows each by a few of its words. Where other words are missing at each visit, it
has to learn from all of them. Frozen layers read whole prompts, so that their outputs are computed once; what is left
out is missing from the first adapted layer on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shared.recipe import PREFERENCE_LOSSES, Recipe
from shared.zo.encoding import Example, Row
from shared.zo.noise import DOMAIN_DROPOUT, stream_key, threefry2x32, uniform

KEPT = 8  # last tokens of a prompt, which stay: they say what is asked for

Positions = NDArray[np.int64]


def drop_tokens(
    numbered: Iterable[tuple[int, Example]], recipe: Recipe, share: float, seed: int, step: int
) -> tuple[list[Example], list[Positions]]:
    """Returns a step's examples without a share of their prompts' tokens, and for each text of `step_texts` the
    positions of its tokens that stay. numbered: each with its index in the training split. seed: of the job.
    """
    key = stream_key(seed, DOMAIN_DROPOUT)
    thinned: list[Example] = []
    kept: list[Positions] = []
    for index, example in numbered:
        x0, x1 = threefry2x32(key, step, index)
        # Rows with the same prompt lose the same tokens.
        stays = (uniform((int(x0[0]), int(x1[0])), example.length) + 1) / 2 >= share
        rows, positions = zip(*(_thin(row, stays) for row in example.rows), strict=True)
        thinned.append(replace(example, rows=rows))
        kept += positions if recipe.loss in PREFERENCE_LOSSES else [positions[example.correct]]
    return thinned, kept


def _thin(row: Row, stays: NDArray[np.bool_]) -> tuple[Row, Positions]:
    """Returns a row, and the positions of its tokens that stay, which those of the answer do."""
    length = len(row.prompt)
    stays = stays[:length].copy()
    stays[:1] = stays[max(length - KEPT, 0) :] = True
    positions = np.flatnonzero(stays)
    prompt = tuple(row.prompt[position] for position in positions)
    return replace(row, prompt=prompt), np.append(positions, np.arange(length, len(row.tokens)))
