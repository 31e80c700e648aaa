"""The Python client of a mobizo server: submit personalization jobs, watch them, download and use adapters."""

from mobizo.client import Client
from mobizo.curve import Curve, CurvePoint
from mobizo.downloads import Format
from mobizo.pinned_keys import PinnedKeys
from mobizo.resources.jobs import Event
from shared.errors import MobizoError
from shared.job import JobRequest, JobState, JobSummary, JobView
from shared.registry import AdapterManifest, ApprovalRule, VersionState
from shared.scoring import ScoreRequest, ScoreResult

__all__ = [
    "AdapterManifest",
    "ApprovalRule",
    "Client",
    "Curve",
    "CurvePoint",
    "Event",
    "Format",
    "JobRequest",
    "JobState",
    "JobSummary",
    "JobView",
    "MobizoError",
    "PinnedKeys",
    "ScoreRequest",
    "ScoreResult",
    "VersionState",
]
