"""`client.server`: the server's version, signing keys and memory use."""

from __future__ import annotations

from mobizo.connection import Resource
from shared.key_rotation import ServerKeys
from shared.protocol import ServerInfo, ServerUsage


class Server(Resource):
    """Facts about the server itself."""

    def info(self) -> ServerInfo:
        """Returns the server's version and its public signing key."""
        return self._connection.get(ServerInfo, "/v1/server")

    def keys(self) -> ServerKeys:
        """Returns the current signing key and the signed statements by which older keys name it."""
        return self._connection.server_keys()

    def usage(self) -> ServerUsage:
        """Returns the peak resident memory of the server's processes since they started, in bytes.

        Requires an operator's token. Raises Forbidden.
        """
        return self._connection.get(ServerUsage, "/v1/server/usage")
