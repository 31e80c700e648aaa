"""`bench report`: every benchmark in a process of its own, and one page of all results, as HTML and as Markdown.

The pages are made from the JSON files of one directory alone and lie beside them: `report.html`, which stands alone,
and `report.md` with its plots. A benchmark that fails or runs over its limit is named on the pages, the others go on,
and the exit status is 1. What has no budget below gets `OTHER`.
"""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil
import typer
from rich.console import Console

from bench.drawing import png
from bench.figures import RESULTS, results_in
from bench.html_page import html_page
from bench.markdown_page import PLOTS, markdown_page, plot_file
from bench.sections import Run, Runs, sections

RUNS_FILE = "report.json"
MAKERS = {"report", "figures"}  # commands that measure nothing
LAST_WORDS = 12  # lines of a failure's standard error
GRACE_SECONDS = 10.0  # to tidy up, once interrupted
notes = Console(stderr=True, highlight=False)


class Budget(NamedTuple):
    """Seconds that a benchmark may take, quick and plain, and what a quick report asks of it besides --quick."""

    quick: int
    plain: int
    arguments: tuple[str, ...] = ()


# In the order of the pages; the quick ones sum to less than 20 minutes. What would compile SmolLM2-135M once more (a
# minute each time) or waits for time to pass is left to the plain runs of agent, server, registry and federation.
BUDGETS = {
    "step": Budget(290, 4 * 3600),
    "precision": Budget(200, 3600),
    "accuracy": Budget(130, 3 * 3600),
    "end-to-end": Budget(180, 4 * 3600),
    "options": Budget(20, 2 * 3600),
    "variance": Budget(160, 3600),
    "padding": Budget(20, 600),
    "agent": Budget(60, 3600, ("--only", "idle")),
    "server": Budget(40, 3600, ("--only", "downloads", "--only", "queries")),
    "registry": Budget(40, 3600, ("--only", "publish", "--only", "replay")),
    "federation": Budget(40, 4 * 3600, ("--only", "aggregate", "--only", "bytes", "--only", "masking")),
}
OTHER = Budget(10, 3600)


def report(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="every benchmark's quick form: under 20 minutes")] = False,
    full: Annotated[bool, typer.Option("--full", help="every benchmark's full form, without limits")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda, for the benchmarks that can choose")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="these benchmarks; default: all")] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="results and pages here; what is here of the same kind of run is not measured again"),
    ] = None,
    made: Annotated[
        Path | None, typer.Option("--from", help="run nothing: pages of the results that lie here, beside them")
    ] = None,
) -> None:
    """Run every benchmark and write report.html and report.md: bench/results, or bench/results/quick if --quick."""
    if quick and full:
        raise typer.BadParameter("--quick or --full, not both")
    if made is not None:
        write_pages(made)
        return
    kind = "quick" if quick else "full" if full else "plain"
    directory = keep or (RESULTS / "quick" if quick else RESULTS)
    directory.mkdir(parents=True, exist_ok=True)
    commands = benchmarks(context.parent.command.commands)
    if unknown := set(only or ()) - set(commands):
        raise typer.BadParameter(f"no such benchmark: {', '.join(sorted(unknown))}")
    runs = read_runs(directory, kind) if keep or only else Runs(kind=kind)
    began = time.monotonic()
    for name in only or commands:
        kept = name in runs.runs and not runs.runs[name].failure and (directory / f"{name}.json").exists()
        if keep and kept:
            notes.print(f"{name}: is there")
            continue
        budget = BUDGETS.get(name, OTHER)
        limit = {"quick": budget.quick, "plain": budget.plain, "full": 10**6}[kind]
        notes.print(f"{name}: at most {limit:,} s")
        words = arguments(commands[name], kind, device, budget, keep)
        runs.runs[name] = run(name, [sys.executable, "-m", "bench", name, *words], limit, directory)
        notes.print(f"{name}: {runs.runs[name].failure or f'{runs.runs[name].seconds:.0f} s'}")
        # After each: whoever stops here has the pages of what was measured.
        (directory / RUNS_FILE).write_text(runs.model_dump_json(indent=2) + "\n")
        write_pages(directory)
    notes.print(f"{time.monotonic() - began:.0f} s: {directory / 'report.html'}")
    if any(found.failure for found in runs.runs.values()):
        raise typer.Exit(1)


def benchmarks(commands: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the program's commands, by name, that measure; in the order of the budgets."""
    found = {name: command for name, command in commands.items() if name not in MAKERS}
    return {name: found[name] for name in [*BUDGETS, *found] if name in found}


def arguments(command: Any, kind: str, device: str | None, budget: Budget, keep: Path | None) -> list[str]:
    """The options of this run that a benchmark knows."""
    known = {option for parameter in command.params for option in parameter.opts}
    words = [f"--{kind}"] if f"--{kind}" in known else []
    words += budget.arguments if kind == "quick" else ()
    words += ["--device", device] if device is not None and "--device" in known else []
    words += ["--keep", str(keep / "kept" / str(command.name))] if keep is not None and "--keep" in known else []
    return words


def run(name: str, command: Sequence[str], limit: int, directory: Path) -> Run:
    """Runs one benchmark, with `--json`; its result replaces the one in `directory` if it succeeds.

    limit: seconds, after which it and all that it started are stopped.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        result, log = Path(place) / f"{name}.json", Path(place) / "log"
        with log.open("w") as heard:
            # In its own session: an interrupt is passed on by `stop`, once and to the end.
            process = subprocess.Popen(
                [*command, "--json", str(result)], stdout=subprocess.DEVNULL, stderr=heard, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                stop(process)
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        failure = ""
        if code is None:
            failure = f"It was stopped after its {limit} seconds."
        elif code != 0:
            failure = f"Exit status {code}."
        elif not result.exists():
            failure = "It wrote no result."
        if failure:
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LAST_WORDS:]
            failure = "\n".join([failure, *last])
        else:
            shutil.copyfile(result, directory / f"{name}.json")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds=seconds, core_seconds=spent, limit_seconds=limit, failure=failure)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process that still runs, so that it tidies up, and kills what is left of it and its children."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        psutil.wait_procs([psutil.Process(process.pid), *family], timeout=GRACE_SECONDS)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    process.wait()


def read_runs(directory: Path, kind: str) -> Runs:
    """What a report of this kind ran here before; nothing if there was none."""
    path = directory / RUNS_FILE
    found = Runs.model_validate_json(path.read_bytes()) if path.exists() else Runs(kind=kind)
    return found if found.kind == kind else Runs(kind=kind)


def write_pages(directory: Path) -> None:
    """report.html and report.md of the results in a directory, and the plots of the latter."""
    path = directory / RUNS_FILE
    runs = Runs.model_validate_json(path.read_bytes()) if path.exists() else Runs(kind="plain")
    found = sections(results_in(directory), list(BUDGETS), runs.runs)
    pictures = {plot_file(section.name, plot.name): png(plot) for section in found for plot in section.plots}
    shutil.rmtree(directory / PLOTS, ignore_errors=True)
    for name, picture in pictures.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(picture)
    (directory / "report.md").write_text(markdown_page(found, runs.kind))
    (directory / "report.html").write_text(html_page(found, runs.kind, pictures))
