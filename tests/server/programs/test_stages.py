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
    for nothing in ({}, {"stage": 3}, {"stage": None, "fraction": "x"}):
        heard.update(nothing)
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
