"""The typed client of the server's API for app backends, put together from its nouns."""

from __future__ import annotations

from mobizo.access import Access
from mobizo.cohorts import Cohorts
from mobizo.history import Histories
from mobizo.jobs import Event, Jobs
from mobizo.privacy import Privacy
from mobizo.scoring import Scoring

__all__ = ["Client", "Event"]


class Client(Jobs, Histories, Scoring, Cohorts, Privacy, Access):
    """One server, seen by one token: jobs, adapters, scoring, cohorts, and who may do what.

    Synchronous; use one in a thread. Every method raises shared.errors.MobizoError with what the server said.
    """
