"""Each kind of store."""

import os
from datetime import datetime, timedelta

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from server.storage.bucket import BucketArtifacts
from server.storage.directory import DiskArtifacts


def make_disk(tmp_path, request):
    return DiskArtifacts(tmp_path / "artifacts")


def make_bucket(tmp_path, request):
    return BucketArtifacts(request.getfixturevalue("s3").place(), tmp_path / "scratch")


@pytest.fixture(params=[make_disk, make_bucket], ids=["disk", "s3"])
def store(request, tmp_path):
    return request.param(tmp_path, request)


@pytest.fixture
def grow_old():
    """Makes a stored file old: of two days, by its store's clock."""
    days = timedelta(days=2)

    def grow(store, sha256):
        if isinstance(store, DiskArtifacts):
            before = store.stored_at(sha256).timestamp() - days.total_seconds()
            os.utime(store._path(sha256), (before, before))
        else:
            keys = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[store.place.bucket].keys
            for name in (store._key(sha256), store._mark(sha256)):
                if (key := keys.get(f"{store.place.prefix}/{name}")) is not None:
                    assert isinstance(key.last_modified, datetime)
                    key.last_modified -= days

    return grow
