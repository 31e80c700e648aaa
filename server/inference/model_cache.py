"""The scorer's caches of base models, A matrices and adapters' B, bounded by bytes, and of vocabularies.

Entries are keyed by content and shared between tenants; the server authorizes a request before it reaches the scorer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
from cachetools import LRUCache

from server.catalog.calibrations.service import calibration_of
from server.inference.errors import BaseNotServed, ScorerFull
from server.inference.lora_rows import Projections, ServedAdapter
from server.inference.model import ServingBase
from server.inference.texts import ServedAdapterRef, ServedBaseRef, Text
from server.storage.store import ArtifactStore, Damaged
from shared.constrained_decoding import Constraint, Vocabulary
from shared.errors import BadRequest, InvalidUpload, NotFound, Untrusted
from shared.tokenizer import read_tokenizer
from shared.zo.lora import load_adapter

VOCABULARIES = 4  # that are kept
_log = structlog.get_logger()
Cache = LRUCache[object, Any]


class ModelCache:
    """The models of one scorer."""

    def __init__(self, artifacts: ArtifactStore, base_bytes: int, adapter_bytes: int) -> None:
        self._artifacts = artifacts
        self.bases: Cache = LRUCache(base_bytes, lambda base: base.nbytes)
        self.adapters: Cache = LRUCache(adapter_bytes, lambda each: each.nbytes)
        self._vocabularies: Cache = LRUCache(VOCABULARIES)

    def base(self, ref: ServedBaseRef) -> ServingBase:
        """Returns a base model. Raises ScorerFull or BaseNotServed."""
        try:
            base: ServingBase = _get(
                self.bases, ref.sha256, ref.nbytes, lambda: ServingBase.open(ref.source, ref.sha256)
            )
        except (BadRequest, Untrusted) as error:
            # The error is not the client's, and paths are not disclosed.
            _log.error("base-not-served", sha256=ref.sha256, source=ref.source, cause=error.detail)
            raise BaseNotServed from error
        return base

    def adapter(self, ref: ServedAdapterRef | None) -> ServedAdapter | None:
        """Returns an adapter. Raises ScorerFull, Damaged or Unavailable."""
        if ref is None:
            return None

        def project() -> Projections:
            return Projections(ref.recipe, ref.shape, calibration_of(self._artifacts, ref.recipe))

        try:
            # Both have room if one of their sizes together has.
            projections: Projections = _get(self.adapters, ref.family, ref.nbytes, project)
            adapter: ServedAdapter = _get(
                self.adapters,
                (ref.family, ref.sha256),
                ref.nbytes,
                lambda: ServedAdapter(projections, load_adapter(self._artifacts.read(ref.sha256), projections.size)),
            )
        except (NotFound, InvalidUpload) as error:
            raise Damaged(f"the stored file {ref.sha256} is damaged or gone; restore it from a backup") from error
        return adapter

    def constraint(self, ref: ServedBaseRef, text: Text) -> Constraint | None:
        """Returns what may follow the tokens of a text; None: any token. Raises InvalidSchema and as `base`."""
        if text.schema is None:
            return None
        key = (ref.tokenizer, text.ends)
        if key not in self._vocabularies:
            tokenizer = read_tokenizer(self._artifacts.read(ref.tokenizer))
            self._vocabularies[key] = Vocabulary(tokenizer, self.base(ref).facts.vocabulary, text.ends)
        return Constraint(self._vocabularies[key], text.schema, text.tokens[len(text.tokens) - text.drawn :])


def _get(cache: Cache, key: object, nbytes: int, load: Callable[[], Any]) -> Any:
    """Returns an entry, which is loaded once others have made room for it. Raises ScorerFull."""
    if key not in cache:
        if nbytes > cache.maxsize:
            raise ScorerFull(f"a model takes {nbytes} bytes of memory; at most {int(cache.maxsize)} are for it")
        while cache.currsize + nbytes > cache.maxsize:
            cache.popitem()
        cache[key] = load()
    return cache[key]
