"""Commands that README and docs/ show exist: their names, options and arguments, read from the Typer trees.

Every block of commands or Python runs in the test that RUN names, or a comment before it, or one for the whole page,
says why it does not run. Commands of ours, make targets and benchmarks are checked here in all blocks.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from device_agent.cli.app import app as agent
from device_agent.cli.main import complete_adb_option
from mobizo.cli import app as mobizo
from server.cli.main import app as server

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"mobizo": mobizo, "mobizo-agent": agent, "mobizo-server": server}
# (page, language) -> the test that runs these blocks, except those with a comment
RUN = {
    ("docs/clients.md", "sh"): "tests/docs/test_clients.py",
    ("docs/clients.md", "python"): "tests/docs/test_clients.py",
    ("README.md", "python"): "tests/docs/test_clients.py",
    ("README.md", "sh"): "tests/docs/test_start.py",
    ("docs/own-data.md", "sh"): "tests/docs/test_own_data.py",
    ("docs/start.md", "sh"): "tests/docs/test_start.py",
    ("docs/federation.md", "bash"): "tests/mobizo/test_federation_docs.py",
    ("docs/serving.md", "sh"): "tests/device_agent/serving/test_serve.py",
    ("docs/serving.md", "python"): "tests/device_agent/serving/test_serve.py",
    ("docs/operations.md", "sh"): "tests/docs/test_server_pages.py",
    ("docs/dashboard.md", "sh"): "tests/docs/test_server_pages.py",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?P<before>.*)\n```(?P<language>sh|bash|console|python)\n(?P<text>(?s:.*?))^```$", re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
PAGE_NOT_RUN = re.compile(r"^<!-- blocks not run: \S.* -->$", re.MULTILINE)
INLINE = re.compile(r"`((?:mobizo|mobizo-agent|mobizo-server) [^`]+)`")
BENCHMARKS = re.findall(r'^    "([\w-]+)":', (ROOT / "bench" / "__main__.py").read_text(), re.MULTILINE)
INDENTED = re.compile(r"^    (?:\$ )?((?:mobizo|mobizo-agent|mobizo-server) (?:.*\\\n)*.*)$", re.MULTILINE)
CONTROL = {"until", "do", "done"}


def relative(page):
    return str(page.relative_to(ROOT))


def commands(text):
    """Yields the words of each command of a shell script, those within `$(...)` too."""
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<=\s)\d?[<>]+(?:&\d| ?[\w./$-]+)", "", text)  # redirections
    text = re.sub(r"\\\n", " ", re.sub(r"(^|\s)#.*$", "", text, flags=re.MULTILINE))
    lexer = shlex.shlex(re.sub(r"^\$ ", "", text, flags=re.MULTILINE), posix=True, punctuation_chars="();|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();|&\n"):
            if words:
                yield words
            words = []
            continue
        for inner in re.findall(r"\$\((.+)\)", word):
            yield from commands(inner)
        if words or not (re.match(r"\w+=", word) or word in CONTROL):
            words.append(word)


def shown(page):
    """Yields the blocks of a page that are to run."""
    for block in FENCE.finditer((ROOT / page).read_text()):
        if not NOT_RUN.search(block["before"]):
            yield block["text"]


def plain_environment(*kept):
    """Returns this process's environment without the project's variables but those kept, with its programs first."""
    names = {name: value for name, value in os.environ.items() if not name.startswith("MOBIZO_") or name in kept}
    return names | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run_script(script, directory, environment):
    """Runs a page's commands in one shell, which stops what it started, and returns the process; each must succeed."""
    stop = "trap 'kill $(jobs -p) || true' EXIT"
    command = ["bash", "-c", f"set -euo pipefail; {stop}\n{script}"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def check(words):
    """Parses the words of a command of ours. Raises a usage error for an option or a command that does not exist."""
    program, *arguments = words
    command = typer.main.get_command(PROGRAMS[program])
    context = typer.Context(command, info_name=program)
    while hasattr(command, "list_commands"):
        if not arguments or arguments[0].startswith("-"):
            break
        if arguments[0].isupper():  # a placeholder, as in `mobizo NOUN VERB`
            return
        name, *arguments = arguments
        subcommand = command.get_command(context, name)
        assert subcommand is not None, f"{' '.join(words)}: there is no command {name}"
        context = typer.Context(subcommand, parent=context, info_name=name, **subcommand.context_settings)
        command = subcommand
    if program == "mobizo-agent":
        arguments = complete_adb_option(arguments)
    _, excess, _ = command.make_parser(context).parse_args(list(arguments))
    assert excess == [] or context.allow_extra_args, f"{' '.join(words)}: {excess} is too much"


@pytest.mark.parametrize("page", [page for page in PAGES if FENCE.search(page.read_text())], ids=relative)
def test_every_block_runs_or_says_why_not(page):
    text = page.read_text()
    for block in FENCE.finditer(text):
        test = RUN.get((relative(page), block["language"]))
        marked = NOT_RUN.search(block["before"]) or PAGE_NOT_RUN.search(text)
        assert marked or (test and page.name in (ROOT / test).read_text()), f"no test runs this:\n{block['text']}"


@pytest.mark.parametrize("page", [page for page in PAGES if FENCE.search(page.read_text())], ids=relative)
def test_commands_in_blocks(page):
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in FENCE.finditer(page.read_text()):
        for words in [] if block["language"] == "python" else commands(block["text"]):
            ours = [place for place, word in enumerate(words) if word in PROGRAMS]
            if ours and (ours[0] == 0 or words[0] == "docker"):
                check(words[ours[0] :])
            elif words[0] == "make":
                assert words[1] in targets, words
            elif words[:3] == ["python", "-m", "bench"]:
                assert words[3] in {*BENCHMARKS, "NAME"}, words


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "commands"], ids=relative)
def test_commands_in_the_text(page):
    text_of_page = page.read_text()
    for text in INLINE.findall(text_of_page) + INDENTED.findall(FENCE.sub("", text_of_page)):
        for words in commands(text):
            if words[0] in PROGRAMS:
                check(words)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_committed_pages_of_commands_are_current(program, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(PROGRAMS[program], ["--reference"], prog_name=program, catch_exceptions=False)
    path = f"docs/commands/{program}.md"
    assert (ROOT / path).read_text() == done.stdout, f"the commands changed: {program} --reference > {path}"
