"""What the scorer holds in memory: base models, A matrices and adapters' B, each in a bounded number of bytes.

Everything is named by its content, so that it does not matter whose it is; who may ask for it, the server has decided
before. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any

import structlog

from server.artifacts.store import ArtifactStore, Damaged
from server.calibrations.reading import calibration_of
from server.compiler.lora_rows import Family, Projections, ServedAdapter, family_of
from server.compiler.serving import ServingBase
from server.scoring.errors import BaseNotServed, ScorerFull
from server.scoring.frames import ServedAdapterRef, ServedBaseRef
from server.scoring.shelf import Shelf
from shared.errors import BadRequest, InvalidUpload, NotFound, Untrusted
from shared.lora import BaseShape, flat_size, load_adapter, lora_modules
from shared.recipe import Recipe

FLOAT_BYTES = 4
_log = structlog.get_logger()
Key = tuple[object, ...]


class Holdings:
    """One scorer's memory."""

    def __init__(self, artifacts: ArtifactStore, base_bytes: int, adapter_bytes: int) -> None:
        self._artifacts = artifacts
        self.bases: Shelf[str, ServingBase] = Shelf(base_bytes)
        self.adapters: Shelf[Key, Any] = Shelf(adapter_bytes)  # `Projections` and `ServedAdapter`s

    def base(self, ref: ServedBaseRef, in_use: Collection[str]) -> ServingBase:
        """A base model. Raises ScorerFull or BaseNotServed. in_use: sha256s of those that must stay."""
        try:
            return self.bases.get(ref.sha256, ref.nbytes, lambda: ServingBase.open(ref.source, ref.sha256), in_use)
        except (BadRequest, Untrusted) as error:
            # Who asks has done nothing wrong, and need not learn where the files are.
            _log.error("base-not-served", sha256=ref.sha256, source=ref.source, cause=error.detail)
            raise BaseNotServed from error
        except MemoryError as error:
            raise ScorerFull(
                f"the base model takes {ref.nbytes} bytes; MOBIZO_SCORER_BASE_BYTES is the most"
            ) from error

    def adapter(self, ref: ServedAdapterRef, in_use: Collection[Key]) -> ServedAdapter:
        """An adapter. Raises ScorerFull, Damaged or Unavailable. in_use: keys of those that must stay."""
        family, own = keys_of(ref)
        sizes = needs([ref])
        stay = {*in_use, family, own}
        try:
            projections: Projections = self.adapters.get(
                family,
                sizes[family],
                lambda: Projections(ref.recipe, ref.shape, calibration_of(self._artifacts, ref.recipe)),
                stay,
            )

            def read() -> ServedAdapter:
                flat = load_adapter(self._artifacts.read(ref.sha256), projections.size)
                return ServedAdapter(projections, flat)

            adapter: ServedAdapter = self.adapters.get(own, sizes[own], read, stay)
        except (NotFound, InvalidUpload) as error:
            raise Damaged(f"the stored file {ref.sha256} is damaged or gone; restore it from a backup") from error
        except MemoryError as error:
            raise ScorerFull(
                f"the adapter takes {sum(sizes.values())} bytes; MOBIZO_SCORER_ADAPTER_BYTES is the most"
            ) from error
        return adapter


@lru_cache(maxsize=1024)
def _measures(recipe: Recipe, shape: BaseShape) -> tuple[Family, int, int]:
    """The recipe's family, and the bytes of its A and of a B."""
    modules = lora_modules(recipe, shape)
    a = FLOAT_BYTES * sum(module.in_features * module.rank for module in modules)
    return family_of(recipe, shape), a, FLOAT_BYTES * flat_size(recipe, shape)


def keys_of(ref: ServedAdapterRef) -> tuple[Key, Key]:
    """What an adapter's projections and its B are held under."""
    shared: Key = ("a", ref.recipe.base.sha256, *_measures(ref.recipe, ref.shape)[0])
    return shared, ("b", ref.sha256, *shared)


def needs(refs: Iterable[ServedAdapterRef]) -> dict[Key, int]:
    """Bytes of everything that these adapters take, by key."""
    sizes: dict[Key, int] = {}
    for ref in refs:
        family, own = keys_of(ref)
        _, sizes[family], sizes[own] = _measures(ref.recipe, ref.shape)
    return sizes
