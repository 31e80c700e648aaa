"""A round's updates become the next version's LoRA-B file: what a worker computes, from files alone.

Memory is O(D): updates are read one after another (`shared.federation.files`). Knows no database and no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.artifacts.store import ArtifactStore
from server.cohorts.queue import Assignment, Counted
from shared.canonical import canonical_json
from shared.errors import Conflict, InvalidUpload
from shared.federation.aggregation import aggregate
from shared.federation.files import FileSource, UploadedFile
from shared.federation.intake import Rules
from shared.federation.optimizers import advance, begin, load_state
from shared.federation.update import F32
from shared.lora import dump_adapter, load_adapter
from shared.masking.fixed_point import Total


class NoVersion(Conflict):
    """No version can be made of a round's updates."""

    code, title = "no-version", "No version"


@dataclass(frozen=True)
class Made:
    """The next version's LoRA-B file, and the state of what moves the adapter, as a file."""

    adapter: bytes
    optimizer: bytes


def make_version(artifacts: ArtifactStore, assignment: Assignment, total: Total | None = None) -> Made:
    """What comes of a round's updates. total: their sum, where they were masked and no single one can be read.

    Raises NoVersion, or Damaged or Unavailable where a file cannot be read.
    """
    settings, size = assignment.settings, assignment.size_d
    base = read_b(artifacts, assignment.base_sha256, size)
    # Masked updates have no privacy of members, which `CohortSettings` sees to: nobody here could clip them.
    update = _aggregated(artifacts, assignment, base) if total is None else total.mean.astype(np.float32)
    state = begin(settings.optimizer, size)
    if assignment.optimizer_sha256 is not None:
        state = load_state(artifacts.read(assignment.optimizer_sha256), settings.optimizer, size)
    moved, state = advance(settings.optimizer, state, base, update)
    if not np.isfinite(moved).all():
        raise NoVersion("the optimizer's step leads to values that are not finite; lower its lr")
    return Made(_file(moved, assignment), state.dump())


def _aggregated(artifacts: ArtifactStore, assignment: Assignment, base: F32) -> F32:
    """The round's update (D,)."""
    try:
        return aggregate(assignment.settings, _source(artifacts, assignment, base)).update
    except (InvalidUpload, ValueError) as error:
        raise NoVersion(str(error)) from error


def read_b(artifacts: ArtifactStore, sha256: str | None, size: int) -> F32:
    """Flat B, float32 (D,), of an adapter file; zeros where there is none."""
    return np.zeros(size, np.float32) if sha256 is None else load_adapter(artifacts.read(sha256), size)


def _source(artifacts: ArtifactStore, assignment: Assignment, base: F32) -> FileSource:
    starts = {assignment.base_sha256: base}
    for update in assignment.updates:
        if update.start_sha256 not in starts:
            starts[update.start_sha256] = read_b(artifacts, update.start_sha256, assignment.size_d)
    # The norm limit was held against each update when it came: nothing that was taken is to end the round now.
    rules = Rules(assignment.size_d, assignment.a_sha256)
    return FileSource([_uploaded(update, starts) for update in assignment.updates], rules, artifacts.open)


def _uploaded(update: Counted, starts: dict[str | None, F32]) -> UploadedFile:
    return UploadedFile(update.contribution, update.sha256, starts[update.start_sha256])


def _file(flat: F32, assignment: Assignment) -> bytes:
    """Flat B (D,) as an adapter file that says which round made it."""
    about = {
        "format": 1,
        "cohort": assignment.cohort,
        "round": assignment.position,
        "recipe_id": assignment.recipe.id,
        "a_sha256": assignment.a_sha256,
    }
    return dump_adapter(flat, {"mobizo": canonical_json(about).decode()})
