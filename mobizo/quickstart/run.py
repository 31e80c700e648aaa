"""`mobizo quickstart`: from a base model and a file of records to a personal adapter on this device."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from device_agent.cli.data import base_tokenizer
from device_agent.home import AgentHome
from device_agent.policy.task_approvals import task_lines
from mobizo import Client
from mobizo.cli.progress import show_job_progress
from mobizo.quickstart.data import CheckedData, FileOptions, check_data, slug
from mobizo.quickstart.processes import AGENT, Processes, run_command
from mobizo.quickstart.site import Site
from shared.canonical import canonical_json, sha256_hex
from shared.catalog import BaseView
from shared.durable import write_durably
from shared.errors import BadRequest, Conflict, MobizoError, NotFound
from shared.job import JobRequest, JobStart, JobState, JobView
from shared.recipe import TARGETS, RecipeSettings
from shared.registry import VersionState
from shared.result import SMALL_SPLIT
from shared.task import record_fields
from shared.training_settings import TrainingSettings

USER, DEVICE = "me", "this-device"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LAYERS, WRITING_LAYERS = 12, 8  # the last ones, which are adapted; the others run once for each example
MAX_LENGTH = 512  # tokens of a record that are read; longer ones take too long on a laptop
BATCH = 8
TEXT_LENGTH = 96  # of a piece of a document
MIN_STEPS, MAX_STEPS = 10, 1_000  # with --minutes
# Without it: about three passes over the records, with a quarter of the tokens missing at each visit. The validation
# accuracy of ten classes was highest there.
STEPS, MAX_DEFAULT_STEPS = 80, 240
PASSES, TRAINING_SHARE = 3, 0.8
TOKEN_DROPOUT = 0.25
# Of choices, and of tasks that write. Alpha grows as the root of the rank, so that Adam moves the weights alike.
RANK, ALPHA = 32, 64
WRITING_RANK, WRITING_ALPHA = 8, 32
WRITING_STEPS = 40  # each has the loss of many answer tokens over the whole vocabulary
LR = 3e-3
SAMPLE_TOKENS = 40  # of a held-out text that is shown at the end
TEST_LIMIT, VALIDATION_LIMIT = 500, 200
WRITING_TEST_LIMIT, WRITING_VALIDATION_LIMIT = 100, 40
# Seconds a step for each token of a full batch and each parameter, on 2 cores with 135M parameters: the first of the
# five files with labels of `bench strangers` (2.4 to 3.0), whose records are shorter than the length that is read.
STEP_SECONDS, WRITING_STEP_SECONDS = 2.7e-12, 1.4e-11


@dataclass(frozen=True)
class Options:
    """Options of the command.

    home: directory of server and device. minutes: approximate limit of the training time. continues: training starts
    from the adapter's current version.
    """

    base: str
    file: FileOptions
    home: Path
    minutes: float | None = None
    continues: bool = False


def quickstart(options: Options, console: Console) -> dict[str, Any]:
    """Trains an adapter on this machine and returns a report. Prints progress to the console.

    Raises BadRequest or InvalidDataset, before anything is started, for options and files that cannot be used, and
    MobizoError if a step fails. Finished steps are kept; the same call continues after them.
    """
    start = time.monotonic()
    if options.minutes is not None and math.isnan(options.minutes):
        raise BadRequest("--minutes nan is not a number")
    source = _resolve_base(options.base)
    data = check_data(options.file, AgentHome(options.home / "agent"))
    _show_data(data, console)
    with ExitStack() as stack:
        stack.enter_context(_lock_directory(options.home))
        processes = stack.enter_context(Processes(options.home / "logs"))
        site = Site(options.home, processes)
        console.print("[bold]server[/bold]: keys, database, base model")
        bases = [] if site.set_up() else site.server("base", "list")
        site.start_server()
        base = next((each["name"] for each in bases if each["source"] == source), None)
        base = base or _add_base(site, source, {each["name"] for each in bases})
        tokenizer_file = options.home / "tokenizer.json"
        site.server("base", "tokenizer", base, str(tokenizer_file))
        data = check_data(options.file, site.agent_home, base_tokenizer(tokenizer_file))
        data.save(site.agent_home)
        client = stack.enter_context(site.connect())
        site.start_device(client, DEVICE, USER)
        view = next(view for view in client.bases.list() if view.name == base)
        length = _sequence_length(view, data)
        for line in data.check.length_lines(length):
            console.print(f"  {line}", markup=False, soft_wrap=True)
        job = _run_job(client, site, data, _job_request(view, data, options), console)
        if job.state is not JobState.SUCCEEDED:
            processes.check()
            raise MobizoError(f"the job is {job.state}: {job.error.detail if job.error else 'no reason given'}")
        report = _report(client, job)
        # A version that is not better than the base is held; the device has its file anyway.
        reference = report["adapter"] if report["approved"] else data.addition.name
        run_command([AGENT, "adapter", "pull", reference], site.env)
        if data.task.generates:
            report["sample"] = _sample(data, site)
        environment = site.write_environment()
    report |= {"records": data.check.fitting, "records_cut": data.check.cut(length)}
    report |= {"seconds": round(time.monotonic() - start, 1), "next": _next_commands(data, site, environment)}
    return report


def _resolve_base(base: str) -> str:
    """Returns the source of a base model as the server registers it. Raises BadRequest if there is none."""
    path = Path(base).expanduser()
    if (path.is_file() and path.suffix == ".gguf") or (path / "config.json").is_file():
        return str(path.resolve())
    if path.exists():
        raise BadRequest(f"--base {base} is neither a .gguf file nor a directory with config.json")
    if not HUB_ID.fullmatch(base) or base.startswith("."):
        raise BadRequest(f"--base {base} does not exist; give a .gguf file, a directory, or an id such as OWNER/NAME")
    return base


def _add_base(site: Site, source: str, names: Set[str]) -> str:
    """Registers a base and returns its name, none of `names`. Raises BadRequest if the base cannot be used."""
    name = slug(Path(source).stem if source.endswith(".gguf") else Path(source).name)
    if name in names:
        name = f"{name}-{sha256_hex(source.encode())[:6]}"
    try:
        site.server("base", "add", name, source)
    except MobizoError as error:
        raise BadRequest(f"--base {source}: {error.detail}") from error
    return name


def _show_data(data: CheckedData, console: Console) -> None:
    origin = "suggested by the file's columns" if data.suggested else "as given"
    console.print(f"[bold]task[/bold] {data.task.name}, {origin}:", soft_wrap=True)
    repeated = [f"{data.duplicates} records of the file repeat others and are left out"] if data.duplicates else []
    for line in (*task_lines(data.task), *data.check.lines(), *repeated):
        console.print(f"  {line}", markup=False, soft_wrap=True)


@contextmanager
def _lock_directory(home: Path) -> Iterator[None]:
    """Locks the directory for this process. Raises BadRequest if it cannot be created, Conflict if it is locked."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise BadRequest(f"--home {home} cannot be used ({error})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Conflict(f"another quickstart uses {home}; wait for its end, or choose another --home") from error
    else:
        yield
    finally:
        os.close(descriptor)


