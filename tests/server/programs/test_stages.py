"""What a compile tells, in words, and how seldom."""

from types import SimpleNamespace

import pytest

from server.programs import compilation
from server.programs.compilation import CompileProgress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(compilation, "time", SimpleNamespace(monotonic=lambda: now[0]))  # others have the true time
    return now


def test_news_once_and_not_too_often(clock):
    heard = CompileProgress()
    assert heard.news() is None
    heard.update({"stage": "read", "fraction": 0.0})
    assert heard.news().line() == "compiling  reading the base model"
    assert heard.news() is None
    heard.update({"stage": "lower", "fraction": 0.0})
    heard.update({"stage": "emit", "fraction": 0.5})
    assert heard.news() is None
    clock[0] += compilation.NEWS_SECONDS
    assert heard.news().why == "writing the program, 50%"
    clock[0] += 100
    assert heard.news() is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, None),
        ({"stage": 3}, None),
        ({"stage": None, "fraction": "x"}, None),
        ({"stage": "x" * 1000, "fraction": [1]}, "x" * 100),
    ],
)
def test_what_another_compiler_says(said, why):
    heard = CompileProgress()
    heard.update(said)
    news = heard.news()
    assert (news and news.why) == why
