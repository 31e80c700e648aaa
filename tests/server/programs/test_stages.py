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
    progress = CompileProgress()
    assert progress.news() is None
    for update in ({}, {"stage": 3}, {"stage": None, "fraction": "x"}):
        progress.update(update)
    assert progress.news() is None
    progress.update({"stage": "read", "fraction": 0.0})
    assert progress.news().line() == "compiling  reading the base model"
    assert progress.news() is None
    progress.update({"stage": "lower", "fraction": 0.0})
    progress.update({"stage": "emit", "fraction": 0.5})
    assert progress.news() is None
    clock[0] += compilation.NEWS_SECONDS
    assert progress.news().why == "writing the program, 50%"
    clock[0] += 100
    assert progress.news() is None
