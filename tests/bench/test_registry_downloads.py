"""The directory downloads of `bench registry`, small: published, listed by the Hub's route, and read completely."""

import shutil

import pytest

from bench.registry import publish_directory
from bench.server.downloads import Source, time_downloads
from bench.server.home import make_home, new_token, running_server
from shared.access import Role


@pytest.fixture(scope="module")
def publication(tmp_path_factory):
    settings = make_home(tmp_path_factory.mktemp("registry"))
    token = new_token(settings, Role.APP)
    with running_server(settings) as (url, _):
        yield settings, int(url.rpartition(":")[2]), token, *publish_directory(settings, url, token)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the downloads need curl")
def test_every_file_is_read_whole(publication):
    _, port, token, hub_files, _ = publication
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors", "mobizo.json"}
    assert {path.rpartition("/")[2] for path, _ in hub_files} == names
    source = Source("stream", port, (hub_files,), token)
    assert min(time_downloads((source,), 3, 2)["stream"]) > 0
    wrong_source = Source("stream", port, (tuple((path, size + 1) for path, size in source.sets[0]),), token)
    with pytest.raises(RuntimeError, match="did not send all files"):
        time_downloads((wrong_source,), 3, 1)


def test_files_lie_where_nginx_looks_for_them(publication):
    settings, *_, stored_files = publication
    objects = settings.artifacts_path / "objects"
    assert [(objects / path[1:]).stat().st_size for path, _ in stored_files] == [size for _, size in stored_files]
    assert {path.name for path in objects.rglob("*")} >= {path.rpartition("/")[2] for path, _ in stored_files}