def _sequence_length(base: BaseView, data: CheckedData) -> int:
    """Returns the tokens of a record that are read."""
    # A long document is read in pieces. A step's time is proportional to their length.
    return min(data.check.suggested, base.context_length, TEXT_LENGTH if data.task.kind == "text" else MAX_LENGTH)


def _job_request(base: BaseView, data: CheckedData, options: Options) -> JobRequest:
    """Returns the job's request, with the settings that were best for one person's data in the demo."""
    generates = data.task.generates
    length = _sequence_length(base, data)
    batch = max(BATCH, len(data.task.answers))  # a program scores all answers of a record in one call
    passes = round(PASSES * TRAINING_SHARE * data.check.fitting / batch)
    steps = WRITING_STEPS if generates else min(max(passes, STEPS), MAX_DEFAULT_STEPS)
    if (minutes := options.minutes) is not None:
        step_seconds = (WRITING_STEP_SECONDS if generates else STEP_SECONDS) * base.parameters * batch * length
        steps = int(min(max(60 * minutes / step_seconds, MIN_STEPS), MAX_STEPS))
    recipe = RecipeSettings(
        estimator="gradient",
        targets=TARGETS,
        rank=WRITING_RANK if generates else RANK,
        alpha=WRITING_ALPHA if generates else ALPHA,
        layers=f"last:{min(WRITING_LAYERS if generates else LAYERS, base.layers)}",
        effective_batch=batch,
        sequence_length=length,
        answer_length=None if data.check.suggested_answer is None else min(data.check.suggested_answer, length - 1),
        loss=data.task.preference_loss or ("full" if generates or not data.task.shares_prompt else "candidates"),
        precision="int8",
    )
    training = TrainingSettings(
        seed=options.file.seed,
        steps=steps,
        lr=LR,
        schedule="cosine",
        evaluation_interval=steps,  # the learning rate is 0 at the end, and the last B is the best one
        token_dropout=0 if generates else TOKEN_DROPOUT,
        validation_limit=WRITING_VALIDATION_LIMIT if generates else VALIDATION_LIMIT,
        test_limit=WRITING_TEST_LIMIT if generates else TEST_LIMIT,
    )
    name = data.addition.name
    start = JobStart(adapter=name) if options.continues else None
    return JobRequest(
        base=base.name,
        user=USER,
        adapter=name,
        task=data.task,
        dataset=name,
        recipe=recipe,
        training=training,
        start=start,
    )


