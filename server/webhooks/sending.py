"""Sends one message of a webhook: the addresses that it may reach, its signature, and the request.

Headers and signature are those of Standard Webhooks 1.0. A name is resolved once for each attempt, its addresses are
checked, and the connection goes to the checked address, so a second answer of the name server changes nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from server.database.columns import utc_now
from shared.errors import BadRequest, MobizoError
from shared.transport import post_pinned

SECONDS = 10.0  # of one attempt, from connecting to the status line
SECRET_PREFIX = "whsec_"  # noqa: S105  # the form of secrets, not one of them
_NAT64 = IPv6Network("64:ff9b::/96")  # IPv6 addresses that lead to the IPv4 address in their last 32 bits


class WebhookAddressRefused(BadRequest, status=422):
    """The URL leads to an address that webhooks may not reach; use https and a public address."""


@dataclass(frozen=True)
class Attempt:
    """The outcome of one attempt. status: of the response. error: why it failed; None: the receiver accepted it."""

    status: int | None
    error: str | None


def check_url(url: str, networks: str) -> None:
    """Raises WebhookAddressRefused as `resolve`, but looks up no name: that is done when a message is sent."""
    with suppress(socket.gaierror):
        resolve(url, networks, socket.AI_NUMERICHOST)


def resolve(url: str, networks: str, flags: int = 0) -> str:
    """Returns the address to connect to. Raises WebhookAddressRefused if any address of the host is refused.

    networks: private networks that the operator allows. flags: of getaddrinfo, which raises gaierror for names.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise WebhookAddressRefused(f"the URL cannot be read ({error})") from error
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise WebhookAddressRefused("the URL must have the form https://HOST/PATH, without a user")
    if parts.scheme == "http" and not networks:
        raise WebhookAddressRefused("a webhook needs https")
    if host == "localhost" or host.endswith(".localhost"):
        host = "127.0.0.1"
    # As bytes, because a text is first encoded as an international name, which fails in other ways.
    found = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM, flags=flags)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        _check(parts.scheme, address, networks)
    return addresses[0]


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Returns the value of the header `webhook-signature`."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    digest = hmac.new(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def send(url: str, networks: str, secret: str, message_id: str, body: bytes) -> Attempt:
    """Sends a message once. Raises nothing; a receiver that does not answer in time is a failed attempt."""
    now = int(utc_now().timestamp())
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "mobizo",
        "webhook-id": message_id,
        "webhook-timestamp": str(now),
        "webhook-signature": signature(secret, message_id, now, body),
    }
    try:
        status = post_pinned(url, resolve(url, networks), headers, body, SECONDS)
    except MobizoError as error:
        return Attempt(None, error.detail)
    except socket.gaierror as error:
        return Attempt(None, f"the name of the host cannot be resolved ({error.strerror})")
    if 200 <= status < 300:
        return Attempt(status, None)
    return Attempt(status, f"the receiver answered {status}{'; redirects are not followed' * (300 <= status < 400)}")


def _check(scheme: str, text: str, networks: str) -> None:
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        nat64 = ip_address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        address = address.ipv4_mapped or address.sixtofour or nat64 or address
    if any(part == "*" or address in ip_network(part, strict=False) for part in networks.split(",") if part):
        return
    if not address.is_global or address.is_multicast or address.is_reserved:
        # Without the address: a tenant must not look up names of the operator's network.
        raise WebhookAddressRefused(
            "the host is, or has, an address that is not public; the operator of the server can allow its network by "
            "MOBIZO_WEBHOOK_NETWORKS"
        )
    if scheme == "http":
        raise WebhookAddressRefused("a webhook to a public address needs https")
