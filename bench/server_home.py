"""A server's home for benchmarks: a base model, its compiled program, devices and tokens, put straight into the
database. The program is no program, only its manifest: nobody here trains.
"""

from __future__ import annotations

import base64
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from tokenizers import Tokenizer, models, pre_tokenizers

from server import keys
from server.artifacts.opening import open_artifacts
from server.auth.models import Role
from server.auth.service import DEFAULT_TENANT, TokenService
from server.bases.models import BaseModelEntry
from server.clock import utc_now
from server.db.database import Database
from server.db.schema import programs, upgrade
from server.devices.models import Device
from server.identity import new_id
from server.jobs.recipes import resolve_recipe, resolve_task
from server.settings import Settings
from shared.job import JobRequest, TrainingSettings
from shared.lora import BaseShape, a_fingerprint, flat_size
from shared.program import ProgramFile, ProgramManifest
from shared.recipe import BaseRef, Recipe, RecipeSettings
from shared.signing import new_private_key, private_bytes, public_text, sign_manifest

SHAPE = BaseShape(
    architecture="llama",
    layers=2,
    hidden=8,
    intermediate=16,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocabulary=32,
    context_length=64,
)
DATASET, BASE = "movies", "tiny"


@dataclass(frozen=True)
class Credentials:
    """What one simulated device needs: its token and its key, base64."""

    token: str
    key: str


def request(number: int) -> JobRequest:
    """A job of one of twenty users."""
    return JobRequest(
        base=BASE,
        user=f"user-{number % 20}",
        adapter=f"adapter-{number}",
        task="sst2",
        dataset=DATASET,
        recipe=RecipeSettings(rank=2, sequence_length=16, queries=1, effective_batch=2),
        training=TrainingSettings(steps=3),
    )


def fill(
    settings: Settings, devices: int, shape: BaseShape = SHAPE, wanted: JobRequest | None = None
) -> tuple[str, list[Credentials]]:
    """Makes a home in `settings.home`; an app's token, and the devices.

    shape: of its base model. wanted: a job whose program is there; None: as `request` makes them.
    """
    settings.home.mkdir(parents=True)
    keys.create_key(settings.key_path)
    database = Database(settings.url, settings.tuning)
    upgrade(database.engine)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "terrible": 1, "great": 2, "It": 3, "was": 4}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    now = utc_now()
    with database.writing() as session:
        base = BaseModelEntry(
            name=BASE,
            source="nowhere",
            sha256="b" * 64,
            shape=shape,
            parameters=1000,
            tokenizer_sha256=open_artifacts(settings).put(tokenizer.to_str().encode()),
            created_at=now,
        )
        session.add(base)
        session.flush()
        wanted = wanted or request(0)
        reference = BaseRef(name=BASE, sha256=base.sha256)
        recipe = resolve_recipe(wanted, resolve_task(wanted), reference, shape, tokenizer)
        session.add(
            programs.Program(
                recipe_id=recipe.id,
                recipe=recipe,
                base_number=base.number,
                state=programs.ProgramState.READY,
                signed=sign_manifest(_manifest(recipe, shape), keys.load_key(settings.key_path)),
                attempts=1,
                created_at=now,
                ready_at=now,
            )
        )
        tokens = TokenService(session)
        _, app = tokens.issue(Role.APP, DEFAULT_TENANT, "bench")
        found = []
        for number in range(devices):
            key = new_private_key()
            device = Device(
                id=new_id("device"),
                tenant=DEFAULT_TENANT,
                name=f"device-{number}",
                public_key=public_text(key.public_key()),
                platform="linux",
                created_at=now,
            )
            session.add(device)
            session.flush()
            _, token = tokens.issue(Role.DEVICE, DEFAULT_TENANT, device.name, device.id)
            found.append(Credentials(token, base64.b64encode(private_bytes(key)).decode()))
    database.close()
    return app, found


def _manifest(recipe: Recipe, shape: BaseShape) -> ProgramManifest:
    return ProgramManifest(
        recipe=recipe,
        recipe_id=recipe.id,
        shape=shape,
        size=flat_size(recipe, shape),
        a_sha256=a_fingerprint(recipe, shape),
        score_rows=recipe.score_rows,
        files=tuple(
            ProgramFile(role=role, name=name, size=1000, sha256=digit * 64)
            for role, name, digit in (
                ("program", "program.pte", "1"),
                ("weights", "weights.ptd", "2"),
                ("tokenizer", "tokenizer.json", "3"),
            )
        ),
        planned_bytes=1000,
        flops_per_step=1000,
        delegates=1,
        nodes=10,
        executorch="1.5.1",
    )


@contextmanager
def running(settings: Settings) -> Iterator[tuple[str, psutil.Process]]:
    """`mobizo-server run` without workers, while the context lasts: its URL and its process."""
    with tempfile.TemporaryDirectory() as name:
        told, log = Path(name) / "out", Path(name) / "log"
        environment = os.environ | settings.environment()
        with told.open("wb") as out, log.open("wb") as errors:
            process = psutil.Popen(
                [sys.executable, "-m", "server.cli", "run", "--port", "0", "--workers", "0"],
                env=environment,
                stdout=out,
                stderr=errors,
            )
        try:
            while not (url := re.search(r"http://\S+:\d+", told.read_text() + log.read_text())):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended: {log.read_text()[-2000:]}")
            yield url[0], process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except psutil.TimeoutExpired:
                process.kill()
