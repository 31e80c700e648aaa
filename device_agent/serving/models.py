"""The models of one home, by the names that requests give them, with one program in memory at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from device_agent.errors import RuntimeFailed
from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore, LoadedAdapter, StoredAdapter
from device_agent.inference.chat import ends
from device_agent.inference.personal_model import PersonalModel, load_program, missing
from device_agent.inference.predict import predict
from shared.chat_template import NoChatTemplate
from shared.constrained_decoding import Constraint, Vocabulary, check_schema
from shared.errors import AdapterNotFound, Unavailable
from shared.openai.answers import GrowingText, ResponsePiece, TextOptions, unix_seconds
from shared.openai.completions import Finish, Model, Usage
from shared.openai.requests import ChatRequest, CompletionRequest
from shared.openai.tools import ToolUse
from shared.sampling import Sampler
from shared.scoring import ClassifyRequest, ClassifyResult, ScoredBy
from shared.zo.encoding import prompt_tokens

OWNER = "device"


class DeviceModels:
    """Adapters of the store and their bases. An adapter of another program replaces the loaded program. One thread."""

    def __init__(self, home: AgentHome) -> None:
        self._home, self._store = home, AdapterStore(home)
        self._model: PersonalModel | None = None
        self._loaded: str | None = None  # sha256 of the loaded adapter file; None: B = 0
        self._vocabulary: tuple[frozenset[int], Vocabulary] | None = None  # of the loaded program and these ends

    def list_models(self) -> list[Model]:
        """Returns the adapters that can be used, then their bases."""
        usable = [about for about in self._store.stored() if about.files and not missing(self._home, about)]
        bases = {about.signed.manifest.recipe.base.name: about for about in usable}
        return [*map(_adapter, usable), *(_base(name, about) for name, about in sorted(bases.items()))]

    def find(self, name: str) -> Model:
        """Returns one model. Raises AdapterNotFound, Untrusted."""
        opened, is_base = self._open(name)
        return _base(name, opened.about) if is_base else _adapter(opened.about)

    def use(self, name: str) -> tuple[PersonalModel, str | None]:
        """Loads a model; returns it and the revision of its adapter's version, if it has one.

        Raises AdapterNotFound, NotFound if a file is missing, Untrusted, RuntimeFailed.
        """
        opened, is_base = self._open(name)
        model = self._model
        if model is None or not model.runs(opened.manifest):
            self.close()
            model, self._loaded = load_program(self._home, opened), None
        adapter_sha256 = None if is_base else opened.about.sha256
        if adapter_sha256 != self._loaded:
            model.inference.load(np.zeros_like(opened.flat) if is_base else opened.flat)
            self._loaded = adapter_sha256
        # The manifests of one program may differ in what does not change its files, such as its chat template.
        self._model = replace(model, name=name, task=opened.about.task, manifest=opened.manifest)
        origin = None if is_base else opened.about.origin
        return self._model, None if origin is None else origin.manifest.revision

    def constraint(self, model: PersonalModel, schema: str, end_tokens: frozenset[int]) -> Constraint:
        """Returns what a text of the loaded model may contain. Raises InvalidSchema."""
        if self._vocabulary is None or self._vocabulary[0] != end_tokens:
            vocabulary = Vocabulary(model.tokenizer, model.manifest.shape.vocabulary, end_tokens)
            self._vocabulary = (end_tokens, vocabulary)
        return Constraint(self._vocabulary[1], schema)

    def close(self) -> None:
        """Frees the program's memory."""
        if self._model is not None:
            self._model.close()
        self._model = self._vocabulary = None

    def _open(self, name: str) -> tuple[LoadedAdapter, bool]:
        """Returns the adapter of a name, or an adapter of the base of that name and True."""
        keys = self._home.config().trusted_keys()
        if name in self._store.names():
            return self._store.open(name, *keys), False
        stored = [about for about in self._store.stored() if about.signed.manifest.recipe.base.name == name]
        if not stored:
            raise AdapterNotFound(
                f"no adapter and no base of an adapter is named {name!r} on this device; GET /v1/models lists them"
            )
        # The loaded program, if it is one of that base; another one would have to be loaded first.
        model = self._model
        stored.sort(key=lambda about: (model is not None and model.runs(about.signed.manifest), about.kept_at))
        return self._store.open(stored[-1].name, *keys), True


