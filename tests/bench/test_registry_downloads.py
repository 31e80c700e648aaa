"""The directory downloads of `bench registry`, small: published, found by the Hub's route, and read whole."""

import shutil

import pytest

from bench.registry import hub_paths, plain_paths, publish_directory
from bench.server.downloads import Source, race
from bench.server.home import make_home, new_token, running
from server.storage.opening import open_artifacts
from shared.access import Role


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    settings = make_home(tmp_path_factory.mktemp("registry"))
    token = new_token(settings, Role.APP)
    with running(settings) as (url, _):
        yield settings, int(url.rpartition(":")[2]), token, *publish_directory(settings, url, token)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the downloads need curl")
def test_every_file_is_read_whole(published):
    _, port, token, revision, files = published
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors", "mobizo.json"}
    assert {path for path, _, _ in files} == names
    source = Source("stream", port, (hub_paths(files, revision),), token)
    assert min(race((source,), 3, 2)["stream"]) > 0
    wrong = Source("stream", port, (tuple((path, size + 1) for path, size in source.sets[0]),), token)
    with pytest.raises(RuntimeError, match="did not send all files"):
        race((wrong,), 3, 1)


def test_files_lie_where_nginx_looks_for_them(published):
    settings, *_, files = published
    objects = settings.artifacts_path / "objects"
    assert [(objects / path[1:]).stat().st_size for path, _ in plain_paths(files)] == [size for _, size, _ in files]
    assert open_artifacts(settings).read(files[1][2])