def _run_job(client: Client, site: Site, data: CheckedData, request: JobRequest, console: Console) -> JobView:
    """Submits a job unless one with the same request and records exists; returns its view after it has ended."""
    jobs_file = site.directory / "jobs.json"
    jobs: dict[str, str] = json.loads(jobs_file.read_text()) if jobs_file.is_file() else {}
    key = sha256_hex(canonical_json([request.model_dump(mode="json"), data.files]))
    job = None
    if key in jobs:
        try:
            job = client.jobs.get(jobs[key])
        except NotFound:
            job = None
    if job is not None and job.state not in (JobState.FAILED, JobState.CANCELLED):
        console.print(f"[bold]job[/bold] {job.id} of an earlier run continues")
    else:
        try:
            job = client.jobs.submit(request)
        except (NotFound, Conflict) as error:
            if request.start is None:
                raise
            raise BadRequest(f"{error.detail}; approve a version for --continue, or use --add to train anew") from error
        write_durably(jobs_file, json.dumps(jobs | {key: job.id}, indent=1).encode())
        console.print(f"[bold]job[/bold] {job.id} (recipe {job.recipe_id[:12]})")
    return show_job_progress(client, job.id, console)


def _report(client: Client, job: JobView) -> dict[str, Any]:
    result = job.result
    if result is None or job.adapter_version is None:
        raise MobizoError(f"job {job.id} succeeded without a result")
    version = client.adapters.version(job.request.adapter, job.adapter_version)
    return {
        "job_id": job.id,
        "base": job.request.base,
        "adapter": f"{job.request.adapter}@v{version.version}",
        "approved": version.state is not VersionState.HELD,
        "split": result.accuracy_split or "test",
        "accuracy_before": result.before_accuracy,
        "accuracy_after": result.tuned_accuracy,
        "accuracy_interval": result.accuracy_interval,
        "majority_accuracy": result.majority_accuracy,
        "baseline_accuracy": result.baseline_accuracy,
        "held": version.message if version.state is VersionState.HELD else None,
        "perplexity": result.perplexities,
        "preference_margin": result.preference_margin,
        "steps": result.steps,
        "train_seconds": round(result.train_seconds, 1),
    }


