"""A real S3 protocol server on a free port, and each kind of store."""

import logging
import os
import uuid
from datetime import datetime, timedelta

import boto3
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from server.artifacts.bucket import BucketArtifacts, BucketPlace
from server.artifacts.disk import DiskArtifacts
from server.artifacts.memory import MemoryArtifacts

KEY_ID, SECRET = "AKIDTEST", "a secret of the tests"


class Service:
    """An S3 service: its URL, and a client of another make to look behind the store's back."""

    def __init__(self, url):
        self.url = url
        self.client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET, region_name="us-east-1"
        )

    def bucket(self):
        """A fresh bucket's name."""
        name = f"files-{uuid.uuid4().hex}"
        self.client.create_bucket(Bucket=name)
        return name

    def place(self, **changes):
        """Where a fresh bucket's files lie."""
        given = {"endpoint": self.url, "access_key_id": KEY_ID, "secret_access_key": SECRET, "allow_http": True}
        return BucketPlace(**{"bucket": self.bucket(), "prefix": "mobizo/one", **given, **changes})


@pytest.fixture(scope="session")
def s3():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    service = Service(f"http://{host}:{port}")
    yield service
    service.client.close()
    server.stop()


def make_disk(tmp_path, request):
    return DiskArtifacts(tmp_path / "artifacts")


def make_memory(tmp_path, request):
    return MemoryArtifacts(tmp_path / "scratch")


def make_bucket(tmp_path, request):
    return BucketArtifacts(request.getfixturevalue("s3").place(), tmp_path / "scratch")


@pytest.fixture(params=[make_disk, make_memory, make_bucket], ids=["disk", "memory", "s3"])
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
        elif isinstance(store, MemoryArtifacts):
            data, stored_at = store._files[sha256]
            store._files[sha256] = (data, stored_at - days)
        else:
            keys = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[store.place.bucket].keys
            for name in (store._key(sha256), store._mark(sha256)):
                if (found := keys.get(f"{store.place.prefix}/{name}")) is not None:
                    assert isinstance(found.last_modified, datetime)
                    found.last_modified -= days

    return grow
