"""Every table of the server, in one import: `METADATA` is complete once this module is imported."""

from __future__ import annotations

from server.catalog import bases
from server.catalog.calibrations import service as calibrations
from server.dashboard import sessions
from server.database.columns import Table
from server.federation import models as cohorts
from server.federation.privacy import repository as privacy
from server.federation.secure_aggregation import models as secure_aggregation
from server.identity import audit, tenants, tokens
from server.identity.devices import authorization
from server.identity.devices import repository as devices
from server.identity.devices import service as enrollment
from server.identity.logins import service as logins
from server.identity.signing_keys import service as signing_keys
from server.jobs import repository as jobs
from server.jobs.leases import repository as leases
from server.jobs.scheduling import repository as queue
from server.programs import service as programs
from server.registry import models as adapters
from server.registry.adapter_grants import service as adapter_grants
from server.registry.trajectories import service as trajectories
from server.storage import store as artifacts
from server.tasks import repository as tasks
from server.tasks import sweeps
from server.web import idempotency_record as idempotency

__all__ = [
    "METADATA",
    "adapter_grants",
    "adapters",
    "artifacts",
    "audit",
    "authorization",
    "bases",
    "calibrations",
    "cohorts",
    "devices",
    "enrollment",
    "idempotency",
    "jobs",
    "leases",
    "logins",
    "privacy",
    "programs",
    "queue",
    "secure_aggregation",
    "sessions",
    "signing_keys",
    "sweeps",
    "tasks",
    "tenants",
    "tokens",
    "trajectories",
]

METADATA = Table.metadata
