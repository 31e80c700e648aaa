"""Fills a database with thousands of jobs in every state, of several tenants, as a server has after some weeks.

Rows are inserted directly, with documents of real size, since the server's services would need minutes.
"""

from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count

from sqlalchemy import MetaData, Table, insert, text

from server.database.columns import utc_now
from server.identity.tenants import TenantService
from server.jobs import repository as jobs
from server.jobs.leases.repository import Ending
from server.jobs.repository import AWAITING_PROGRAM, StateTimes
from server.jobs.scheduling.matching import needs_of
from server.jobs.scheduling.repository import QueueRepository
from server.programs import service as programs
from server.programs.service import ProgramState
from shared.job import JobRequest, JobState, Progress
from shared.program import ProgramFile, ProgramManifest
from shared.recipe import BaseRef, Recipe, RecipeSettings
from shared.signing import new_private_key, sign_manifest
from shared.task_templates import named_task
from shared.training_settings import TrainingSettings
from shared.zo.lora import a_fingerprint, flat_size
from tests.server.homes import SHAPE, base_entry

JOBS = 10_000
TENANTS, USERS, DATASETS, RANKS = 4, 25, 20, 8
BASE = BaseRef(name="tiny", sha256="b" * 64)
ENDINGS = {
    JobState.SUCCEEDED: Ending.COMPLETED,
    JobState.FAILED: Ending.FAILED,
    JobState.CANCELLED: Ending.CANCELLED,
}
EVENTS = ("job", "progress", "job")
TASK = named_task("sst2").model_dump_json()
PROGRESS = Progress(phase="training", step=1, steps=150, loss=0.5).model_dump_json()


@dataclass(frozen=True)
class StoredRecipe:
    """A recipe as the rows of jobs hold it."""

    id: str
    rank: int
    text: str


def tenant_of(number):
    """Returns the tenant of a job or a device."""
    return f"tenant-{number % TENANTS}"


def datasets_of(number):
    """Returns the data sets of a device. A job of the same number needs the first."""
    first, second = (f"data-{(number // TENANTS + more) % DATASETS}" for more in (0, 1))
    return first, second


def device_id(number):
    """Returns the id of a device. Devices are numbered from 0, and each trains at most one job."""
    return f"device_{number:06d}"


def populate(database, number=JOBS):
    """Fills a database that has only its schema. Returns how many devices train; as many further devices are idle."""
    now = utc_now()
    states = list(JobState)
    training = (number + len(states) - 1) // len(states)
    with database.writing() as session:
        for tenant in range(TENANTS):
            TenantService(session).create(tenant_of(tenant))
        recipes = [_recipe(session, rank, now) for rank in range(1, RANKS + 1)]
        _insert(session, "devices", [_device(index, now) for index in range(2 * training)])
        _insert(session, "device_users", [row for index in range(2 * training) for row in _bindings(index, now)])
        job_rows = []
        for index in range(number):
            state = states[index % len(states)]
            # Jobs that wait for a program wait for the last one; all others are compiled.
            recipe = recipes[-1] if state in AWAITING_PROGRAM else recipes[index % (RANKS - 1)]
            job_rows.append(_job(index, state, recipe, now))
        _enqueue(session, job_rows)
        _insert(session, "jobs", job_rows)
        _insert(session, "job_events", [event for row in job_rows for event in _events(row)])
        _insert(session, "leases", _leases(job_rows, now))
    if database.engine.dialect.name == "postgresql":
        _advance_sequences(database)
        # Its own autovacuum does the same within a minute.
        with database.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")
    return training


def _advance_sequences(database):
    """Sets the sequences past the numbers that were inserted explicitly."""
    with database.writing() as session:
        for name in ("jobs", "leases"):
            sequence = f"pg_get_serial_sequence('{name}', 'number')"
            session.execute(text(f"SELECT setval({sequence}, max(number)) FROM {name}"))


def _insert(session, name, rows):
    """Inserts rows whose documents are already serialized."""
    session.flush()
    connection = session.connection()
    connection.execute(insert(Table(name, MetaData(), autoload_with=connection, resolve_fks=False)), rows)


def _recipe(session, rank, now):
    """Adds a recipe. Its program is compiled, except that of the last one, which is pending."""
    if rank == 1:
        session.add(base_entry(BASE.name, "c" * 64))
        session.flush()
    settings = RecipeSettings(rank=rank, sequence_length=16).model_dump()
    recipe = Recipe.model_validate(settings | {"base": BASE, "answer_length": 1, "choices": 2})
    ready = rank < RANKS
    session.add(
        programs.Program(
            recipe_id=recipe.id,
            recipe=recipe,
            base_number=1,
            state=ProgramState.READY if ready else ProgramState.PENDING,
            signed=_signed(recipe) if ready else None,
            created_at=now,
        )
    )
    session.flush()
    return StoredRecipe(recipe.id, rank, recipe.model_dump_json())


