"""`mobizo score`: invalid input, and a server that cannot be reached."""

import pytest

from tests.mobizo.conftest import run


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.setenv("MOBIZO_SERVER", "http://127.0.0.1:9")
    monkeypatch.setenv("MOBIZO_TOKEN", "none")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").write_text('{"prompt": "It was", "answers": [" great"]}\n\n')
    (tmp_path / "broken").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "list").write_text("[]\n")
    (tmp_path / "separators").write_text('{"prompt": "a\u2028b\u0085c", "answers": ["d"]}\n[]\n')
    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score"], "a prompt"),
        (["score", "a", "--file", "rows"], "a prompt"),
        (["score", "It was"], "rows.0"),
        (["score", "--file", "broken"], "broken:2"),
        (["score", "--file", "list"], "list:1"),
        (["score", "--file", "separators"], "separators:2"),
        (["score", "--file", "none"], "none cannot be read"),
        (["score", "a", "--answer", "b", "-a", "Not A Name"], "rows.0.adapter"),
    ],
)
def test_invalid_input_names_the_field(call, arguments, message):
    error = call(*arguments, exit_code=2)
    assert message in error
    assert len(error.splitlines()) == 1


def test_an_unreachable_server(call):
    assert "cannot be reached" in call("score", "--file", "rows", exit_code=1)
