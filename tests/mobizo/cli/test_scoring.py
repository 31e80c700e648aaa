"""`mobizo score` and `mobizo generate`: invalid input, and a server that cannot be reached."""

import pytest
from typer.testing import CliRunner

from mobizo.cli import app as cli


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.setenv("MOBIZO_SERVER", "http://127.0.0.1:9")
    monkeypatch.setenv("MOBIZO_TOKEN", "none")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").write_text('{"prompt": "It was", "answers": [" great"]}\n\n')
    (tmp_path / "broken").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "list").write_text("[]\n")
    (tmp_path / "separators").write_text('{"prompt": "a\u2028b\u0085c", "answers": ["d"]}\n[]\n')
    return lambda *arguments: CliRunner().invoke(cli, list(arguments))


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
        (["generate", "", "-m", "a"], "prompt"),
        (["generate", "a", "-m", "a", "--max-tokens", "0"], "max_tokens"),
        (["generate", "a", "-m", "a", "--top-p", "2"], "top_p"),
    ],
)
def test_invalid_input_names_the_field(call, arguments, message):
    result = call(*arguments)
    assert "Traceback" not in result.output
    assert message in result.stderr
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_an_unreachable_server(call):
    generate = ["generate", "a", "-m", "a"]
    for arguments in (["score", "--file", "rows"], generate, [*generate, "--json"]):
        result = call(*arguments)
        assert result.exit_code == 1
        assert "cannot be reached" in result.stderr
