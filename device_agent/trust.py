"""Following the server's signing key when it hands over to another: link by link, or not at all.

Knows no program: what is signed is checked elsewhere, by the key that this leaves pinned.
"""

from __future__ import annotations

import structlog

from device_agent.client import DeviceClient
from device_agent.state import DeviceConfig, Home
from shared.errors import NotFound, Untrusted
from shared.succession import follow

_log = structlog.get_logger()


def follow_server(home: Home, config: DeviceConfig, client: DeviceClient, key_id: str) -> DeviceConfig:
    """What this device trusts after a look at who signs now; as before if the chain of keys does not hold.

    key_id: of the key that something was signed with; the server is asked only if it is not the pinned one's. Raises
    MobizoError if the server does not answer.
    """
    if key_id == config.key_id:
        return config
    try:
        path = follow(config.public_key, client.server_keys())
    except (Untrusted, NotFound) as error:
        # Whatever is signed with that key is refused by who looks at it, in words of its own.
        _log.warning("the server's key has changed and is not trusted", key_id=key_id, detail=error.detail)
        return config
    if not path:
        return config
    config = home.pin(config.public_key, path)
    _log.info("the server's key handed over to another, which is trusted now", key_id=config.key_id)
    return config
