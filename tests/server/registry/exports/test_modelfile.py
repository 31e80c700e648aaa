"""Ollama's Modelfile, read by the rules of its documentation; its template writes what the base's chat template writes.

Rules of the file: `docs/modelfile.mdx` and `parser/parser.go` of github.com/ollama/ollama. Rules of the template: Go's
`text/template`, of which the file uses six actions, and Ollama's values `.System`, `.Messages`, `.Role`, `.Content`.
"""

import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from bench.programs import model_file
from server.catalog.bases import BaseRepository
from server.catalog.chat_templates import read_chat_template
from server.compiler.checkpoints.base import BaseFiles
from server.registry.exports.modelfile import modelfile
from shared.chat_template import ChatTemplate
from shared.recipe import BaseRef
from tests.server.catalog.test_chat_templates import FAMILIES, TOKENS

BASE = BaseRef(name="tiny", sha256="a" * 64)
HEADERS = (  # the form of Llama 3's, without its trimming
    "{{ bos_token }}{% for m in messages %}{{ '<|h|>' + m.role + '<|e|>\n\n' + m.content + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|h|>assistant<|e|>\n\n' }}{% endif %}"
)
EXPRESSED = {"chatml": FAMILIES["chatml"], "headers": HEADERS, "trimmed headers": FAMILIES["headers"]}
CONVERSATIONS = (
    [{"role": "user", "content": 'Grüße, <b>"you"</b>'}],
    [{"role": "system", "content": "Short."}, {"role": "user", "content": "a\nb"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c {d}"}],
)
INSTRUCTIONS = {"from", "parameter", "template", "system", "adapter", "license", "message", "requires"}


def parse(text):
    """The instructions of a Modelfile as (name, argument), by the documented format."""
    parsed, rest = [], text
    while rest := rest.lstrip():
        if rest.startswith("#"):
            rest = rest.partition("\n")[2]
            continue
        name, argument, rest = re.fullmatch(r'(?s)([A-Za-z]+) (""".*?"""|[^\n]*)\n(.*)', rest).groups()
        assert name.lower() in INSTRUCTIONS
        parsed.append((name.lower(), argument))
    assert [name for name, _ in parsed].count("from") == 1
    return parsed


def unquote(argument):
    """An argument without its quotes, three or one on each side."""
    mark = next((mark for mark in ('"""', '"') if argument.startswith(mark)), "")
    assert not mark or argument.endswith(mark)
    return argument[len(mark) : len(argument) - len(mark)]


def instructions(text):
    return [(name, unquote(argument)) for name, argument in parse(text)]


def go(template, messages):
    """What Go's template writes with the values that Ollama gives it."""
    actions = re.split(r"\{\{ (.*?) \}\}", template)
    system = any(message["role"] == "system" for message in messages)

    def block(at, value, live):
        """Writes up to the `end` or `else` of a block; returns its text and the place behind it."""
        output = ""
        while at < len(actions):
            output += actions[at] if live else ""
            action = actions[at + 1] if at + 1 < len(actions) else None
            if action is None or action == "end" or action.startswith("else"):
                return output, at + 1
            if action == ".Content":
                output += value["content"] if live else ""
                at += 2
            elif action == "range .Messages":
                inner = [block(at + 2, each, live) for each in messages]
                output += "".join(text for text, _ in inner)
                at = inner[0][1] + 1
            else:
                text, at = branch(at + 1, value, live)
                output += text
        return output, at

    def branch(at, value, live):
        """Writes the first part of an `if` whose condition holds; returns its text and the place behind its `end`."""
        output, open_ = "", live
        while actions[at] != "end":
            holds = open_ and condition(actions[at].removeprefix("else ").removeprefix("if "), value)
            text, at = block(at + 1, value, holds)
            output, open_ = output + text, open_ and not holds
        return output, at + 1

    def condition(text, value):
        if text == "not .System":
            return not system
        return value["role"] == re.fullmatch(r'eq \.Role "(\w+)"', text)[1]

    return block(0, None, True)[0]


@pytest.mark.parametrize("family", EXPRESSED)
def test_the_template_writes_what_transformers_writes(family):
    template = ChatTemplate(template=EXPRESSED[family], tokens=TOKENS)
    parsed = instructions(modelfile("alice-movies, version 1", BASE, "acme/tiny", template).decode())
    assert parsed[:2] == [("from", "./base.gguf"), ("adapter", "./adapter.gguf")]
    by_name = dict(parsed)
    for messages in CONVERSATIONS:
        (expected,), _ = render_jinja_template(
            conversations=[messages], chat_template=EXPRESSED[family], add_generation_prompt=True, **TOKENS
        )
        assert go(by_name["template"], messages) == expected.removeprefix(TOKENS["bos_token"])  # which Ollama adds
    end = {"chatml": "<|im_end|>"}.get(family, "<|eot|>")
    assert [argument for name, argument in parse_parameters(parsed)] == [end, "</s>"]


def parse_parameters(parsed):
    """The parameters, of which every one is a stop text."""
    arguments = [argument for name, argument in parsed if name == "parameter"]
    return [re.fullmatch(r'(stop) "([^"]+)"', argument).groups() for argument in arguments]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (FAMILIES["brackets"], "begin-of-text token within a conversation"),
        (FAMILIES["brackets"].replace("bos_token", "''"), "writes a turn by more than its role"),
        (FAMILIES["turns"], "leaves out or repeats"),
        ("{% for m in messages %}{{ '{{' + m.role + '}}' + m.content }}{% endfor %}", "cannot be written"),
        ("{% for m in messages %}{{ '\x07' + m.content }}{% endfor %}", "cannot be written"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
         "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}", "no system"),
        ("{% for m in messages %}{{ loop.index ~ m.content + '\n' }}{% endfor %}", "more than its role"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "leaves out or repeats"),
    ],
)  # fmt: skip
def test_a_template_that_go_cannot_express_is_left_to_the_files_metadata(template, reason):
    text = modelfile("a", BASE, None, ChatTemplate(template=template, tokens=TOKENS)).decode()
    assert [name for name, _ in parse(text)] == ["from", "adapter", "parameter"]
    assert reason in text
    assert "Ollama takes the template in the metadata" in text


def test_the_real_models_template():
    template = read_chat_template(BaseFiles("gguf", model_file(), ()))
    parsed = instructions(modelfile("a", BASE, None, template).decode())
    by_name = dict(parsed)
    for messages in CONVERSATIONS:
        assert go(by_name["template"], messages) == template.render(messages)
    assert parse_parameters(parsed) == [("stop", "<|im_end|>")]


URL = "/v1/adapters/alice-movies/versions/1/peft/Modelfile"


def test_it_is_a_file_of_the_version(home, app, device, lease):
    with home.database.writing() as session:
        base = BaseRepository(session).by_name("tiny")
        base.chat_template = ChatTemplate(template=FAMILIES["chatml"], tokens=TOKENS)
    device.finish(lease)
    answer = app.get(URL)
    assert f"acme/tiny on the Hugging Face Hub, sha256 {base.sha256}." in answer.text
    assert "default/alice-movies" in answer.text or "alice-movies, version 1" in answer.text
    assert [name for name, _ in parse(answer.text)] == ["from", "adapter", "template", "parameter", "parameter"]
    assert app.get("/default/alice-movies/resolve/main/Modelfile").content == answer.content
    names = [file["path"] for file in app.get(URL.removesuffix("/Modelfile")).json()["files"]]
    assert "Modelfile" not in names  # PEFT's clients have no use for it
