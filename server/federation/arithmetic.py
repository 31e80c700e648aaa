"""Aggregates the updates of a round into the LoRA-B file of the next version, from files alone.

Updates are read one after another (`shared.federation.files`), so memory is O(D).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.storage.store import ArtifactStore
from shared.canonical import canonical_json
from shared.errors import Conflict, InvalidUpload
from shared.federation.aggregation import aggregate
from shared.federation.cohort import CohortSettings
from shared.federation.files import FileSource, UploadedFile
from shared.federation.intake import UpdateRequirements
from shared.federation.optimizers import advance, initial_state, load_state
from shared.federation.secure_aggregation.fixed_point import Total
from shared.federation.update import F32, Contribution
from shared.recipe import Recipe
from shared.zo.lora import dump_adapter, load_adapter


class NoVersion(Conflict):
    """The updates of a round cannot be aggregated into a version."""


@dataclass(frozen=True)
class CountedUpdate:
    """An accepted update. sha256, start_sha256: LoRA-B files after and before the run; None: B = 0."""

    contribution: Contribution
    sha256: str
    start_sha256: str | None


@dataclass(frozen=True)
class RoundOrder:
    """The inputs of an aggregation. base_sha256: the LoRA-B to which the optimizer step is applied; None: B = 0."""

    round_id: str
    cohort: str
    position: int
    settings: CohortSettings
    recipe: Recipe
    a_sha256: str
    size_d: int
    base_version: int | None
    base_sha256: str | None
    optimizer_sha256: str | None
    updates: tuple[CountedUpdate, ...]


@dataclass(frozen=True)
class StoredFiles:
    """The stored files of the next version. adapter, optimizer: sha256. size: bytes of the LoRA-B file."""

    adapter: str
    size: int
    optimizer: str


def make_version(artifacts: ArtifactStore, order: RoundOrder, total: Total | None = None) -> StoredFiles:
    """Aggregates the updates of a round, applies the server optimizer, and stores B and the optimizer's state.

    total: the sum of masked updates. Raises NoVersion, or Damaged or Unavailable where a file cannot be read.
    """
    settings, size = order.settings, order.size_d
    base = read_b(artifacts, order.base_sha256, size)
    # `CohortSettings` rejects member-level privacy with masked updates: the server cannot clip them.
    update = _aggregate(artifacts, order, base) if total is None else total.mean.astype(np.float32)
    state = initial_state(settings.optimizer, size)
    if order.optimizer_sha256 is not None:
        state = load_state(artifacts.read(order.optimizer_sha256), settings.optimizer, size)
    new_b, state = advance(settings.optimizer, state, base, update)
    if not np.isfinite(new_b).all():
        raise NoVersion("the step of the server optimizer produced non-finite values; lower its lr")
    adapter = _file(new_b, order)
    return StoredFiles(artifacts.put(adapter), len(adapter), artifacts.put(state.dump()))


def _aggregate(artifacts: ArtifactStore, order: RoundOrder, base: F32) -> F32:
    """Returns the aggregated update, float32 (D,). Raises NoVersion."""
    starts = {order.base_sha256: base}
    # The norm limit was checked at upload; an accepted update must not fail the round now.
    rules = UpdateRequirements(order.size_d, order.a_sha256)
    try:
        for update in order.updates:
            if update.start_sha256 not in starts:
                starts[update.start_sha256] = read_b(artifacts, update.start_sha256, order.size_d)
        files = [UploadedFile(each.contribution, each.sha256, starts[each.start_sha256]) for each in order.updates]
        return aggregate(order.settings, FileSource(files, rules, artifacts.open)).update
    except (InvalidUpload, ValueError) as error:
        raise NoVersion(str(error)) from error


def read_b(artifacts: ArtifactStore, sha256: str | None, size: int) -> F32:
    """Returns the flat B of an adapter file, float32 (D,), or zeros if `sha256` is None."""
    return np.zeros(size, np.float32) if sha256 is None else load_adapter(artifacts.read(sha256), size)


def _file(flat: F32, order: RoundOrder) -> bytes:
    """Returns flat B (D,) as an adapter file whose metadata names the round."""
    about = {
        "format": 1,
        "cohort": order.cohort,
        "round": order.position,
        "recipe_id": order.recipe.id,
        "a_sha256": order.a_sha256,
    }
    return dump_adapter(flat, {"mobizo": canonical_json(about).decode()})
