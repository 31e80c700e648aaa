"""What is collected, what never is, and both while others publish."""

import contextlib
import random
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import delete, select

from server.catalog.bases import BaseModelEntry
from server.database.columns import utc_now
from server.jobs.leases.repository import Ending, JobLease
from server.operations.backup import named_files
from server.ports import Port
from server.schema import METADATA
from server.storage import store
from server.storage.bucket import BucketArtifacts
from server.storage.garbage_collection import ABANDONED, MAX_REMOVAL, Collector, Removal, delete_files
from server.storage.store import REFERENCES, Collected, FileRemoval, GarbageCollection, hold, referenced
from shared.canonical import sha256_hex
from shared.errors import NotFound, Unavailable
from tests.server.actors import adapter_bytes
from tests.server.homes import at_once, base_entry

HOUR, NONE = timedelta(hours=1), timedelta(0)
# Columns with a hash in their name that is of no stored file, of one that another column names, or of one that is made
# again once it is gone.
NOT_OURS = {
    "adapter_versions.a_sha256",
    "bases.sha256",
    "file_removals.sha256",
    "cohorts.a_sha256",
    "trajectories.start_sha256",
}


def test_every_column_that_may_name_a_file_is_known():
    all_columns = {f"{table.name}.{column.name}" for table in METADATA.tables.values() for column in table.columns}
    columns = [each.column.property.columns[0] for each in REFERENCES.get()]
    names = [f"{column.table.name}.{column.name}" for column in columns]
    assert sorted(names) == sorted({name for name in all_columns if "sha256" in name} - NOT_OURS)


def test_nothing_is_collected_while_references_are_unknown(home, grow_old, monkeypatch):
    orphan = home.artifacts.put(b"unreferenced")
    grow_old(home.artifacts, orphan)
    monkeypatch.setattr(store, "REFERENCES", Port("storage.references"))
    with pytest.raises(RuntimeError, match=r"storage\.references.*not connected"):
        Collector(home.database, home.artifacts).collect(timedelta(0))
    assert home.artifacts.read(orphan) == b"unreferenced"


@pytest.mark.both_databases(slow=True)
def test_what_something_names_stays(home, fleet, app, device):
    orphan = home.artifacts.put(b"nobody's")
    fleet.ready_job(app)
    device.finish(device.lease())
    app.get("/v1/adapters/alice-movies/versions/1/peft").raise_for_status()
    fleet.ready_job(app, adapter="other")
    lease = device.lease()
    data = adapter_bytes(lease["manifest"]["manifest"]["size"], 0.25)
    device.upload(lease, data).raise_for_status()
    assert home.collect(dry_run=True) == set()
    assert home.collect() == {orphan}
    with home.database.reading() as session:
        expected = named_files(session) | {sha256_hex(data)}
        assert referenced(session, expected) == expected
    assert {file.sha256 for file in home.artifacts.listing()} == expected
    for sha256 in expected:
        home.artifacts.read(sha256)
    assert home.collect() == set()


@pytest.mark.both_databases(slow=True)
def test_an_upload_stays_as_long_as_its_lease_may_live_again(fleet, home, app, device, lease):
    data = adapter_bytes(lease["manifest"]["manifest"]["size"], 0.25)
    device.upload(lease, data).raise_for_status()
    home.let_run_out(lease)
    fleet.device(name="other").lease("other-data")  # whoever asks takes back what ran out
    assert home.scalar(select(JobLease.ending)) in (None, Ending.EXPIRED)
    assert home.collect() == set()
    app.post(f"/v1/jobs/{lease['job']['id']}/cancel")
    home.change(JobLease, ending=Ending.CANCELLED)
    assert home.collect() == {sha256_hex(data)}


def test_what_is_stored_again_while_a_pass_looks_stays(home, grow_old):
    orphan = home.artifacts.put(b"wanted again")
    grow_old(home.artifacts, orphan)

    class Listing:
        def __getattr__(self, name):
            return getattr(home.artifacts, name)

        def listing(self):
            yield from list(home.artifacts.listing())
            home.artifacts.put(b"wanted again")

    assert Collector(home.database, Listing()).collect(HOUR).deleted == 0
    assert home.artifacts.read(orphan) == b"wanted again"


def test_an_upload_that_is_collected_at_once_can_be_sent_again(home, device, lease, problem, monkeypatch):
    data = adapter_bytes(lease["manifest"]["manifest"]["size"], 0.25)
    original_adopt = home.artifacts.adopt

    def adopt_and_lose(path, sha256):
        original_adopt(path, sha256)
        home.artifacts.delete([sha256])

    monkeypatch.setattr(home.artifacts, "adopt", adopt_and_lose)
    problem(device.upload(lease, data), 503, "file-collected")
    monkeypatch.undo()
    assert device.upload(lease, data).status_code == 200


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.slow)])
def any_store(request, home, tmp_path):
    """The home's directory, or a bucket."""
    if request.param == "disk":
        return home.artifacts
    return BucketArtifacts(request.getfixturevalue("s3").place(), tmp_path / "scratch")


class Deleting:
    """A store that calls a function before it deletes files."""

    def __init__(self, artifacts, before):
        self._artifacts, self._before = artifacts, before

    def __getattr__(self, name):
        return getattr(self._artifacts, name)

    def delete(self, sha256s):
        if sha256s:
            self._before()
        self._artifacts.delete(sha256s)


