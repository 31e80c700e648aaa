"""`python -m bench NAME --json FILE`: one command per benchmark."""

from collections.abc import Callable

import typer

from bench.accuracy import accuracy
from bench.agent.command import agent
from bench.dashboard import dashboard
from bench.end_to_end.command import end_to_end
from bench.federation.command import federation
from bench.feedback import feedback
from bench.figures import figures
from bench.generate import generate
from bench.personal import personal
from bench.runner import Parts, command_of
from bench.scale.command import scale
from bench.server import kills, polls, scoring, tenants
from bench.step.command import step
from bench.strangers import strangers

SERVER: Parts = {
    "polls": polls.measure,
    "scoring": scoring.measure,
    "kills": kills.measure,
    "tenants": tenants.measure,
}
COMMANDS: dict[str, Callable[..., None]] = {
    "step": step,
    "scale": scale,
    "accuracy": accuracy,
    "end-to-end": end_to_end,
    "personal": personal,
    "strangers": strangers,
    "generate": generate,
    "agent": agent,
    "server": command_of(
        SERVER,
        "Load the server with devices and jobs, score with many adapters, kill it at random points, and attack it.",
    ),
    "dashboard": dashboard,
    "federation": federation,
    "feedback": feedback,
    "figures": figures,
}

app = typer.Typer(help="Measure what README and docs claim.", no_args_is_help=True)
for name, command in COMMANDS.items():
    app.command(name)(command)


if __name__ == "__main__":
    app()
