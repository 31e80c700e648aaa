"""Live progress of a job on a terminal, or plain lines where there is none. Knows what to show, not its source."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mobizo.client import Client
from shared.errors import MobizoError
from shared.job import JobView
from shared.job import Progress as JobProgress

MIB = 1 << 20


def describe(progress: JobProgress) -> str:
    """One line of numbers: phase, step, loss, speed, time left, memory, accuracy."""
    words: list[str] = [progress.phase]
    if progress.steps:
        words.append(f"step {progress.step}/{progress.steps}")
    if progress.loss is not None:
        words.append(f"loss {progress.loss:.3f}")
    if progress.examples_per_second is not None:
        words.append(f"{progress.examples_per_second:.1f} samples/s")
    if progress.seconds_left is not None:
        minutes, seconds = divmod(int(progress.seconds_left), 60)
        words.append(f"{minutes}:{seconds:02d} left")
    if progress.rss_bytes is not None:
        words.append(f"{progress.rss_bytes / MIB:.0f} MiB")
    if progress.accuracy is not None:
        words.append(f"validation {progress.accuracy:.1%}")
    if progress.best_accuracy is not None:
        words.append(f"best {progress.best_accuracy:.1%}")
    return "  ".join(words)


def show_live(client: Client, job_id: str, console: Console) -> JobView:
    """Shows the job until it ends and returns its last view."""
    bar = Progress(BarColumn(24), TextColumn("{task.description}"), TimeElapsedColumn(), console=console)
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
            text = describe(event)
            bar.update(line, description=text, total=event.steps or None, completed=event.step)
            if not console.is_terminal and text != printed:
                console.print(text, soft_wrap=True)
                printed = text
    if job is None:
        raise MobizoError(f"the server sent no event of job {job_id}")
    return job
