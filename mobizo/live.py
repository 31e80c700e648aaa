"""Live progress of a job on a terminal, or plain lines where there is none. Knows what to show, not its source."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mobizo.client import Client
from shared.errors import MobizoError
from shared.job import JobView


def show_live(client: Client, job_id: str, console: Console) -> JobView:
    """Shows the job until it ends and returns its last view."""
    bar = Progress(BarColumn(24), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console)
    job: JobView | None = None
    printed = ""
    with bar:
        line = bar.add_task("waiting", total=None)
        for event in client.watch(job_id):
            if isinstance(event, JobView):
                job = event
                bar.update(line, description=str(event.state))
                if not console.is_terminal:
                    console.print(f"job {event.id}: {event.state}", soft_wrap=True)
                continue
            text = event.line()
            bar.update(line, description=text, total=event.steps or None, completed=event.step)
            if not console.is_terminal and text != printed:
                console.print(text, soft_wrap=True, markup=False)
                printed = text
    if job is None:
        raise MobizoError(f"the server sent no event of job {job_id}")
    return job
