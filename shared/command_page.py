"""Generates docs/commands/: one page for each program, with all its commands and options, read from its Typer tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

# Typer has its own copy of click, whose classes are private: commands and parameters are `Any` here.

PAGE_HEAD = """# {program}

<!-- {program} --reference > docs/commands/{program}.md -->

{help}
"""


def command_page(context: typer.Context) -> str:
    """Returns the page of a program in Markdown. context: that of the program's callback."""
    program, group = str(context.info_name), context.command
    parts = [PAGE_HEAD.format(program=program, help=_prose(group.help)), _options(group, context)]
    parts += [_section(path, command, context) for path, command in commands_of(group, context)]
    return "\n".join(part for part in parts if part)


def commands_of(group: Any, context: typer.Context) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each command below a group with its path, such as `("job", "submit")`, sorted, without hidden ones."""
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        if not hasattr(command, "list_commands"):
            yield (name,), command
            continue
        for path, subcommand in commands_of(command, context):
            yield (name, *path), subcommand


def _section(path: tuple[str, ...], command: Any, context: typer.Context) -> str:
    own_context = typer.Context(command, parent=context, info_name=" ".join(path))
    usage = " ".join([str(own_context.command_path), *command.collect_usage_pieces(own_context)])
    heading = f"## {own_context.command_path}\n\n    {usage}\n\n{_prose(command.help)}\n"
    return "\n".join(part for part in (heading, _options(command, own_context)) if part)


def _options(command: Any, context: typer.Context) -> str:
    records = [parameter.get_help_record(context) for parameter in command.params if not _hidden(parameter)]
    rows = [f"| `{_cell(name)}` | {_cell(_prose(text))} |\n" for name, text in filter(None, records)]
    return "| | |\n|---|---|\n" + "".join(rows) if rows else ""


def _hidden(parameter: Any) -> bool:
    return bool(getattr(parameter, "hidden", False)) or parameter.name in ("install_completion", "show_completion")


def _prose(text: str | None) -> str:
    """Returns a help text as one paragraph, without characters that Markdown would take for HTML."""
    return re.sub(r"\s+", " ", text or "").strip().replace("<", "&lt;")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
