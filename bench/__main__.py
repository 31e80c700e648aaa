"""`python -m bench`: one subcommand per benchmark."""

from __future__ import annotations

import typer

from bench.accuracy import accuracy
from bench.agent import agent
from bench.end_to_end import end_to_end
from bench.federation import federation
from bench.figures import figures
from bench.options import compare
from bench.padding import padding
from bench.precision import precision
from bench.registry import registry
from bench.report import report
from bench.server import server
from bench.step_command import step
from bench.variance import variance

app = typer.Typer(help="Measure what README and docs claim.", no_args_is_help=True)
app.command()(step)
app.command()(precision)
app.command()(padding)
app.command()(accuracy)
app.command("end-to-end")(end_to_end)
app.command("options")(compare)
app.command()(variance)
app.command()(agent)
app.command()(server)
app.command()(registry)
app.command()(federation)
app.command()(report)
app.command()(figures)


@app.callback()
def bench() -> None:
    """Measure what README and docs claim."""


if __name__ == "__main__":
    app()
