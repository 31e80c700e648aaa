"""Errors of scoring and generating, in addition to those of every route. All are answered with status 503.

MobizoError
`- Unavailable
   |- ScorerOff
   |- ScorerBusy
   |- ScorerStopped
   |- ScorerLate
   |- BaseNotServed
   `- ScorerFull
"""

from __future__ import annotations

from shared.errors import Unavailable


class ScorerOff(Unavailable, title="Scoring is off"):
    """This server does not score or generate; its operator can set MOBIZO_SCORER."""


class ScorerBusy(Unavailable):
    """Too many texts wait to be scored already; wait as long as Retry-After says."""


class ScorerStopped(Unavailable):
    """The scorer ended before it had answered; it is started again, so try again."""


class ScorerLate(Unavailable):
    """The scorer did not answer in time; try again later, or ask for less at once."""


class BaseNotServed(Unavailable, title="Base model not served"):
    """The server cannot read this base model's files; the server's log has the reason for its operator."""


class ScorerFull(Unavailable):
    """This does not fit the scorer's memory; the operator can give it more."""
