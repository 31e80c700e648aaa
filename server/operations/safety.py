"""Detects unsafe settings: tokens sent without TLS, trusted proxies that anyone can impersonate, guessable secrets."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url

from server.settings import Delivery, Settings
from server.storage.opening import is_loopback
from shared.errors import BadRequest

# Common default secrets of examples, images and tutorials, which attackers try first.
GUESSED = frozenset(
    {
        *("admin", "change-me", "changeme", "default", "example", "guest", "letmein", "pass", "password", "root"),
        *("minio", "minioadmin", "mobizo", "postgres", "secret", "seaweedfs", "test", "testing", "user"),
        *("1234", "12345", "123456", "12345678"),
    }
)


class Unsafe(BadRequest, title="Unsafe setting"):
    """These settings are unsafe; change them, or use --insecure-dev for development."""


@dataclass(frozen=True)
class Tls:
    """Certificate chain and private key, PEM."""

    certificate: Path
    key: Path


def dangers(settings: Settings, tls: Tls | None) -> Iterator[str]:
    """Yields one sentence for each unsafe setting, with the remedy."""
    if not is_loopback(settings.host) and tls is None:
        yield (
            f"host {settings.host} is reachable from other machines, and tokens would be sent without encryption: use "
            "--tls-cert and --tls-key, or listen on 127.0.0.1 behind a TLS proxy"
        )
    if settings.forwarded_allow_ips and _everyone(settings.forwarded_allow_ips):
        yield "MOBIZO_FORWARDED_ALLOW_IPS trusts every client address: set it to the addresses of the proxies"
    if settings.delivery is Delivery.ACCEL and not is_loopback(settings.host) and not settings.forwarded_allow_ips:
        yield (
            "MOBIZO_DELIVERY=accel returns file locations for nginx, and clients can bypass nginx: listen on "
            "127.0.0.1, or set MOBIZO_FORWARDED_ALLOW_IPS to the address of nginx"
        )
    yield from _secrets(settings)


def _everyone(allowed: str) -> bool:
    for part in allowed.split(","):
        if part.strip() == "*" or ipaddress.ip_network(part.strip(), strict=False).prefixlen == 0:
            return True
    return False


def _secrets(settings: Settings) -> Iterator[str]:
    url = make_url(settings.url)
    # None does not mean an empty password: the driver reads it from a file, or the server trusts its local socket.
    if url.password is not None and _guessed(str(url.password), url.username):
        yield "the password in MOBIZO_DATABASE_URL is empty or a common default: set another password"
    key = settings.storage_secret_access_key
    name = settings.storage_access_key_id
    if key is not None and _guessed(key.get_secret_value(), name.get_secret_value() if name else None):
        yield "MOBIZO_STORAGE_SECRET_ACCESS_KEY is empty or a common default: set another secret"


def _guessed(secret: str, name: str | None) -> bool:
    return not secret.strip() or secret.lower() in GUESSED or secret == name


def check_safe(settings: Settings, tls: Tls | None, insecure: bool) -> list[str]:
    """Returns the descriptions of unsafe settings if `insecure` allows them. Raises Unsafe otherwise."""
    unsafe = list(dangers(settings, tls))
    if unsafe and not insecure:
        raise Unsafe("; ".join(unsafe) + ". --insecure-dev allows these settings, for development only")
    return unsafe
