"""How lists, leases and claims are read among 10,000 jobs in every state: by indexes, in their order.

The plans are the databases' own, for the very statements that the server sends. Tables that stay small, as that of
tenants' turns, may be read whole; PostgreSQL does so whatever indexes they have.
"""

import itertools
import re
from contextlib import contextmanager

import pytest
from sqlalchemy import event, select

from server.database.columns import utc_now
from server.database.database import Database
from server.database.paging import PageRequest
from server.jobs.leases.giving import LeaseGiving
from server.jobs.leases.messages import JobPoll, Message, Parting
from server.jobs.leases.repository import LeaseRepository
from server.jobs.leases.service import LeaseService
from server.jobs.repository import Job, JobRepository, is_awaited
from server.jobs.scheduling.repository import QueueRepository
from server.schema import upgrade
from shared.job import JobState, Progress
from shared.protocol import LeaseRequest
from tests.server.conftest import BOTH
from tests.server.database.population import JOBS, datasets_of, device_id, populate, tenant_of

DATABASES = BOTH
LARGE = {"jobs", "leases", "job_events", "devices"}
BUSY, IDLE = 3, JOBS // len(JobState) + 2
MANY = 20
TENANT, USER, ADAPTER = "tenant-1", "user-3", "user-3-1"


@pytest.fixture(scope="module")
def database(request, database_kind, tmp_path_factory):
    if database_kind == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('plans') / 'x.sqlite3'}"
    else:
        url = request.getfixturevalue("postgres").create("plans")
    new_database = Database(url)
    upgrade(new_database.engine)
    populate(new_database)
    yield new_database
    new_database.close()


@contextmanager
def counting(database):
    """Lists the statements that are sent meanwhile, with their parameters."""
    statements = []

    def note(connection, cursor, statement, parameters, context, many):
        statements.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    yield statements
    event.remove(database.engine, "before_cursor_execute", note)


@contextmanager
def plans(database):
    """Gets the plan of every statement that is sent meanwhile, by its text."""
    query_plans = {}
    with counting(database) as statements:
        yield query_plans
    explain = "EXPLAIN QUERY PLAN " if database.engine.dialect.name == "sqlite" else "EXPLAIN (FORMAT JSON) "
    with database.engine.connect() as connection:
        for statement, parameters in statements:
            if not re.match(r"\s*(SELECT|UPDATE|DELETE|WITH)\b", statement):
                continue
            rows = connection.exec_driver_sql(explain + statement, parameters).all()
            query_plans[statement] = (
                [row[-1] for row in rows] if len(rows[0]) > 1 else list(nodes(rows[0][0][0]["Plan"]))
            )
        connection.rollback()
    assert query_plans


def nodes(plan):
    """A PostgreSQL plan's nodes, each as SQLite would say it."""
    words = [plan["Node Type"], plan.get("Relation Name", ""), plan.get("Index Name", "")]
    yield " ".join(word for word in words if word)
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def assert_by_index(query_plans, sorts=False):
    """No large table is read whole, and nothing is sorted."""
    for statement, plan in query_plans.items():
        for step in plan:
            scanned = re.match(r"(?:SCAN|Seq Scan|Parallel Seq Scan|Bitmap Heap Scan) (\w+)", step)
            assert scanned is None or scanned[1] not in LARGE, (statement, plan)
            assert sorts or not re.search("TEMP B-TREE|Sort", step), (statement, plan)


def alone(step, index):
    """Whether a step reads that index and not the table."""
    return re.fullmatch(rf"(SEARCH jobs USING COVERING INDEX|Index Only Scan jobs) {index}\b.*", step) is not None


