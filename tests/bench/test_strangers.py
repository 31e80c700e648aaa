"""The files of `bench strangers` are what the benchmark says of them, for the reader that quickstart uses."""

import pytest

from bench.strangers import FILES, SETS
from device_agent.home import AgentHome
from mobizo.quickstart.data import FileOptions, check_data


@pytest.mark.parametrize("file", SETS.values(), ids=SETS)
def test_quickstart_reads_every_record_and_suggests_the_task(file, tmp_path):
    data = check_data(FileOptions(file.path, file.columns), AgentHome(tmp_path / "agent"))
    assert data.suggested
    assert data.check.fitting == file.records
    assert (data.task.kind, len(data.task.answers)) == ("choice" if file.classes else "messages", file.classes)


def test_every_file_has_its_origin_on_the_page():
    page = (FILES / "README.md").read_text()
    for file in SETS.values():
        assert f"\n| `{file.name}` |" in page
        assert 400 <= file.records <= 900
        assert file.path.stat().st_size <= 300_000
