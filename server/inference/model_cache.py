"""The scorer's bounded caches of base models, A matrices and adapters' B.

Entries are keyed by content and shared between tenants; the server authorizes a request before it reaches the scorer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any

import structlog

from server.catalog.calibrations.service import calibration_of
from server.inference.errors import BaseNotServed, ScorerFull
from server.inference.frames import ServedAdapterRef, ServedBaseRef
from server.inference.lora_rows import Family, Projections, ServedAdapter, family_of
from server.inference.lru_cache import LruCache
from server.inference.model import ServingBase
from server.storage.store import ArtifactStore, Damaged
from shared.errors import BadRequest, InvalidUpload, NotFound, Untrusted
from shared.recipe import Recipe
from shared.zo.lora import BaseShape, flat_size, load_adapter, lora_modules

FLOAT_BYTES = 4
_log = structlog.get_logger()
Key = tuple[object, ...]


class ModelCache:
    """The caches of one scorer."""

    def __init__(self, artifacts: ArtifactStore, base_bytes: int, adapter_bytes: int) -> None:
        self._artifacts = artifacts
        self.bases: LruCache[str, ServingBase] = LruCache(base_bytes)
        self.adapters: LruCache[Key, Any] = LruCache(adapter_bytes)  # `Projections` and `ServedAdapter`s

    def base(self, ref: ServedBaseRef, in_use: Collection[str]) -> ServingBase:
        """Returns a base model. in_use: sha256s that must not be evicted. Raises ScorerFull or BaseNotServed."""
        try:
            return self.bases.get(ref.sha256, ref.nbytes, lambda: ServingBase.open(ref.source, ref.sha256), in_use)
        except (BadRequest, Untrusted) as error:
            # The error is not the client's, and paths are not disclosed.
            _log.error("base-not-served", sha256=ref.sha256, source=ref.source, cause=error.detail)
            raise BaseNotServed from error
        except MemoryError as error:
            raise ScorerFull(
                f"the base model takes {ref.nbytes} bytes; the limit is MOBIZO_SCORER_BASE_BYTES"
            ) from error

    def adapter(self, ref: ServedAdapterRef, in_use: Collection[Key]) -> ServedAdapter:
        """Returns an adapter. in_use: keys that must not be evicted. Raises ScorerFull, Damaged or Unavailable."""
        family, key = keys_of(ref)
        sizes = needs([ref])
        stay = {*in_use, family, key}
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

            adapter: ServedAdapter = self.adapters.get(key, sizes[key], read, stay)
        except (NotFound, InvalidUpload) as error:
            raise Damaged(f"the stored file {ref.sha256} is damaged or gone; restore it from a backup") from error
        except MemoryError as error:
            raise ScorerFull(
                f"the adapter takes {sum(sizes.values())} bytes; the limit is MOBIZO_SCORER_ADAPTER_BYTES"
            ) from error
        return adapter


@lru_cache(maxsize=1024)
def _measures(recipe: Recipe, shape: BaseShape) -> tuple[Family, int, int]:
    """Returns the recipe's family, the bytes of its A and the bytes of one B."""
    modules = lora_modules(recipe, shape)
    a = FLOAT_BYTES * sum(module.in_features * module.rank for module in modules)
    return family_of(recipe, shape), a, FLOAT_BYTES * flat_size(recipe, shape)


def keys_of(ref: ServedAdapterRef) -> tuple[Key, Key]:
    """Returns the cache keys of an adapter's projections and of its B."""
    shared: Key = ("a", ref.recipe.base.sha256, *_measures(ref.recipe, ref.shape)[0])
    return shared, ("b", ref.sha256, *shared)


def needs(refs: Iterable[ServedAdapterRef]) -> dict[Key, int]:
    """Returns the bytes of all entries that these adapters need, by key."""
    sizes: dict[Key, int] = {}
    for ref in refs:
        family, key = keys_of(ref)
        _, sizes[family], sizes[key] = _measures(ref.recipe, ref.shape)
    return sizes
