"""The directory downloads of `bench registry`, small: published, found by the Hub's route, and read whole."""

import shutil

import pytest

from bench.registry import publish_directory
from bench.server.downloads import Source, race
from bench.server.home import make_home, new_token, running
from shared.access import Role


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    settings = make_home(tmp_path_factory.mktemp("registry"))
    token = new_token(settings, Role.APP)
    with running(settings) as (url, _):
        yield settings, int(url.rpartition(":")[2]), token, *publish_directory(settings, url, token)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the downloads need curl")
def test_every_file_is_read_whole(published):
    _, port, token, served, _ = published
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors", "mobizo.json"}
    assert {path.rpartition("/")[2] for path, _ in served} == names
    source = Source("stream", port, (served,), token)
    assert min(race((source,), 3, 2)["stream"]) > 0
    wrong = Source("stream", port, (tuple((path, size + 1) for path, size in source.sets[0]),), token)
    with pytest.raises(RuntimeError, match="did not send all files"):
        race((wrong,), 3, 1)


def test_files_lie_where_nginx_looks_for_them(published):
    settings, *_, stored = published
    objects = settings.artifacts_path / "objects"
    assert [(objects / path[1:]).stat().st_size for path, _ in stored] == [size for _, size in stored]
    assert {path.name for path in objects.rglob("*")} >= {path.rpartition("/")[2] for path, _ in stored}
