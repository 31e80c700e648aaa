"""`bench server`: how the server holds under load and faults.

Polls: bench.server_polls. Downloads: bench.server_downloads. Queries over 10,000 jobs: bench.server_queries. Kills:
bench.server_kills. Each measures for itself and names its own claims.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import server_downloads, server_kills, server_polls, server_queries
from bench.result import write
from bench.step import notes, show

Row = dict[str, Any]


class Part(StrEnum):
    """What may be measured alone."""

    POLLS = "polls"
    DOWNLOADS = "downloads"
    QUERIES = "queries"
    KILLS = "kills"


MEASURES: dict[Part, Callable[[bool], tuple[list[Row], dict[str, float]]]] = {
    Part.POLLS: server_polls.measure,
    Part.DOWNLOADS: server_downloads.measure,
    Part.QUERIES: server_queries.measure,
    Part.KILLS: server_kills.measure,
}


def server(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer devices, transfers, jobs and kills")] = False,
    only: Annotated[list[Part] | None, typer.Option("--only", help="these parts; default: all")] = None,
) -> None:
    """Load the server with devices, downloads and jobs, and kill it at random points."""
    rows: list[Row] = []
    claims: dict[str, float] = {}
    for part in only or list(Part):
        notes.print(part)
        found, said = MEASURES[part](quick)
        rows += [{"part": part, **row} for row in found]
        claims |= said
    show(claims)
    write(json_file, rows, claims)
