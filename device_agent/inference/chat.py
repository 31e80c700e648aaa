"""A chat with a personal model: formats the conversation as a prompt and streams the answer as text.

The base's own chat template, which the program's signed manifest has, writes the prompt. Without it the model continues
the plain text.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from device_agent.inference.personal_model import PersonalModel
from shared.chat_template import ChatTemplate
from shared.errors import BadRequest
from shared.sampling import Sampler
from shared.text_stream import TextStream
from shared.zo.encoding import token_ids


@dataclass
class Chat:
    """One conversation. template: None continues each text by itself. max_tokens: maximum tokens per answer.

    temperature, seed: as in `Sampler`.
    """

    model: PersonalModel
    template: ChatTemplate | None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ended: str = field(default="", init=False)  # why the last answer ended
    forgotten: int = field(default=0, init=False)  # turns that no longer fit
    prompt: str | list[dict[str, str]] = field(default="", init=False)  # what the last answer answers
    _turns: list[tuple[str, str]] = field(default_factory=list, init=False)  # texts and their answers
    _answers: int = field(default=0, init=False)

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yields pieces of the answer to `text`; close the generator to stop.

        Raises BadRequest if the text alone exceeds the context, InvalidConversation.
        """
        tokens = self._tokens(text)
        while self._turns and len(tokens) + self.max_tokens - 1 > self.model.context:
            self._turns.pop(0)
            self.forgotten += 1
            tokens = self._tokens(text)
        max_tokens = min(self.max_tokens, self.model.context - len(tokens) + 1)
        if max_tokens < 1:
            raise BadRequest(
                f"the text has {len(tokens)} tokens; text and answer share {self.model.context}: shorten the text"
            )
        sampler = Sampler(self.temperature, 1.0, self.seed + self._answers)
        generated = (each.token for each in self.model.inference.generate(tokens, max_tokens, sampler))
        self._answers += 1
        self.prompt = text if self.template is None else self._messages(text)
        limit = "the context is full" if max_tokens < self.max_tokens else f"{max_tokens} tokens"
        return self._stream(text, tokens, generated, limit)

    def _stream(self, text: str, tokens: list[int], generated: Iterator[int], limit: str) -> Generator[str, None, None]:
        stream, answer = TextStream(self.model.tokenizer, tokens), ""
        special = ends(self.model)
        self.ended = "stopped"
        try:
            for token in generated:
                if token in special:
                    self.ended = "the answer is complete"
                    break
                if piece := stream.push(token):
                    answer += piece
                    yield piece
            else:
                self.ended = limit
            if piece := stream.flush():
                answer += piece
                yield piece
        finally:
            if self.template is not None:
                self._turns.append((text, answer))

    def _tokens(self, text: str) -> list[int]:
        """Returns the tokens of the conversation, up to where the answer to `text` begins."""
        if self.template is None:
            return token_ids(self.model.tokenizer, text)
        rendered = self.template.render_in_subprocess(self._messages(text))
        return token_ids(self.model.tokenizer, rendered, special=False)

    def _messages(self, text: str) -> list[dict[str, str]]:
        messages = []
        for question, answer in self._turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": text}]


def ends(model: PersonalModel, opening: str = "") -> frozenset[int]:
    """Returns the tokens that end an answer: those that the base's files name, and every special one but `opening`."""
    added_tokens = model.tokenizer.get_added_tokens_decoder().items()
    special = {token for token, added_token in added_tokens if added_token.special and added_token.content != opening}
    return frozenset(model.manifest.ends) | special
