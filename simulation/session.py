"""Runs a whole simulation in a directory: base, data, program, shards, rounds. Existing parts are reused."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from server.compiler.checkpoints.base import locate_base
from server.compiler.checkpoints.tokenizer import write_tokenizer
from server.programs.local import compile_into
from shared.errors import BadRequest
from shared.estimator_choice import Demands, possible_estimators, settings_with, unused_setting
from shared.federation.cohort import CohortSettings
from shared.program import ProgramManifest
from shared.recipe import RecipeSettings
from shared.task import Task
from shared.task_templates import named_task
from shared.tokenizer import read_tokenizer
from shared.zo.encoding import answer_sizes
from simulation import tiny
from simulation.arrivals import ProgressCallback
from simulation.executors import Engine, open_executor
from simulation.pool import read_pool
from simulation.privacy import with_noise
from simulation.records import RoundRecord, Store, digest
from simulation.settings import BUILT_IN, SimulationSettings
from simulation.shards import Shard, partition
from simulation.simulator import Simulator
from simulation.worker import WorkerConfig


@dataclass(frozen=True)
class Resources:
    """The resources of a simulation, which do not change its outcome. workers: None for one per core."""

    engine: Engine = "processes"
    workers: int | None = None
    program: Path | None = None  # directory of programs shared between simulations


@dataclass(frozen=True)
class SimulationOutcome:
    """The outcome of a simulation."""

    settings: SimulationSettings
    manifest: ProgramManifest
    shards: list[Shard]
    rounds: list[RoundRecord]

    @property
    def digest(self) -> str:
        """sha256 of everything except times."""
        return digest(self.settings, self.rounds)


def simulate(
    settings: SimulationSettings,
    directory: Path,
    resources: Resources,
    on_progress: ProgressCallback = lambda activity, done, total: None,
) -> SimulationOutcome:
    """Runs or resumes the simulation in `directory`. Raises BadRequest and the errors of compiler and devices."""
    settings = with_noise(settings)
    store = Store(directory)
    store.begin(settings)
    base, data = _base_and_data(settings, directory)
    task = settings.cohort.task
    task = named_task(task) if isinstance(task, str) else task
    program = (resources.program or directory / "program").resolve()
    on_progress("compiling", 0, 1)
    manifest = compile_into(_recipe(settings.cohort, base, task, directory), base, program).manifest
    cores = len(os.sched_getaffinity(0))
    workers = 1 if resources.engine == "inline" else resources.workers or cores
    threads = max(1, cores // workers)
    log = (directory / "workers.log").resolve()
    config = WorkerConfig(program, data, task.model_dump_json(), settings.data.test, threads, log)
    tokenizer = read_tokenizer((program / manifest.file("tokenizer").name).read_bytes())
    pool = read_pool(data, task, tokenizer, manifest.recipe, settings.data.test)
    try:
        shards = partition(settings.data, settings.devices, settings.seed, pool.labels, pool.sources)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    with open_executor(config, workers, resources.engine) as executor:
        rounds = Simulator(settings, manifest, shards, executor, store, on_progress).run()
    return SimulationOutcome(settings, manifest, shards, rounds)


def _base_and_data(settings: SimulationSettings, directory: Path) -> tuple[str, tuple[Path, ...]]:
    """Returns the base's source and the data directories. Writes the built-in ones."""
    if settings.base != BUILT_IN:
        sources = tuple(Path(source).resolve() for source in settings.data.sources)
        for source in sources:
            # Checked before the compilation, which takes long.
            if not (source / "train.jsonl").is_file():
                raise BadRequest(f"{source} has no train.jsonl")
        return settings.base, sources
    base = directory / "base"
    if not (base / "tokenizer.json").exists():
        tiny.write_base(base)
    examples = settings.devices * (settings.data.per_device + settings.data.held_out)
    return str(base), tiny.write_task(directory / "data", examples, settings.data.test)


def _recipe(cohort: CohortSettings, base: str, task: Task, directory: Path) -> RecipeSettings:
    """Returns the cohort's recipe with an estimator, and with the task's answer sizes if it has none."""
    settings = _with_estimator(cohort)
    if settings.answer_length is not None and settings.choices is not None:
        return settings
    path = directory / "tokenizer.json"
    write_tokenizer(locate_base(base), path)
    length, choices = answer_sizes(task, read_tokenizer(path.read_bytes()))
    return settings.model_copy(
        update={"answer_length": settings.answer_length or length, "choices": settings.choices or choices}
    )


def _with_estimator(cohort: CohortSettings) -> RecipeSettings:
    """Returns the cohort's recipe settings, `auto` resolved as the server does. Raises InvalidRecipe."""
    recipe = cohort.recipe
    if recipe.estimator != "auto":
        return settings_with(recipe, recipe.estimator, recipe.micro_batch)
    trajectory = "the cohort's updates are trajectories" if cohort.upload == "trajectory" else None
    unused = unused_setting(cohort.training)
    return settings_with(recipe, possible_estimators(recipe, Demands(trajectory, unused)).names[0])
