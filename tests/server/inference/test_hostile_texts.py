"""Texts that are far too long are refused before they are tokenized, and reading stops when the client leaves."""

import pytest

from server.inference import service
from server.inference.service import ScoringService
from shared.errors import BadRequest
from shared.scoring import ScoreRequest
from shared.task import MAX_TASK, Task
from shared.tokenizer import TextTooLong


@pytest.fixture
def scoring(home, monkeypatch):
    """A service, and how many choices it tokenized."""
    tokenized = []
    encode = service.encode_choice

    def count_call(tokenizer, choice):
        tokenized.append(choice)
        return encode(tokenizer, choice)

    monkeypatch.setattr(service, "encode_choice", count_call)
    monkeypatch.setattr(service, "REQUEST_TOKENS", 1000)
    with home.database.reading() as session:
        yield ScoringService(session, home.artifacts, "default"), tokenized


def request(*rows, **changes):
    return ScoreRequest.model_validate({"base": "tiny", "rows": rows} | changes)


def never():
    return False


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "x" * 900_000, "answers": ["x"]}],
        [{"prompt": "x", "answers": ["x" * 900_000]}],
        [{"prompt": "x" * 5_000, "answers": ["x"] * 64}],
        [{"prompt": "x" * 20, "answers": ["x"]}] * 1_000,
        [{"prompt": "x" * 1_025, "answers": ["x"]}],  # the base's context has 64 tokens
    ],
)
def test_texts_that_are_far_too_long_are_not_tokenized(scoring, rows):
    reader, tokenized = scoring
    with pytest.raises(TextTooLong):
        reader.read(request(*rows), never)
    assert tokenized == []


def test_a_template_that_repeats_a_field_is_not_filled(scoring):
    reader, tokenized = scoring
    task = {"name": "large", "prompt": "{a}" * 64, "answers": [{"text": " x", "labels": ["1"]}] * 1}
    task["answers"] += [{"text": " y", "labels": ["2"]}]
    with pytest.raises(TextTooLong):
        reader.read(request({"record": {"a": "x" * 1_000_000}}, task=task), never)
    assert tokenized == []


def test_reading_stops_when_the_client_has_left(scoring):
    reader, tokenized = scoring
    row = {"prompt": "a film", "answers": ["great"]}
    with pytest.raises(BadRequest, match="closed the connection"):
        reader.read(request(*[row] * 10), lambda: len(tokenized) >= 3)
    assert len(tokenized) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "x" * 8_001},
        {"prompt": "{a}" * 65},
        {"label_field": "x" * 101},
        {"answers": [{"text": "x", "labels": [str(number) * 200]} for number in range(65)]},
        {"mapped": {f"f{n}": {"field": "x", "values": {str(v): "y" * 900 for v in range(10)}} for n in range(10)}},
    ],
)
def test_a_task_has_a_largest_size(changes):
    task = {"name": "t", "prompt": "{a}", "answers": [{"text": "x", "labels": ["1"]}, {"text": "y", "labels": ["2"]}]}
    with pytest.raises(ValueError, match=r"at most|limit is|more than"):
        Task.model_validate(task | changes)
    assert MAX_TASK == 65_536
