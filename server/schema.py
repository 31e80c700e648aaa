"""Every table of the server, in one import: `METADATA` is complete once this module is imported."""

from __future__ import annotations

from server.catalog import bases
from server.catalog.calibrations import models as calibrations
from server.catalog.runner_builds import models as runner_builds
from server.database.columns import Table
from server.federation import models as cohorts
from server.federation.privacy import models as privacy
from server.federation.secure_aggregation import models as masking
from server.identity import models as auth
from server.identity.devices import models as devices
from server.identity.signing_keys import models as signing_keys
from server.jobs import models as jobs
from server.jobs.leases import models as leases
from server.jobs.scheduling import models as queue
from server.programs import models as programs
from server.registry import models as adapters
from server.registry.adapter_grants import models as adapter_grants
from server.registry.exports import models as formats
from server.registry.trajectories import models as trajectories
from server.storage import references as artifacts
from server.tasks import models as tasks
from server.web import idempotency_record as idempotency

__all__ = [
    "METADATA",
    "adapter_grants",
    "adapters",
    "artifacts",
    "auth",
    "bases",
    "calibrations",
    "cohorts",
    "devices",
    "formats",
    "idempotency",
    "jobs",
    "leases",
    "masking",
    "privacy",
    "programs",
    "queue",
    "runner_builds",
    "signing_keys",
    "tasks",
    "trajectories",
]

METADATA = Table.metadata
