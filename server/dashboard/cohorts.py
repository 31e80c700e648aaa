"""Pages of cohorts: rounds, participation, bytes, and the privacy that was spent."""

from __future__ import annotations

from typing import Annotated

from fastapi import Response

from server.dashboard.access import Fields, signed_in
from server.dashboard.devices import device_names
from server.dashboard.pages import Visitor, redirect
from server.dashboard.routes import PageRoutes
from server.database.paging import PageRequest
from server.federation.endpoints import Number
from server.federation.privacy.cohorts import cohort_privacy
from server.federation.repository import CohortRepository
from server.federation.round_repository import RoundRepository
from server.federation.rounds import RoundService
from server.federation.views import CohortViews
from server.registry.models import Actor
from server.web.pages import Paging
from server.web.state import Reading, State, Writing
from shared.access import Scope

router = PageRoutes(prefix="/ui/cohorts")
Reader = Annotated[Visitor, signed_in(Scope.COHORTS_READ)]
Writer = Annotated[Visitor, signed_in(Scope.COHORTS_WRITE)]
MEMBERS = 50  # of a cohort's page, newest first


@router.get("")
def cohorts(visitor: Reader, session: Reading, paging: Paging) -> Response:
    """The tenant's cohorts, newest first, each with its latest round."""
    rows = CohortRepository(session).page(visitor.principal.tenant, paging)
    listing = paging.page(CohortViews(session).cohorts(rows.rows), rows.before)
    return visitor.page("cohorts.html", "Cohorts", listing=listing)


@router.get("/{cohort_name}")
def cohort(visitor: Reader, cohort_name: str, session: Reading, paging: Paging) -> Response:
    """A cohort: its rounds, members, and privacy."""
    tenant = visitor.principal.tenant
    stored = CohortRepository(session).find(tenant, cohort_name)
    views, rounds = CohortViews(session), RoundRepository(session)
    rows = rounds.page(stored, paging)
    members = CohortRepository(session).members_page(stored, PageRequest(None, MEMBERS))
    privacy = None
    if stored.settings.privacy is not None:
        privacy = cohort_privacy(session, tenant, stored.settings, rounds.published_since(stored, 0))
    return visitor.page(
        "cohort.html",
        f"Cohort {cohort_name}",
        cohort=views.cohort(stored),
        listing=paging.page(views.rounds(stored, rows.rows), rows.before),
        members=views.members(members.rows),
        names=device_names(session, visitor, [member.device_id for member in members.rows]),
        more_members=members.before is not None,
        privacy=privacy,
        settings_json=stored.settings.model_dump_json(indent=2, exclude_defaults=True),
    )


@router.get("/{cohort_name}/rounds/{number}")
def one_round(visitor: Reader, cohort_name: str, number: Number, session: Reading, paging: Paging) -> Response:
    """A round: each member's part."""
    stored = CohortRepository(session).find(visitor.principal.tenant, cohort_name)
    cohort_round = RoundService(session).get(stored, number)
    views = CohortViews(session)
    parts = RoundRepository(session).parts_page(cohort_round, paging)
    return visitor.page(
        "round.html",
        f"Round {number} of cohort {cohort_name}",
        round=views.round(stored, cohort_round),
        listing=paging.page(views.updates(parts.rows), parts.before),
    )


@router.post("/{cohort_name}/rounds")
def open_round(visitor: Writer, form: Fields, cohort_name: str, state: State, session: Writing) -> Response:
    """Opens a round, as POST /v1/cohorts/NAME/rounds does."""
    stored = CohortRepository(session).find(visitor.principal.tenant, cohort_name, lock=True)
    RoundService(session).open(stored, state.artifacts, Actor.of(visitor.principal))
    return redirect(f"/ui/cohorts/{stored.name}", "round-opened")


@router.post("/{cohort_name}/rounds/{number}/close")
def close_round(visitor: Writer, form: Fields, cohort_name: str, number: Number, session: Writing) -> Response:
    """Closes a round, as POST /v1/cohorts/NAME/rounds/NUMBER/close does."""
    stored = CohortRepository(session).find(visitor.principal.tenant, cohort_name, lock=True)
    rounds = RoundService(session)
    rounds.close(stored, rounds.get(stored, number), Actor.of(visitor.principal))
    return redirect(f"/ui/cohorts/{stored.name}/rounds/{number}", "round-closed")
