"""Which store the settings mean."""

import pytest

from server.settings import Settings
from server.storage.bucket import BucketArtifacts
from server.storage.directory import DiskArtifacts
from server.storage.opening import BadStorage, open_artifacts
from tests.server.s3 import KEY_ID, SECRET


@pytest.fixture
def open_store(tmp_path):
    return lambda **changes: open_artifacts(Settings(home=tmp_path / "home", **changes))


def test_by_default_a_directory_in_the_home(open_store, tmp_path):
    store = open_store()
    assert isinstance(store, DiskArtifacts)
    store.put(b"x")
    assert [path.is_file() for path in (tmp_path / "home" / "artifacts" / "objects").glob("*/*")] == [True]


def test_a_bucket(open_store, s3):
    place = s3.place()
    store = open_store(
        storage_url=f"s3://{place.bucket}/some/prefix/",
        storage_endpoint=s3.url,
        storage_access_key_id=KEY_ID,
        storage_secret_access_key=SECRET,
    )
    assert isinstance(store, BucketArtifacts)
    sha256 = store.put(b"x")
    assert s3.client.get_object(Bucket=place.bucket, Key=f"some/prefix/objects/{sha256[:2]}/{sha256}")


def test_a_bucket_by_the_usual_variables(open_store, s3, monkeypatch):
    place = s3.place()
    for name, value in (("ACCESS_KEY_ID", KEY_ID), ("SECRET_ACCESS_KEY", SECRET), ("ENDPOINT_URL", s3.url)):
        monkeypatch.setenv(f"AWS_{name}", value)
    store = open_store(storage_url=f"s3://{place.bucket}")
    assert store.read(store.put(b"x")) == b"x"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"storage_url": "ftp://x/y"}, "ftp"),
        ({"storage_url": "s3://"}, "s3://"),
        ({"storage_url": "/a/path"}, "/a/path"),
        ({"storage_url": "memory://"}, "s3://"),
        ({"storage_url": "s3://files?x=1"}, "files"),
        ({"storage_url": "s3://files", "storage_endpoint": "http://s3.example.org"}, "does not use TLS"),
        ({"storage_url": "s3://files", "storage_public_endpoint": "http://s3.example.org"}, "does not use TLS"),
        ({"storage_url": "s3://files", "storage_endpoint": "s3.example.org"}, "URL"),
        ({"storage_url": "s3://files", "delivery": "accel"}, "redirect"),
        ({"delivery": "redirect"}, "s3://"),
    ],
)
def test_what_cannot_be(open_store, changes, word):
    with pytest.raises(BadStorage, match=word):
        open_store(**changes)


def test_secrets_stay_out_of_what_is_shown_and_reach_the_workers(tmp_path):
    settings = Settings(home=tmp_path, storage_access_key_id=KEY_ID, storage_secret_access_key=SECRET)
    assert SECRET not in repr(settings)
    assert SECRET not in str(settings.model_dump(mode="json"))
    assert settings.environment()["MOBIZO_STORAGE_SECRET_ACCESS_KEY"] == SECRET


def test_in_clear_only_where_it_is_allowed(open_store):
    options = {"storage_url": "s3://files", "storage_endpoint": "http://s3.example.org"}
    assert isinstance(open_store(**options, storage_allow_http=True), BucketArtifacts)
