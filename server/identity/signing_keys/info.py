"""The public server information that a device pins when it enrolls."""

from __future__ import annotations

from importlib.metadata import version

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shared.protocol import ServerInfo
from shared.signing import key_id, public_text


def server_info(key: Ed25519PublicKey) -> ServerInfo:
    """Version, and the key that devices pin."""
    return ServerInfo(version=version("mobizo"), public_key=public_text(key), key_id=key_id(key))
