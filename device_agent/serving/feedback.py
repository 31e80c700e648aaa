"""Feedback on answers: remembers the latest answers of `serve` or `chat`, and adds ratings and edits to a data set.

A rating becomes a record with `prompt`, `completion` and `label`, an edit one with `prompt`, `chosen` and `rejected`.
The texts of a chat are lists of messages, as TRL writes conversations.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from device_agent.datasets.build import append_record
from device_agent.datasets.store import DatasetStore
from shared.errors import Conflict, InvalidRequest, NotFound
from shared.openai.requests import ChatRequest, CompletionRequest
from shared.strict_model import StrictModel

MAX_ANSWERS = 200  # that are remembered; the latest
ANSWER_SECONDS = 86_400.0  # that an answer is remembered
MAX_EDIT, MAX_COMMENT = 65_536, 4_000  # characters


class FeedbackRequest(StrictModel):
    """The body of `POST /v1/feedback`."""

    id: str = Field(min_length=1, max_length=100, description="of the answer, as its response or stream has it")
    rating: Literal["up", "down"]
    edit: str | None = Field(None, min_length=1, max_length=MAX_EDIT, description="what the answer should have been")
    comment: str | None = Field(None, max_length=MAX_COMMENT, description="kept with the record; not trained")


class FeedbackReceipt(BaseModel):
    """What became of feedback. added: False if the data set has the same record already."""

    id: str
    object: Literal["feedback"] = "feedback"
    dataset: str
    added: bool


@dataclass
class _RememberedAnswer:
    prompt: str | list[dict[str, str]]
    text: str
    at: float  # of the monotonic clock
    rated: bool = False

    def record(self, feedback: FeedbackRequest) -> dict[str, Any]:
        """Returns the record of feedback on this answer. Raises InvalidRequest for an edit that changes nothing."""
        extra = {} if feedback.comment is None else {"comment": feedback.comment}
        if feedback.edit is None:
            label = feedback.rating == "up"
            return {"prompt": self.prompt, "completion": self._turn(self.text), "label": label} | extra
        if feedback.edit == self.text:
            message = "the edit equals the answer; leave it out to rate the answer"
            raise InvalidRequest(f"edit: {message}", errors=[{"field": "edit", "message": message}])
        chosen, rejected = self._turn(feedback.edit), self._turn(self.text)
        return {"prompt": self.prompt, "chosen": chosen, "rejected": rejected} | extra

    def _turn(self, text: str) -> str | list[dict[str, str]]:
        return text if isinstance(self.prompt, str) else [{"role": "assistant", "content": text}]


class Feedback:
    """The latest answers by id, and the data set that gets the feedback on them."""

    def __init__(self, store: DatasetStore, dataset: str) -> None:
        self._store, self._dataset = store, dataset
        self._answers: dict[str, _RememberedAnswer] = {}  # oldest first
        self._adding = asyncio.Lock()

    def remember(self, answer_id: str, request: ChatRequest | CompletionRequest, text: str) -> None:
        """Remembers an answer, unless its request has several texts or a prompt of tokens."""
        prompt: Any = None
        if isinstance(request, ChatRequest):
            prompt = [message.turn for message in request.messages]
        elif len(request.prompts) == 1 and isinstance(request.prompts[0], str):
            prompt = request.prompts[0]
        if prompt is not None and (request.n or 1) == 1:
            self.keep(answer_id, prompt, text)

    def keep(self, answer_id: str, prompt: str | list[dict[str, str]], text: str) -> None:
        """Remembers an answer to a prompt, a text or the messages of a conversation."""
        self._answers[answer_id] = _RememberedAnswer(prompt, text, time.monotonic())
        if len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]

    async def add(self, feedback: FeedbackRequest) -> FeedbackReceipt:
        """Adds the record of feedback to the data set, durably.

        Raises NotFound for an unknown or expired id, Conflict for an answer that has feedback, InvalidRequest, and what
        `append_record` raises; the answer can then be rated again.
        """
        async with self._adding:
            answer = self._answers.get(feedback.id)
            if answer is None or time.monotonic() - answer.at > ANSWER_SECONDS:
                raise NotFound(
                    f"no answer {feedback.id!r} is remembered; `mobizo-agent serve` remembers the last {MAX_ANSWERS} "
                    f"answers of one text for {ANSWER_SECONDS / 3600:.0f} hours, until it ends"
                )
            if answer.rated:
                raise Conflict(f"answer {feedback.id!r} has feedback already; an answer is rated once")
            added = await asyncio.to_thread(append_record, self._store, self._dataset, answer.record(feedback))
            answer.rated = True
        return FeedbackReceipt(id=feedback.id, dataset=self._dataset, added=added)
