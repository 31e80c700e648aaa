"""What a server would be unsafe with: tokens in clear, proxies that anyone can play, secrets that anyone can guess.

Knows no routes; opens nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url

from server.settings import Delivery, Settings
from shared.errors import BadRequest

# What examples, images and tutorials call a secret, and what is tried first.
GUESSED = frozenset(
    {
        *(
            "admin",
            "change-me",
            "changeme",
            "default",
            "example",
            "guest",
            "letmein",
            "pass",
            "password",
            "root",
            "user",
        ),
        *("minio", "minioadmin", "mobizo", "postgres", "secret", "seaweedfs", "test", "testing"),
        *("1234", "12345", "123456", "12345678"),
    }
)


class Unsafe(BadRequest):
    """These settings would let others read or pretend; --insecure-dev goes on all the same."""

    code, title = "unsafe", "Unsafe setting"


@dataclass(frozen=True)
class Tls:
    """Certificate chain and private key, PEM."""

    certificate: Path
    key: Path


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def dangers(settings: Settings, tls: Tls | None) -> Iterator[str]:
    """Everything unsafe, and what to do about it, one sentence each."""
    if not is_loopback(settings.host) and tls is None:
        yield (
            f"host {settings.host} is reachable from other machines, and tokens would travel in clear: give --tls-cert "
            "and --tls-key, or listen on 127.0.0.1 behind a proxy that speaks TLS"
        )
    if settings.forwarded_allow_ips and _everyone(settings.forwarded_allow_ips):
        yield ("MOBIZO_FORWARDED_ALLOW_IPS lets anybody say whose request it is: name the proxies' addresses")
    if settings.delivery is Delivery.ACCEL and not is_loopback(settings.host) and not settings.forwarded_allow_ips:
        yield (
            "MOBIZO_DELIVERY=accel answers with where files lie instead of the files, for nginx to send, and others "
            "than nginx can ask: listen on 127.0.0.1, or name nginx's address in MOBIZO_FORWARDED_ALLOW_IPS"
        )
    yield from _secrets(settings)


def _everyone(allowed: str) -> bool:
    for part in allowed.split(","):
        if part.strip() == "*" or ipaddress.ip_network(part.strip(), strict=False).prefixlen == 0:
            return True
    return False


def _secrets(settings: Settings) -> Iterator[str]:
    url = make_url(settings.url)
    # None is no empty one: the driver then takes it from its own file, or the server trusts its own socket.
    if url.password is not None and _guessed(str(url.password), url.username):
        yield "the password in MOBIZO_DATABASE_URL is empty or one that is tried first: give the database another"
    key = settings.storage_secret_access_key
    name = settings.storage_access_key_id
    if key is not None and _guessed(key.get_secret_value(), name.get_secret_value() if name else None):
        yield "MOBIZO_STORAGE_SECRET_ACCESS_KEY is empty or one that is tried first: give the store another"


def _guessed(secret: str, name: str | None) -> bool:
    return not secret.strip() or secret.lower() in GUESSED or secret == name


def check_safe(settings: Settings, tls: Tls | None, insecure: bool) -> list[str]:
    """What is unsafe, where that is allowed. Raises Unsafe where it is not."""
    found = list(dangers(settings, tls))
    if found and not insecure:
        raise Unsafe(
            "; ".join(found) + ". --insecure-dev goes on all the same, for a network and data that do not matter"
        )
    return found