def reference(home, sha256):
    """A transaction that references a file."""
    with home.database.writing() as session:
        hold(session, home.artifacts, [sha256])


@pytest.mark.both_databases
def test_files_are_deleted_outside_of_transactions_and_stay_refused_meanwhile(home, grow_old):
    orphan, other = (home.artifacts.put(data) for data in (b"unreferenced", b"other"))
    grow_old(home.artifacts, orphan)

    def meanwhile():
        home.artifacts.put(b"unreferenced")
        with pytest.raises(Collected):
            reference(home, orphan)
        reference(home, other)

    assert Collector(home.database, Deleting(home.artifacts, meanwhile)).collect(HOUR).deleted == 1
    with pytest.raises(Collected):
        reference(home, orphan)
    home.artifacts.put(b"unreferenced")
    reference(home, orphan)


@pytest.mark.both_databases
def test_what_a_killed_process_was_removing_is_removed_by_the_next_one(home, grow_old):
    class Killed(BaseException):
        pass

    def die():
        raise Killed

    orphan = home.artifacts.put(b"unreferenced")
    grow_old(home.artifacts, orphan)
    with pytest.raises(Killed):
        Collector(home.database, Deleting(home.artifacts, die)).collect(HOUR)
    collector = Collector(home.database, home.artifacts)
    assert collector.collect(HOUR).deleted == 0  # the other process may live
    with pytest.raises(Collected):
        reference(home, orphan)
    home.change(FileRemoval, begun_at=utc_now() - ABANDONED - HOUR)
    collector.finish_abandoned()
    with pytest.raises(NotFound):
        home.artifacts.read(orphan)
    home.artifacts.put(b"unreferenced")
    reference(home, orphan)


def test_a_process_that_was_suspended_deletes_nothing(home):
    orphan = home.artifacts.put(b"unreferenced")
    with pytest.raises(Unavailable):
        delete_files(home.artifacts, Removal((orphan,), utc_now() - MAX_REMOVAL - HOUR))
    assert home.artifacts.read(orphan)


@pytest.mark.both_databases(slow=True)
def test_no_name_is_ever_committed_without_its_file(home, any_store):
    """Publishers store, name, read and forget the same few files, while two collectors give no grace at all."""
    contents = [f"content {number}".encode() * 50 for number in range(4)]
    rounds = 24
    finished_publishers, removal_counts, read_contents = [], [], []

    def publish(who):
        rng = random.Random(who)
        for turn in range(rounds):
            name = f"{who}-{turn}"
            data = rng.choice(contents) if turn % 4 else name.encode()
            while True:
                sha256 = any_store.put(data)
                with contextlib.suppress(Collected), home.database.writing() as session:
                    hold(session, any_store, [sha256])
                    session.add(base_entry(name, sha256))
                    break
            read_contents.append(any_store.read(sha256))
            if turn % 4 == 0 or rng.random() < 0.9:
                with home.database.writing() as session:
                    session.execute(delete(BaseModelEntry).where(BaseModelEntry.name == name))

    def gather():
        collector = Collector(home.database, any_store)
        while True:
            last = len(finished_publishers) == 3
            removal_counts.append(collector.collect(NONE).deleted)
            if last:
                return

    def publish_all(who):
        try:
            publish(who)
        finally:
            finished_publishers.append(who)

    any_store.put((home.source / "tokenizer.json").read_bytes())
    at_once(gather, gather, *(partial(publish_all, who) for who in range(3)))
    assert len(read_contents) == 3 * rounds
    assert sum(removal_counts) >= 3 * rounds / 4
    names = set(home.scalars(select(BaseModelEntry.tokenizer_sha256)))
    assert names
    for sha256 in names:
        any_store.read(sha256)


def test_a_worker_collects_when_it_is_time(home, grow_old):
    orphans = [home.artifacts.put(data) for data in (b"one", b"two")]
    settings = home.settings.model_copy(update={"collect_hours": 24, "collect_grace_hours": 1})
    grow_old(home.artifacts, orphans[0])
    workers = [Collector(home.database, home.artifacts) for _ in range(2)]
    for worker in workers:
        worker.collect_if_due(settings)
    with pytest.raises(NotFound):
        home.artifacts.read(orphans[0])
    grow_old(home.artifacts, orphans[1])
    for worker in workers:
        worker.collect_if_due(settings)
    assert home.artifacts.read(orphans[1])
    home.change(GarbageCollection, started_at=datetime.now(UTC) - timedelta(hours=25))
    workers[1].collect_if_due(settings)
    with pytest.raises(NotFound):
        home.artifacts.read(orphans[1])


def test_a_worker_that_is_told_not_to(home, grow_old):
    orphan = home.artifacts.put(b"one")
    grow_old(home.artifacts, orphan)
    settings = home.settings.model_copy(update={"collect_hours": 0})
    Collector(home.database, home.artifacts).collect_if_due(settings)
    assert home.artifacts.read(orphan)


def test_a_pass_that_is_stopped(home, grow_old):
    grow_old(home.artifacts, home.artifacts.put(b"one"))
    assert Collector(home.database, home.artifacts, lambda: True).collect(HOUR).deleted == 0