def _signed(recipe):
    files = tuple(
        ProgramFile(role=role, name=f"{role}.bin", size=1000, sha256=digit * 64)
        for role, digit in (("program", "1"), ("weights", "2"), ("tokenizer", "3"))
    )
    manifest = ProgramManifest(
        recipe=recipe,
        recipe_id=recipe.id,
        shape=SHAPE,
        size=flat_size(recipe, SHAPE),
        a_sha256=a_fingerprint(recipe, SHAPE),
        score_rows=recipe.score_rows,
        files=files,
        planned_bytes=1000,
        flops_per_step=1000,
        delegates=1,
        nodes=10,
        executorch="1.5.1",
    )
    return sign_manifest(manifest, new_private_key())


def _device(index, now):
    return {
        "id": device_id(index),
        "tenant": tenant_of(index),
        "name": f"phone-{index}",
        "labels": "{}",
        "failures": 0,
        "public_key": "k" * 44,
        "platform": "linux",
        "created_at": _naive(now),
        "last_seen_at": _naive(now),
    }


def user_of(index):
    """Returns the user of a job. The user does not follow the state, so that every user has jobs in every state."""
    return f"user-{index // len(JobState) % USERS}"


def _bindings(index, now):
    """Returns the bindings of a device to every user."""
    users = (f"user-{user}" for user in range(USERS))
    return [{"device_id": device_id(index), "user": user, "bound_at": _naive(now)} for user in users]


def _job(index, state, recipe, now):
    user = user_of(index)
    waits = state in (*AWAITING_PROGRAM, JobState.READY)
    adapter, dataset = f"{user}-{index % 3}", datasets_of(index // len(JobState))[0]
    moment = _naive(now - timedelta(seconds=index))
    return {
        "number": index + 1,
        "id": f"job_{index:024d}",
        "tenant": tenant_of(index // len(JobState)),
        "state": str(state),
        "request": _request(user, adapter, dataset, recipe.rank),
        "task": TASK,
        "recipe": recipe.text,
        "recipe_id": recipe.id,
        "adapter": adapter,
        "user": user,
        "dataset": dataset,
        "priority": 0,
        "device_id": None if waits else device_id(index // len(JobState)),
        "start_tag": index // (TENANTS * USERS),
        "lane_number": None,
        "attempts": 0,
        "events": len(EVENTS),
        "progress": PROGRESS,
        "times": StateTimes(since=now).model_dump_json(),
        "created_at": moment,
        "updated_at": moment,
    }


@cache
def _request(user, adapter, dataset, rank):
    request = JobRequest(
        base=BASE.name,
        user=user,
        adapter=adapter,
        task="sst2",
        dataset=dataset,
        recipe=RecipeSettings(rank=rank, sequence_length=16),
        training=TrainingSettings(eps=1e-2),
    )
    return request.model_dump_json()


def _naive(moment):
    return moment.replace(tzinfo=None)


def _enqueue(session, rows):
    queue, lanes = QueueRepository(session), dict[tuple[str, ...], int]()
    for row in rows:
        if row["state"] != JobState.READY:
            continue
        key = row["tenant"], row["user"], row["dataset"], row["recipe_id"]
        if key not in lanes:
            request, recipe = JobRequest.model_validate_json(row["request"]), Recipe.model_validate_json(row["recipe"])
            names = ("tenant", "user", "dataset", "recipe_id", "priority")
            job = jobs.Job(only_device_id=None, **{name: row[name] for name in names})
            lanes[key] = queue.lane(job, needs_of(request, recipe, None)).number
        row["lane_number"] = lanes[key]


def _events(row):
    return [
        {"job_number": row["number"], "position": position, "kind": kind, "data": row["request"]}
        for position, kind in enumerate(EVENTS, 1)
    ]


def _leases(rows, now):
    """Returns two leases for each job that a device had: one that expired, and one that is live or ended."""
    numbers, leases = count(1), []
    for row in rows:
        state = row["state"]
        if row["device_id"] is None:
            continue
        for ending in (Ending.EXPIRED, ENDINGS.get(JobState(state))):
            number = next(numbers)
            leases.append(
                {
                    "number": number,
                    "id": f"lease_{number:024d}",
                    "job_number": row["number"],
                    "device_id": row["device_id"],
                    "created_at": _naive(now),
                    "expires_at": _naive(now + timedelta(hours=1)),
                    "ended_at": None if ending is None else _naive(now),
                    "ending": None if ending is None else str(ending),
                }
            )
    return leases
