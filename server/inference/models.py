"""The models and texts in the memory of the scorer's process, and its work: batches of texts, and chats as prompts.

Base models, A matrices and adapters' B are in caches that are bounded by bytes. Entries are keyed by content and shared
between tenants; the server authorizes a request before it reaches the scorer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from cachetools import LRUCache

from server.catalog.calibrations.service import calibration_of
from server.inference.errors import BaseNotServed, ScorerFull, ScorerStopped
from server.inference.lora_rows import Projections, ServedAdapter
from server.inference.model import ServingBase, TextBatch
from server.inference.texts import ServedAdapterRef, ServedBaseRef, Text
from server.settings import Settings
from server.storage.opening import open_artifacts
from server.storage.store import Damaged
from shared.chat_template import ChatTemplate, Tools
from shared.constrained_decoding import Constraint, Vocabulary
from shared.errors import BadRequest, InvalidUpload, MobizoError, NotFound, Untrusted
from shared.generated_text import GeneratedToken
from shared.tokenizer import read_tokenizer
from shared.zo.lora import load_adapter

VOCABULARIES = 4  # that are kept
_log = structlog.get_logger()
Cache = LRUCache[object, Any]


class ServedModels:
    """The models of one process, and texts that are generated, by the number of their run."""

    def __init__(self, settings: Settings) -> None:
        self._artifacts = open_artifacts(settings)
        self.bases: Cache = LRUCache(settings.scorer_memory_bytes // 2, lambda base: base.nbytes)
        self.adapters: Cache = LRUCache(settings.scorer_memory_bytes // 8, lambda each: each.nbytes)
        self._vocabularies: Cache = LRUCache(VOCABULARIES)
        self._growing: dict[int, TextBatch] = {}

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

    def pid(self) -> int:
        """Returns the id of this process."""
        return os.getpid()

    def render(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Tools) -> str:
        """Returns a conversation as a prompt. Raises InvalidConversation."""
        return template.render_limited(messages, tools)

    def score(self, base: ServedBaseRef, texts: Sequence[Text]) -> list[list[list[float]]]:
        """Returns the log-probabilities of each text's picks, nats, in one batch."""
        adapters = [self.adapter(text.adapter) for text in texts]
        scores: list[list[list[float]]] = self.base(base).score(texts, adapters)
        return scores

    def begin(self, number: int, base: ServedBaseRef, texts: Sequence[Text]) -> None:
        """Makes room for texts that are generated together, under a number."""
        adapters = [self.adapter(text.adapter) for text in texts]
        constraints = [self.constraint(base, text) for text in texts]
        self._growing[number] = TextBatch(self.base(base), texts, adapters, constraints)

    def read(self, number: int, start: int, stop: int) -> list[GeneratedToken | MobizoError]:
        """Reads the prompts of some of the texts. Returns the first token after each."""
        texts = self._take(number)
        tokens: list[GeneratedToken | MobizoError] = texts.read(start, stop)
        self._growing[number] = texts
        return tokens

    def generate(self, number: int, rows: Sequence[int]) -> list[GeneratedToken | MobizoError]:
        """Returns the next token of each of these texts and removes others; without any, frees all."""
        texts = self._take(number)
        tokens = texts.step(rows) if rows else []
        if rows:
            self._growing[number] = texts
        return tokens

    def _take(self, number: int) -> TextBatch:
        """Returns texts, which are freed unless they are put back. Raises ScorerStopped if another process had them."""
        texts = self._growing.pop(number, None)
        if texts is None:
            raise ScorerStopped
        return texts


def _get(cache: Cache, key: object, nbytes: int, load: Callable[[], Any]) -> Any:
    """Returns an entry, which is loaded once others have made room for it. Raises ScorerFull."""
    if key not in cache:
        if nbytes > cache.maxsize:
            raise ScorerFull(f"a model takes {nbytes} bytes of memory; at most {int(cache.maxsize)} are for it")
        while cache.currsize + nbytes > cache.maxsize:
            cache.popitem()
        cache[key] = load()
    return cache[key]
