"""The bench of directory downloads, in the small: what is published is found by the Hub's route, and read whole."""

import pytest

from bench.registry_downloads import JOB, operator_of, publish
from bench.server_downloads import Source, race, serving
from bench.server_kills import make_home
from server.artifacts.opening import open_artifacts


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    settings = make_home(tmp_path_factory.mktemp("registry"))
    with serving(settings) as (_, port):
        yield settings, port, publish(f"http://127.0.0.1:{port}", operator_of(settings), JOB)


def test_every_file_is_read_whole(published):
    _, port, found = published
    assert {path for path, _, _ in found.files} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "mobizo.json",
    }
    source = Source("stream", port, (found.paths(lying=False),), f"Authorization: Bearer {found.token}\r\n")
    seconds = race((source,), 3, 2)[source]
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert source.bytes(3) == 3 * sum(size for _, size, _ in found.files)


def test_files_lie_where_nginx_looks_for_them(published):
    settings, _, found = published
    objects = settings.artifacts_path / "objects"
    assert [(objects / path[1:]).stat().st_size for path, _ in found.paths(lying=True)] == [
        size for _, size, _ in found.files
    ]
    assert open_artifacts(settings).read(found.files[1][2])
