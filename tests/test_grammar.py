"""The grammar of the three commands: noun and verb, help, --json, one spelling of each option; and that pages, messages
and the demo quote commands that exist."""

import json
import re
from pathlib import Path

import typer

from device_agent.cli.app import app as agent
from mobizo.cli import app as client
from server.cli.main import app as server

ROOT = Path(__file__).resolve().parents[1]
APPS = {"mobizo": client, "mobizo-server": server, "mobizo-agent": agent}
# Words that end in s and are singular, and nouns that have no plural here.
SINGULAR = {"data", "privacy", "config"}
# Another word for what an option of the product is called everywhere.
OTHER_SPELLINGS = {
    *("--out", "--output", "--dest", "--directory"),  # --to
    *("--force", "--confirm"),  # --yes
    *("--max", "--count", "--number"),  # --limit
    *("--url", "--host-url", "--api-token"),  # --server, --token
    *("--revision", "--version-number"),  # ADAPTER@REVISION
    *("--input", "--path"),  # --file
}
QUOTING = [
    ROOT / "README.md",
    ROOT / "docker-compose.yml",
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        path
        for folder in ("mobizo", "server", "device_agent", "shared", "simulation", "examples", "deploy")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".html", ".cpp", ".service", ".conf", ".yml")
    ),
]


def walk(words, command):
    """Yields the words and the command of a tree's groups and commands."""
    yield words, command
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            yield from walk((*words, name), command.get_command(None, name))


TREE = dict(item for name, app in APPS.items() for item in walk((name,), typer.main.get_command(app)))
LEAVES = {words: command for words, command in TREE.items() if not hasattr(command, "list_commands")}
GROUPS = {words: command for words, command in TREE.items() if words not in LEAVES}


def options(command):
    return {name for parameter in command.params for name in parameter.opts if name.startswith("-")}


def test_groups_are_singular_nouns():
    nouns = {words[1] for words in GROUPS if len(words) == 2}
    assert len(nouns) > 10
    assert {noun for noun in nouns if noun.endswith("s")} - SINGULAR == set()
    assert [words for words in GROUPS if len(words) > 2] == []


def test_every_command_has_help():
    assert [" ".join(words) for words, command in TREE.items() if not command.help] == []
    client_only = {words: command for words, command in LEAVES.items() if words[0] == "mobizo"}
    lacking = {
        (" ".join(words), item.name)
        for words, command in client_only.items()
        for item in command.params
        if not item.help
    }
    assert lacking == set()


def test_help_texts_are_sentences():
    texts = {
        " ".join((*words, item.name)): (item.help or "").partition(" [env var: ")[0]
        for words, command in LEAVES.items()
        for item in command.params
        if item.name != "help"
    }
    assert len(texts) > 200
    odd = {name: text for name, text in texts.items() if not re.fullmatch(r"[A-Z].*[.]", text, re.DOTALL)}
    assert odd == {}


def test_flags_have_no_type_in_help():
    pages = (ROOT / "docs" / "commands").glob("*.md")
    assert [page.name for page in pages if "<bool>" in page.read_text()] == []


def test_lists_and_views_have_json_and_plural_verbs_are_lists():
    listing = {words for words in LEAVES if words[-1] in ("list", "view") or words[-1].endswith("s")}
    listing -= {words for words in listing if words[-1] in ("logs",)}  # lines of text, with --json too
    assert len(listing) > 25
    without = [" ".join(words) for words in listing if "--json" not in options(LEAVES[words])]
    assert without == []


def test_options_have_one_spelling():
    found = {(" ".join(words), name) for words, command in LEAVES.items() for name in options(command)}
    assert {pair for pair in found if pair[1] in OTHER_SPELLINGS} == set()
    short = {}
    for words, command in LEAVES.items():
        if words[0] != "mobizo":
            continue
        for parameter in command.params:
            for name in parameter.opts:
                if re.fullmatch("-[a-zA-Z]", name):
                    short.setdefault(name, set()).add(max(parameter.opts, key=len))
    assert {name: long for name, long in short.items() if len(long) > 1} == {}


QUOTED = re.compile(r"(?<![\w./:@-])(mobizo(?:-server|-agent)?)((?: +[a-z][a-z-]+)+)(?![\w/(.=:])([^\n`#;|&()]*)")
PROSE = {  # words that follow the project's name in a sentence
    *("is", "on", "keeps", "knows", "personalizes", "protects", "raises", "server", "release", "therefore", "www-data"),
    *(
        "of",
        "authors",
        "mobizo",
        "keys",
        "uses",
        "masking",
        "idempotency",
        "noise",
        "round",
        "split",
        "import",
        "agent",
    ),
}


def wrong_quotes(text):
    """Returns the quoted commands that do not exist, and those with options that they do not have."""
    wrong = []
    for program, verbs, rest in QUOTED.findall(text.replace("\\\n", " ")):
        words = (program, *verbs.split())
        if words[1] in PROSE:
            continue
        known = next((words[:size] for size in (3, 2) if words[:size] in TREE), None)
        if known is None or (known in GROUPS and len(words) > len(known)):
            wrong.append(" ".join(words))
            continue
        given = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", rest))
        allowed = options(TREE[known]) if known in LEAVES else {"--help"}
        if known != ("mobizo", "simulate") and (unknown := given - allowed - {"--help"}):
            wrong.append(f"{' '.join(known)} {' '.join(sorted(unknown))}")
    return wrong


def test_quoted_commands_exist():
    found = {str(path.relative_to(ROOT)): wrong_quotes(path.read_text(errors="replace")) for path in QUOTING}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_the_page_lists_every_command_of_the_client_and_schemas_that_exist():
    page = (ROOT / "docs" / "clients.md").read_text()
    rows = re.findall(
        r"^\| (.+?) \| .+? \| (.+?) \|$", page.split("### Commands")[1].split("### Profiles")[0], re.MULTILINE
    )
    listed = {tuple(re.findall(r"[a-z-]+", text)[:2]) for row, _ in rows for text in re.findall(r"`(.+?)`", row)}
    names = {words[1:] for words in LEAVES if words[0] == "mobizo"} | {("config",)}
    assert listed == names
    schemas = json.loads((ROOT / "docs" / "openapi.json").read_text())["components"]["schemas"]
    named = {name for _, text in rows for name in re.findall(r"`([A-Z]\w+)", text)}
    assert named - set(schemas) == set()
