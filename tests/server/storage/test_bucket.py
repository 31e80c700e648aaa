"""What is particular to a bucket, seen by another client of the same S3 server."""

import httpx
import pytest

from server.storage.bucket import PART_BYTES, BucketArtifacts, BucketPlace
from shared.canonical import sha256_hex
from shared.errors import Unavailable
from tests.server.s3 import KEY_ID, SECRET

DATA = b"some bytes" * 1000
SHA = sha256_hex(DATA)


@pytest.fixture
def store(s3, tmp_path):
    return BucketArtifacts(s3.place(), tmp_path)


def keys(s3, store):
    contents = s3.client.list_objects_v2(Bucket=store.place.bucket).get("Contents", [])
    return sorted(entry["Key"] for entry in contents)


def test_names_lie_under_the_prefix(s3, store):
    store.put(DATA)
    assert keys(s3, store) == [f"mobizo/one/objects/{SHA[:2]}/{SHA}"]
    other = BucketArtifacts(s3.place(bucket=store.place.bucket, prefix="mobizo/two"), store._scratch)
    assert list(other.listing()) == []
    bare = BucketArtifacts(s3.place(prefix=""), store._scratch)
    bare.put(DATA)
    assert keys(s3, bare) == [f"objects/{SHA[:2]}/{SHA}"]
    assert [file.sha256 for file in bare.listing()] == [SHA]


def test_a_large_file_goes_in_parts(s3, store):
    data = b"0123456789abcdef" * (PART_BYTES // 16) * 2 + b"rest"
    with store.workspace("w") as workspace:
        (workspace / "f").write_bytes(data)
        store.adopt(workspace / "f", sha256_hex(data))
    tag = s3.client.head_object(Bucket=store.place.bucket, Key=keys(s3, store)[0])["ETag"]
    assert tag.endswith('-3"')  # S3's mark of a file that came in three parts


def test_a_signed_address_needs_no_key(s3, store):
    store.put(DATA)
    url = store.signed_url(SHA, 60)
    assert SECRET not in url
    assert httpx.get(url).content == DATA
    part = httpx.get(url, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, DATA[10:20])


def test_a_signed_address_names_the_service_as_devices_reach_it(s3, tmp_path):
    store = BucketArtifacts(s3.place(public_endpoint="https://files.example.org"), tmp_path)
    store.put(DATA)
    assert store.signed_url(SHA, 60).startswith(f"https://files.example.org/{store.place.bucket}/mobizo/one/objects/")


def test_no_service(tmp_path):
    place = BucketPlace("files", endpoint="http://127.0.0.1:9", access_key_id=KEY_ID, secret_access_key=SECRET)
    store = BucketArtifacts(BucketPlace(**{**vars(place), "allow_http": True}), tmp_path)
    for ask in (
        lambda: store.put(DATA),
        lambda: store.size(SHA),
        store.check_writable,
        lambda: list(store.listing()),
    ):
        with pytest.raises(Unavailable, match="object store") as error_info:
            ask()
        assert SECRET not in str(error_info.value)
        assert "\n" not in error_info.value.detail


def test_no_bucket(s3, tmp_path):
    store = BucketArtifacts(s3.place(bucket="no-such-bucket-here"), tmp_path)
    for ask in (lambda: store.put(DATA), store.check_writable):
        with pytest.raises(Unavailable, match="bucket does not exist"):
            ask()


def test_nothing_tells_the_secret(s3, store):
    assert SECRET not in repr(store.place)
