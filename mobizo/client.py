"""The typed client of the server's REST API, for app backends and operators."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from mobizo.connection import Connection
from mobizo.pinned_keys import PinnedKeys
from mobizo.resources.adapters import Adapters
from mobizo.resources.approval_rules import ApprovalRules
from mobizo.resources.bases import Bases
from mobizo.resources.cohorts import Cohorts
from mobizo.resources.devices import Devices
from mobizo.resources.jobs import Jobs
from mobizo.resources.privacy import Privacy
from mobizo.resources.programs import Programs
from mobizo.resources.scoring import Scoring
from mobizo.resources.server import Server
from mobizo.resources.tokens import Tokens
from mobizo.resources.trajectories import Trajectories


class Client:
    """A client of one server with one token. Each attribute is one part of the API, such as `client.jobs`.

    The client is synchronous; use one client per thread. All methods act within the token's tenant and raise
    `shared.errors.MobizoError`: the error that the server reported, or Unreachable if the server does not answer.
    """

    def __init__(self, base_url: str, token: str, *, pinned_keys: PinnedKeys | None = None) -> None:
        """base_url: address of the server, such as http://127.0.0.1:8000. token: token of an app or an operator.

        pinned_keys: the trusted signing keys of servers. By default the client trusts the first key that the server
        shows, and forgets it when the client is closed. Raises Unreachable if `base_url` is not a URL.
        """
        self._connection = Connection(base_url, token, pinned_keys or PinnedKeys())
        self.base_url = self._connection.base_url
        self.adapters = Adapters(self._connection)
        self.approval_rules = ApprovalRules(self._connection)
        self.bases = Bases(self._connection)
        self.cohorts = Cohorts(self._connection)
        self.devices = Devices(self._connection)
        self.jobs = Jobs(self._connection)
        self.privacy = Privacy(self._connection)
        self.programs = Programs(self._connection)
        self.scoring = Scoring(self._connection)
        self.server = Server(self._connection)
        self.tokens = Tokens(self._connection)
        self.trajectories = Trajectories(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection to the server."""
        self._connection.close()
