"""Data sets while jobs use them: versions that stay, and what the owner removes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from device_agent.datasets.build import Addition, add
from device_agent.datasets.formats import open_source
from device_agent.datasets.store import AvailableDatasets, DatasetRemoved, DatasetStore
from shared.errors import BadRequest, Unavailable

HOLDER = """
import sys
from pathlib import Path
from device_agent.datasets.store import DatasetStore
with DatasetStore(Path(sys.argv[1])).hold("movies") as held:
    print(held.directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def put(tmp_path):
    """Adds or replaces the data set `movies` with records whose text is `word`; returns the store."""

    def put(word, mode="new"):
        path, store = tmp_path / "movies.csv", DatasetStore(tmp_path / "data")
        path.write_text("text,label\n" + "".join(f"{word} {number},{number % 2}\n" for number in range(100)))
        add(store, Addition(name="movies", sources=[open_source(path, None, ",", None)], mode=mode))
        return store

    return put


def text(directory):
    return "".join(path.read_text() for path in sorted(directory.glob("*.jsonl")))


def versions(store):
    return sorted((store.path / ".versions").iterdir())


def test_a_job_notices_that_its_data_set_was_removed_and_the_records_go_when_it_ends(put):
    store = put("old")
    with store.hold("movies") as held:
        with store.changing():
            store.remove("movies")
        assert "old" in text(held.directory)
        assert held.is_removed
    assert versions(store) == []
    with pytest.raises(DatasetRemoved, match="'movies' was removed from this device"), store.hold("movies"):
        pass
    assert issubclass(DatasetRemoved, Unavailable)  # so that the job is released


def test_a_process_that_dies_holds_nothing(put):
    store = put("old")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        held = Path(process.stdout.readline().strip())
        put("new", "replace")
        assert held.is_dir()
        process.send_signal(signal.SIGKILL)
        process.wait()
        store.remove_unreferenced()
        assert not held.is_dir()


def test_a_directory_of_the_owner_is_read_in_place(put, dataset):
    store = put("own")
    available = AvailableDatasets(store, {"reviews": dataset})
    assert available.directories() == {"movies": store.directory("movies"), "reviews": dataset}
    # Names given by the owner win over the home's.
    named = {"movies": dataset, "z": dataset}
    assert AvailableDatasets(store, named).directories() == named
    with pytest.raises(BadRequest, match="lies in the agent's home"):
        AvailableDatasets(store, {"c": store.directory("movies").resolve()})
    with available.hold("reviews") as held:
        assert held.directory == dataset
        (dataset / "train.jsonl").unlink()
        assert held.is_removed
    with available.hold("movies") as held:
        assert "own" in text(held.directory)
    with pytest.raises(DatasetRemoved), available.hold("unknown"):
        pass
