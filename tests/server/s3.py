"""A real S3 protocol server on a free port, and a client of another make to look behind a store's back."""

import logging
import uuid

import pytest

from server.storage.bucket import BucketPlace

KEY_ID, SECRET = "AKIDTEST", "a secret of the tests"


class Service:
    """An S3 service."""

    def __init__(self, url):
        import boto3

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
        options = {"endpoint": self.url, "access_key_id": KEY_ID, "secret_access_key": SECRET, "allow_http": True}
        return BucketPlace(**{"bucket": self.bucket(), "prefix": "mobizo/one", **options, **changes})

    def settings(self):
        """What an operator sets for a fresh bucket."""
        return {
            "storage_url": f"s3://{self.bucket()}/mobizo",
            "storage_endpoint": self.url,
            "storage_access_key_id": KEY_ID,
            "storage_secret_access_key": SECRET,
        }


@pytest.fixture(scope="session")
def s3():
    """The service, for all tests of this process."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    service = Service(f"http://{host}:{port}")
    yield service
    service.client.close()
    server.stop()
