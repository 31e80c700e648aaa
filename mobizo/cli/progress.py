"""Progress of jobs and downloads: bars on a terminal, plain lines (jobs) or nothing (downloads) elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from mobizo.client import Client
from mobizo.downloads import DownloadProgress
from shared.errors import MobizoError
from shared.job import JobView


def show_job_progress(client: Client, job_id: str, console: Console) -> JobView:
    """Shows a job's progress until the job ends, and returns its last view. Raises NotFound for an unknown job."""
    description = TextColumn("{task.description}", markup=False)
    job: JobView | None = None
    last_line = ""
    columns = BarColumn(24), description, TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("waiting", total=None)
        for event in client.jobs.watch(job_id):
            if isinstance(event, JobView):
                job = event
                bars.update(bar, description=str(event.state))
                if not console.is_terminal:
                    console.print(f"job {event.id}: {event.state}", soft_wrap=True)
                continue
            line = event.line()
            bars.update(bar, description=line, total=event.steps or None, completed=event.step)
            if not console.is_terminal and line != last_line:
                console.print(line, soft_wrap=True, markup=False)
                last_line = line
    if job is None:
        raise MobizoError(f"the server sent no event of job {job_id}")
    return job


@contextmanager
def download_progress(console: Console) -> Iterator[DownloadProgress | None]:
    """Yields a callback that shows one bar per file, or None if the console is not a terminal."""
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(24), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console) as bars:
        bar_of_file: dict[str, TaskID] = {}

        def report(name: str, received: int, size: int) -> None:
            if name not in bar_of_file:
                bar_of_file[name] = bars.add_task(name, total=size)
            bars.update(bar_of_file[name], completed=received)

        yield report
