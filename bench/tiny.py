"""The tests' random Llama of 30 thousand weights, and sentences for it: a whole run takes half a second. Runs of any
program, as the agent trains them.
"""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.programs import CompiledProgram, compile_cold
from device_agent.executors.runner import RunnerLauncher
from device_agent.home import AgentHome, DeviceConfig
from device_agent.runner.location import find_runner
from device_agent.training.run import train_run
from device_agent.training.run_directory import RunDirectory
from device_agent.training.run_plan import RunPlan
from server.compiler.checkpoints.base import locate_base
from shared.canonical import sha256_hex
from shared.recipe import BaseRef, Recipe
from shared.result import Result
from shared.signing import key_id, public_text
from shared.task import Task
from shared.training_settings import TrainingSettings
from tests.device_agent import tiny

SPLITS = {"train": 13, "validation": 9, "test": 7}


def compile_tiny(base: Path, directory: Path, **settings: object) -> CompiledProgram:
    """Compiles a program of the model, by default with q = 2, E = 4, S = 40."""
    defaults = {"queries": 2, "sequence_length": 40, "answer_length": 6, "rank": 2, "alpha": 4, "choices": 2}
    reference = BaseRef(name="tiny", sha256=locate_base(str(base)).sha256)
    recipe = Recipe.model_validate({"base": reference, "effective_batch": 4} | defaults | settings)
    return compile_cold(recipe, directory, base)


def write_sentences(directory: Path) -> Path:
    """Writes a data set of all three splits, with balanced labels."""
    directory.mkdir(parents=True)
    for seed, (split, count) in enumerate(SPLITS.items()):
        tiny.write_records(directory / f"{split}.jsonl", count, seed)
    return directory


def enrolled_home(directory: Path, key: Ed25519PrivateKey, server: str = "http://localhost") -> AgentHome:
    """Creates the home of an agent that is enrolled at a server. key: signs the server's manifests."""
    home, public = AgentHome(directory), key.public_key()
    home.create()
    settings = {"server": server, "name": "bench", "device_id": "device-1", "token": "token"}
    home.enroll(DeviceConfig(**settings, public_key=public_text(public), key_id=key_id(public)))
    return home


def plan_of(
    program: CompiledProgram, dataset: Path, training: TrainingSettings, job: str = "job-1", task: Task = tiny.TASK
) -> RunPlan:
    """Returns the plan of a run of the program on a data set."""
    return RunPlan(
        job_id=job,
        task=task,
        training=training,
        manifest=program.manifest,
        dataset=dataset,
        program=program.path("program"),
        weights=program.path("weights"),
        tokenizer=program.path("tokenizer"),
        noise_key=sha256_hex(b"bench"),
    )


def train(plan: RunPlan, directory: Path) -> Result:
    """Trains a plan in the native runner, in a run's directory, from where an interrupted run of it ended."""
    run = RunDirectory(directory)
    run.begin(plan)
    return train_run(run, RunnerLauncher(find_runner()), lambda _: None)
