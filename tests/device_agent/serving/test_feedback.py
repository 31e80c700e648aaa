"""Feedback on remembered answers: what is remembered for how long, and what a failed addition leaves."""

import asyncio
import errno
import os

import pytest

from device_agent.datasets.store import DatasetStore
from device_agent.serving import feedback as module
from device_agent.serving.feedback import Feedback, FeedbackRequest
from shared.errors import Conflict, InvalidRequest, MobizoError, NotFound
from shared.openai.requests import CompletionRequest


@pytest.fixture
def store(tmp_path):
    return DatasetStore(tmp_path / "data")


def completion(**fields):
    return CompletionRequest(**{"model": "red", "prompt": "How was it?"} | fields)


def records(store, name="ratings"):
    return [record for split in store.about(name).records for _, record in store.records(name, split)]


def rate(feedback, *bodies):
    """Adds feedback in order, in one event loop; returns the receipts."""

    async def add_all():
        return [await feedback.add(FeedbackRequest(**{"id": "a", "rating": "up"} | body)) for body in bodies]

    return asyncio.run(add_all())


def test_answers_are_forgotten_by_age_and_number_and_those_of_several_texts_at_once(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_ANSWERS", 2)
    feedback = Feedback(store, "ratings")
    for answer in "abc":
        feedback.remember(answer, completion(), answer)
    feedback.remember("d", completion(n=2), "two texts")
    feedback.remember("e", completion(prompt=[1, 2]), "tokens")
    assert rate(feedback, {"id": "b"}, {"id": "c"})[1].added
    for answer in "ade":
        with pytest.raises(NotFound, match="remembers the last 2 answers of one text for 24 hours"):
            rate(feedback, {"id": answer})
    feedback.remember("f", completion(), "old")
    monkeypatch.setattr(module, "ANSWER_SECONDS", -1)
    with pytest.raises(NotFound):
        rate(feedback, {"id": "f"})


def test_an_answer_is_rated_once_and_again_if_the_addition_failed(store, monkeypatch):
    feedback = Feedback(store, "ratings")
    feedback.remember("a", completion(), " dull")
    with pytest.raises(InvalidRequest, match="edit: the edit equals the answer"):
        rate(feedback, {"edit": " dull"})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(MobizoError, match=r"data set ratings is unchanged .*No space left"):
            rate(feedback, {})
    with store.changing(), pytest.raises(Conflict, match="another"):
        rate(feedback, {})
    assert rate(feedback, {})[0].added
    with pytest.raises(Conflict, match="has feedback already"):
        rate(feedback, {"rating": "down"})
    assert len(records(store)) == 1
