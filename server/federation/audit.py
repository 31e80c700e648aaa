"""Records events of a cohort in the audit trail of its adapter."""

from __future__ import annotations

import structlog
from sqlalchemy.orm import Session

from server.federation.models import Cohort
from server.registry.models import Actor, AuditEntry, AuditTrail
from server.registry.repository import AdapterRepository
from shared.registry import AdapterAction

_log = structlog.get_logger()


def record(session: Session, cohort: Cohort, actor: Actor, action: AdapterAction, reason: str) -> None:
    """Adds a line to the audit trail and to the log. After the adapter is purged, only the log records events."""
    adapter = AdapterRepository(session).get(cohort.tenant, cohort.name)
    if adapter is not None:
        AuditTrail(session).add(adapter, actor, AuditEntry(action, reason=reason))
    _log.info(f"cohort-{action}", tenant=cohort.tenant, cohort=cohort.name, reason=reason)