def _sample(data: CheckedData, site: Site) -> dict[str, str]:
    """Returns a held-out prompt, and its continuations in the record, by the base model and by the adapter."""
    name, token_limit = data.addition.name, str(SAMPLE_TOKENS)
    options = ["--data", name, "--limit", "1", "--max-tokens", token_limit, "--json"]
    text: dict[str, str] = json.loads(run_command([AGENT, "samples", name, *options], site.env))["texts"][0]
    return text


def _next_commands(data: CheckedData, site: Site, environment: Path) -> list[str]:
    """Returns the commands to type next."""
    home = ["--home", str(site.agent_home.path)]
    if data.task.generates:
        form = [] if data.task.kind == "messages" else ["--form", "plain"]
        command = ["mobizo-agent", "chat", data.addition.name, *form, *home]
    else:
        fields = record_fields(data.task)
        inputs = ["--text", "Your own sentence."] if len(fields) == 1 else [f"--field={field}=..." for field in fields]
        command = ["mobizo-agent", "predict", data.addition.name, *inputs, *home]
    return [
        shlex.join(command),
        shlex.join(["mobizo-agent", "serve", *home]),
        f". {shlex.quote(str(environment))}; mobizo-server run & sleep 5; mobizo job list",
    ]


def show_report(report: dict[str, Any], console: Console) -> None:
    """Prints the report as text."""
    if report["preference_margin"] is not None:
        console.print(
            f"preferred answers that gained on the others: [bold]{report['accuracy_after']:.1%}[/bold] of the "
            f"{report['split']} records, by {report['preference_margin']:.2f} nats on average"
        )
    elif report["accuracy_after"] is not None:
        before, after = (
            "?" if value is None else f"{value:.1%}" for value in (report["accuracy_before"], report["accuracy_after"])
        )
        console.print(
            f"accuracy on the {report['split']} records: [bold]{before}[/bold] before, [bold]{after}[/bold] after"
        )
        if report["accuracy_interval"] is not None:
            total, low, high = report["accuracy_interval"]
            few = "; [bold]these are too few to say much[/bold]" if total < SMALL_SPLIT else ""
            console.print(f"{total} {report['split']} records: the 95 % interval is {low:.0%} to {high:.0%}{few}")
        if report["baseline_accuracy"] is not None:
            console.print(
                f"for comparison: always the most frequent answer {report['majority_accuracy']:.1%}, a logistic "
                f"regression on n-grams {report['baseline_accuracy']:.1%}",
                soft_wrap=True,
            )
    if report["perplexity"] is not None:
        before, after = (f"{value:.1f}" for value in report["perplexity"])
        console.print(
            f"perplexity of the {report['split']} texts: [bold]{before}[/bold] before, [bold]{after}[/bold] after"
        )
    if (sample := report.get("sample")) is not None:
        console.print(f"\nA held-out text: {sample['prompt'].strip()}", markup=False, soft_wrap=True)
        for key, author in (("own", "its own words"), ("base", "the base model"), ("adapter", "your adapter")):
            console.print(f"  {author}: {' '.join(sample[key].split())}", markup=False, soft_wrap=True)
        console.print()
    console.print(
        f"{report['adapter']} is on this device after {report['seconds']:.0f} seconds; "
        f"training took {report['train_seconds']:.0f} seconds"
    )
    if report["records_cut"] and report["perplexity"] is None:
        console.print(f"{report['records_cut']} of {report['records']} records were cut, because they are longer")
    if not report["approved"]:
        console.print(
            f"The server holds it: {report['held']}. See 'When the result is poor' in docs/own-data.md; `mobizo "
            f"adapter approve {report['adapter']}` approves it anyway.",
            soft_wrap=True,
            markup=False,
        )
    console.print("\nNext steps:")
    for line in report["next"]:
        console.print(f"  {line}", style="bold", markup=False, soft_wrap=True)
