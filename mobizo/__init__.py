"""The client: submit personalization jobs, watch them, pull the adapters they make, and put them to use."""

from mobizo.client import Client, Event
from mobizo.pins import Pins
from mobizo.pulling import Format
from shared.errors import MobizoError
from shared.job import JobRequest, JobState, JobView
from shared.registry import AdapterManifest, ApprovalRule, VersionState
from shared.scoring import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult

__all__ = [
    "AdapterManifest",
    "ApprovalRule",
    "Client",
    "Event",
    "Format",
    "GenerateRequest",
    "GenerateResult",
    "JobRequest",
    "JobState",
    "JobView",
    "MobizoError",
    "Pins",
    "ScoreRequest",
    "ScoreResult",
    "VersionState",
]
