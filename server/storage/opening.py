"""Opens the store that the settings name."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

from pydantic import SecretStr

from server.settings import Delivery, Settings
from server.storage.bucket import BucketArtifacts, BucketPlace
from server.storage.directory import DiskArtifacts
from server.storage.store import ArtifactStore
from shared.errors import BadRequest


class BadStorage(BadRequest, title="Bad storage settings"):
    """The settings of the storage contradict each other."""


def open_artifacts(settings: Settings) -> ArtifactStore:
    """Returns the store of MOBIZO_STORAGE_URL: a directory in the home, or `s3://bucket/prefix`.

    Raises BadStorage for an unknown URL, for a bucket that would be accessed without TLS over a network, and for a
    delivery that the store does not support.
    """
    store = _open(settings)
    if settings.delivery is Delivery.ACCEL and not isinstance(store, DiskArtifacts):
        raise BadStorage("MOBIZO_DELIVERY=accel serves files of a local directory; use `redirect` for a bucket")
    if settings.delivery is Delivery.REDIRECT and not isinstance(store, BucketArtifacts):
        raise BadStorage("MOBIZO_DELIVERY=redirect needs a bucket, MOBIZO_STORAGE_URL=s3://BUCKET; see also `accel`")
    return store


def _open(settings: Settings) -> ArtifactStore:
    if settings.storage_url is None:
        return DiskArtifacts(settings.artifacts_path)
    url = urlsplit(settings.storage_url)
    scratch = settings.artifacts_path / "staging"
    if url.scheme != "s3" or not url.hostname or url.username or url.query or url.fragment:
        raise BadStorage(f"MOBIZO_STORAGE_URL={settings.storage_url!r} is not s3://BUCKET/PREFIX")
    endpoint = settings.storage_endpoint or os.environ.get("AWS_ENDPOINT_URL")
    endpoints = (endpoint, settings.storage_public_endpoint)
    clear = [each for each in endpoints if each and urlsplit(each).scheme != "https"]
    if any(urlsplit(each).scheme != "http" for each in clear):
        raise BadStorage(f"the storage's endpoint is a URL such as https://s3.example.org, not {clear[0]!r}")
    if not settings.storage_allow_http and not all(is_loopback(urlsplit(each).hostname) for each in clear):
        raise BadStorage(
            f"{clear[0]} does not use TLS: set an https URL, or MOBIZO_STORAGE_ALLOW_HTTP=true on a network that you "
            "trust"
        )
    place = BucketPlace(
        bucket=url.netloc,
        prefix=url.path.strip("/"),
        endpoint=endpoint,
        public_endpoint=settings.storage_public_endpoint,
        access_key_id=_revealed(settings.storage_access_key_id),
        secret_access_key=_revealed(settings.storage_secret_access_key),
        allow_http=bool(clear),
    )
    return BucketArtifacts(place, scratch)


def _revealed(setting: SecretStr | None) -> str | None:
    return setting.get_secret_value() if setting else None


def is_loopback(host: str | None) -> bool:
    """Returns whether `host` is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