@pytest.mark.parametrize("before", [None, 5000])
@pytest.mark.parametrize(
    ("state", "user", "adapter"), list(itertools.product((None, JobState.FAILED), (None, USER), (None, ADAPTER)))
)
def test_a_list_is_read_from_one_index_alone_and_in_its_order(database, before, state, user, adapter):
    with plans(database) as query_plans, database.reading() as session:
        page = JobRepository(session).page(TENANT, PageRequest(before, 50), state, user, adapter)
    assert page.rows
    assert_by_index(query_plans)
    numbers, rows = query_plans.values()
    assert any(alone(step, "ix_jobs_(tenant|state|user|adapter)") for step in numbers), numbers
    assert all(not re.match("Index Scan|SEARCH jobs USING INDEX", step) for step in numbers), numbers
    assert any(re.match("SEARCH jobs USING INTEGER PRIMARY KEY|Index Scan jobs pk_jobs", step) for step in rows), rows


def poll(number):
    return JobPoll(tenant_of(number), device_id(number), LeaseRequest(datasets=list(datasets_of(number))))


def acquire(session, number):
    ((lease, _),) = LeaseGiving(session, 120).acquire_each([poll(number)])
    return lease


def test_looking_for_work_reads_jobs_and_leases_by_indexes_alone(database):
    with plans(database) as query_plans, database.reading() as session:
        (offer,) = LeaseGiving(session, 120).offers([poll(IDLE)])
        assert not LeaseRepository(session).overdue(utc_now())
        assert QueueRepository(session).heads(offer)
    assert_by_index(query_plans)
    steps = [step for plan in query_plans.values() for step in plan]
    assert any(alone(step, "ix_jobs_lane") for step in steps), steps
    # A job by its number is the one other way.
    others = [step for step in steps if re.search(r"\b(jobs|leases)\b", step) and not re.search("COVERING|Only", step)]
    assert all(re.match("SEARCH jobs USING INTEGER PRIMARY KEY|Index Scan jobs pk_jobs", step) for step in others), (
        others
    )


def test_looking_for_all_who_wait_counts_jobs_by_an_index_alone(database):
    with plans(database) as query_plans, database.reading() as session:
        assert QueueRepository(session).ready(TENANT, [USER, "user-4"])
    # The lanes, of which there are few, are sorted.
    assert_by_index(query_plans, sorts=True)
    steps = [step for plan in query_plans.values() for step in plan if re.search(r"\bjobs\b", step)]
    assert steps
    assert all(alone(step, "ix_jobs_lane") for step in steps), steps


@pytest.mark.parametrize("number", [BUSY, IDLE], ids=["with a lease", "without"])
def test_a_lease_is_given_by_indexes(database, number):
    with plans(database) as query_plans, database.writing() as session:
        assert acquire(session, number) is not None
        session.rollback()  # the jobs stay as they are for the next test
    assert_by_index(query_plans)


def test_a_lease_is_kept_and_ended_by_indexes(database):
    progress = Progress(phase="training", step=2, steps=150)
    with plans(database) as query_plans, database.writing() as session:
        service = LeaseService(session, 120)
        lease = acquire(session, BUSY)
        for says in (progress, Parting.RELEASE):
            (state,) = service.messages([Message(device_id(BUSY), lease.id, says)])
            assert not isinstance(state, Exception)
        session.rollback()
    # Of many devices at once, jobs are locked in their order: those few are sorted.
    assert_by_index(query_plans, sorts=True)


def test_who_waits_for_a_program_is_found_by_an_index(database):
    with database.reading() as session:
        recipe_id = session.scalars(select(Job.recipe_id).where(Job.state == JobState.QUEUED).limit(1)).one()
    with plans(database) as query_plans, database.reading() as session:
        assert is_awaited(session, recipe_id)
        assert JobRepository(session).awaits_program(recipe_id, TENANT, 0)
    assert_by_index(query_plans)


def test_events_are_read_in_order_by_an_index(database):
    with plans(database) as query_plans, database.reading() as session:
        assert JobRepository(session).events_after(5, 1, 10)
    assert_by_index(query_plans)


def test_pages_read_jobs_by_indexes(database):
    with plans(database) as query_plans, database.reading() as session:
        jobs = JobRepository(session)
        assert all(jobs.counts(TENANT).values())
        assert LeaseRepository(session).jobs_of([device_id(number) for number in range(50)])
        assert jobs.programs_page(TENANT, PageRequest(None, 50)).rows
    assert_by_index(query_plans, sorts=True)