def _adapter(about: StoredAdapter) -> Model:
    base = about.signed.manifest.recipe.base.name
    return Model(id=about.name, created=unix_seconds(about.kept_at), owned_by=OWNER, parent=base)


def _base(name: str, about: StoredAdapter) -> Model:
    return Model(id=name, created=unix_seconds(about.kept_at), owned_by="base")


def classify(models: DeviceModels, name: str, request: ClassifyRequest) -> Generator[ClassifyResult, None, None]:
    """Yields how an adapter classifies a record, once, as `POST /v1/adapters/{name}/classify` of a server does.

    Raises the errors of `DeviceModels.use` and `ClassifyRequest.record`, or Unavailable.
    """
    try:
        model, revision = models.use(name)
        prediction = predict(model, request.record(model.task), "fields")
    except RuntimeFailed as error:
        models.close()
        raise Unavailable(error.detail) from error
    scored_by = ScoredBy(base=model.manifest.recipe.base.name, adapter=name, revision=revision)
    scores = [(each.label or each.text, each.probability, each.log_probability) for each in prediction.candidates]
    yield ClassifyResult.of(scored_by, scores)


@dataclass
class DeviceAnswers:
    """The texts of one request, one after the other. fingerprint: revision of the adapter's version."""

    models: DeviceModels
    request: ChatRequest | CompletionRequest
    fingerprint: str | None = None
    tools: ToolUse | None = None
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0))

    def steps(self) -> Generator[ResponsePiece, None, None]:
        """Yields the pieces of each text, and its end.

        Raises the errors of `DeviceModels.use`, TextTooLong, NoChatTemplate, InvalidConversation,
        InvalidSchema, NoTokenAllowed, or Unavailable if the program stopped; the next request loads it again.
        """
        try:
            model, self.fingerprint = self.models.use(self.request.model)
            context, vocabulary = model.context, model.manifest.shape.vocabulary
            prompts = [
                prompt_tokens(model.tokenizer, prompt, context, vocabulary, special=special)
                for prompt, special in self._prompts(model)
            ]
            if (schema := self._schema) is not None:
                check_schema(schema, "tools" if self.tools else "response_format")
            self._count(sum(map(len, prompts)), 0)
            texts = [prompt for prompt in prompts for _ in range(self.request.n or 1)]
            for index, prompt in enumerate(texts):
                yield from self._text(model, index, prompt)
        except RuntimeFailed as error:
            self.models.close()
            raise Unavailable(error.detail) from error

    def _prompts(self, model: PersonalModel) -> list[tuple[str | tuple[int, ...], bool]]:
        """Returns each prompt as text or tokens, and whether the tokenizer adds its own tokens, such as BOS."""
        if isinstance(self.request, CompletionRequest):
            return [(prompt, True) for prompt in self.request.prompts]
        template = model.manifest.chat_template
        if template is None:
            base = model.manifest.recipe.base.name
            raise NoChatTemplate(f"base model {base!r} has no chat template; use /v1/completions")
        self.tools = ToolUse.of(self.request, template)
        turns = [message.turn for message in self.request.messages]
        prompt = template.render_in_subprocess(turns, tools=self.request.tool_descriptions)
        return [(prompt + (self.tools.prompt_end if self.tools else ""), False)]

    @property
    def _schema(self) -> str | None:
        return self.tools.schema if self.tools else TextOptions.of(self.request, 0).schema

    def _text(self, model: PersonalModel, index: int, prompt: tuple[int, ...]) -> Iterator[ResponsePiece]:
        options = TextOptions.of(self.request, index)
        max_tokens = min(options.max_tokens, model.context - len(prompt) + 1)
        special = ends(model, self.tools.format.opening if self.tools else "")
        constraint = None if self._schema is None else self.models.constraint(model, self._schema, special)
        sampler = Sampler(options.temperature, options.top_p, options.seed, constraint=constraint)
        text = GrowingText(index, model.tokenizer, prompt, options)
        finish: Finish = "length"
        for token in model.inference.generate(prompt, max_tokens, sampler, options.likeliest):
            if token.token in special:
                finish = "stop"
                break
            self._count(0, 1)
            yield from text.push(token)
            if text.ended:
                break
        yield from text.end(finish)

    def _count(self, read: int, generated: int) -> None:
        prompt, completion = self.usage.prompt_tokens + read, self.usage.completion_tokens + generated
        self.usage = Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
