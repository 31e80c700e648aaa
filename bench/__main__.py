"""`python -m bench NAME --json FILE`: one command per benchmark."""

from collections.abc import Callable

import typer

from bench.accuracy.command import accuracy
from bench.agent.command import agent
from bench.dashboard import dashboard
from bench.end_to_end.command import end_to_end, options
from bench.federation.command import federation
from bench.figures import figures
from bench.generate import generate
from bench.padding import padding
from bench.personal import personal
from bench.precision import precision
from bench.registry import registry
from bench.runner import Parts, command_of
from bench.scale.command import scale
from bench.server import cohorts, downloads, fleet, kills, polls, queries, strangers
from bench.step.command import step
from bench.variance import variance

SERVER: Parts = {
    "polls": polls.measure,
    "fleet": fleet.measure,
    "cohorts": cohorts.measure,
    "strangers": strangers.measure,
    "downloads": downloads.measure,
    "queries": queries.measure,
    "kills": kills.measure,
}
COMMANDS: dict[str, Callable[..., None]] = {
    "step": step,
    "scale": scale,
    "precision": precision,
    "accuracy": accuracy,
    "end-to-end": end_to_end,
    "options": options,
    "personal": personal,
    "generate": generate,
    "variance": variance,
    "padding": padding,
    "agent": agent,
    "server": command_of(SERVER, "Load the server with devices, downloads and jobs, and kill it at random points."),
    "registry": registry,
    "dashboard": dashboard,
    "federation": federation,
    "figures": figures,
}

app = typer.Typer(help="Measure what README and docs claim.", no_args_is_help=True)
for name, command in COMMANDS.items():
    app.command(name)(command)


if __name__ == "__main__":
    app()
