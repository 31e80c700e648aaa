"""Routes of cohorts: making them, who is in them, their rounds."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Response

from server.adapters.audit import Actor
from server.auth.guard import needs
from server.auth.models import Role, Scope
from server.auth.service import Principal
from server.cohorts.repository import CohortRepository
from server.cohorts.round_repository import RoundRepository
from server.cohorts.rounds import RoundService
from server.cohorts.service import CohortService
from server.cohorts.views import CohortViews
from server.http.idempotency import Once
from server.http.openapi import Responses, raises
from server.http.pages import Paging
from server.http.place import Here, Reading, Writing
from server.http.routes import Routes
from server.privacy.cohorts import cohort_privacy
from shared.cohort import CohortSettings, CohortView, MemberRequest, MemberView, RoundView, UpdateView
from shared.errors import (
    AdapterNotFound,
    BudgetExceeded,
    CohortNotFound,
    Conflict,
    Forbidden,
    InvalidRecipe,
    InvalidTask,
    NotFound,
    RoundNotFound,
    UnknownBase,
    VersionHeld,
)
from shared.job import NAME
from shared.privacy import CohortPrivacy
from shared.protocol import Page

router = Routes(prefix="/v1/cohorts", tags=["cohorts"])
Reader = Annotated[Principal, needs(Scope.COHORTS_READ)]
Writer = Annotated[Principal, needs(Scope.COHORTS_WRITE)]
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]
User = Annotated[str, Path(pattern=NAME)]
LOCATION: Responses = {201: {"headers": {"Location": {"description": "its address", "schema": {"type": "string"}}}}}
ABSENT = raises(CohortNotFound)


@router.post(
    "", status_code=201, responses=LOCATION | raises(UnknownBase, InvalidTask, InvalidRecipe, BudgetExceeded, Conflict)
)
def create(
    principal: Writer, settings: CohortSettings, response: Response, here: Here, session: Writing, once: Once
) -> CohortView:
    """Makes a cohort, whose settings stay as they are, and its shared adapter, which has no version yet."""
    cohort = CohortService(session, here.artifacts).create(principal.tenant, settings, Actor.of(principal))
    response.headers["Location"] = f"/v1/cohorts/{cohort.name}"
    return CohortViews(session).cohort(cohort)


@router.get("")
def cohorts(principal: Reader, session: Reading, paging: Paging) -> Page[CohortView]:
    """The tenant's cohorts, newest first."""
    found = CohortRepository(session).page(principal.tenant, paging)
    return paging.page(CohortViews(session).cohorts(found.rows), found.before)


@router.get("/{cohort_name}", responses=ABSENT)
def cohort(principal: Reader, cohort_name: str, here: Here, session: Reading) -> CohortView:
    """One cohort with its latest round."""
    return CohortViews(session).cohort(CohortService(session, here.artifacts).get(principal.tenant, cohort_name))


@router.get("/{cohort_name}/privacy", responses=ABSENT)
def privacy(principal: Reader, cohort_name: str, here: Here, session: Reading) -> CohortPrivacy:
    """What its published rounds have spent on its members, and on the examples of their users."""
    found = CohortService(session, here.artifacts).get(principal.tenant, cohort_name)
    published = RoundRepository(session).published_since(found, 0)
    return cohort_privacy(session, principal.tenant, found.settings, published)


@router.get("/{cohort_name}/members", responses=ABSENT)
def members(principal: Reader, cohort_name: str, here: Here, session: Reading, paging: Paging) -> Page[MemberView]:
    """Who is in it, newest first."""
    cohort = CohortService(session, here.artifacts).get(principal.tenant, cohort_name)
    found = CohortRepository(session).members_page(cohort, paging)
    return paging.page(CohortViews(session).members(found.rows), found.before)


@router.put("/{cohort_name}/members/{user}", responses=raises(CohortNotFound, NotFound, Conflict))
def join(
    principal: Writer, cohort_name: str, user: User, member: MemberRequest, here: Here, session: Writing
) -> MemberView:
    """A user joins with the device that trains for him, or takes another device; joining twice is fine.

    Where membership is `operator`, it takes an operator's token.
    """
    service = CohortService(session, here.artifacts)
    cohort = service.get(principal.tenant, cohort_name, lock=True)
    if cohort.settings.membership == "operator" and principal.role is not Role.OPERATOR:
        raise Forbidden(f"only operators let users into cohort {cohort.name!r}")
    joined = service.join(cohort, user, member, Actor.of(principal))
    return CohortViews(session).members([joined])[0]


@router.delete("/{cohort_name}/members/{user}", status_code=204, responses=raises(CohortNotFound, NotFound))
def leave(principal: Writer, cohort_name: str, user: User, here: Here, session: Writing) -> None:
    """A user leaves; what he sent to a round that has not ended does not count. Leaving twice is fine."""
    service = CohortService(session, here.artifacts)
    service.leave(service.get(principal.tenant, cohort_name, lock=True), user, Actor.of(principal))


@router.get("/{cohort_name}/rounds", responses=ABSENT)
def rounds(principal: Reader, cohort_name: str, here: Here, session: Reading, paging: Paging) -> Page[RoundView]:
    """Its rounds, newest first."""
    cohort = CohortService(session, here.artifacts).get(principal.tenant, cohort_name)
    found = RoundRepository(session).page(cohort, paging)
    return paging.page(CohortViews(session).rounds(cohort, found.rows), found.before)


@router.post(
    "/{cohort_name}/rounds",
    status_code=201,
    responses=LOCATION | raises(CohortNotFound, AdapterNotFound, Conflict, VersionHeld, BudgetExceeded),
)
def open_round(
    principal: Writer, cohort_name: str, response: Response, here: Here, session: Writing, once: Once
) -> RoundView:
    """Opens a round: each member's device is asked for an update of what is `main` of the cohort's adapter."""
    cohort = CohortService(session, here.artifacts).get(principal.tenant, cohort_name, lock=True)
    opened = RoundService(session).open(cohort, here.artifacts, Actor.of(principal))
    response.headers["Location"] = f"/v1/cohorts/{cohort.name}/rounds/{opened.position}"
    return CohortViews(session).round(cohort, opened)


@router.get("/{cohort_name}/rounds/{number}", responses=raises(CohortNotFound, RoundNotFound))
def one_round(principal: Reader, cohort_name: str, number: Number, here: Here, session: Reading) -> RoundView:
    """One round as it stands."""
    cohort = CohortService(session, here.artifacts).get(principal.tenant, cohort_name)
    return CohortViews(session).round(cohort, RoundService(session).get(cohort, number))


@router.post("/{cohort_name}/rounds/{number}/close", responses=raises(CohortNotFound, RoundNotFound))
def close_round(principal: Writer, cohort_name: str, number: Number, here: Here, session: Writing) -> RoundView:
    """Ends a round now: its version is made if its quorum is there, else it is abandoned. No other opens by itself.

    Closing twice is fine.
    """
    cohort = CohortService(session, here.artifacts).get(principal.tenant, cohort_name, lock=True)
    rounds = RoundService(session)
    closed = rounds.get(cohort, number)
    rounds.close(cohort, closed, Actor.of(principal))
    return CohortViews(session).round(cohort, closed)


@router.get("/{cohort_name}/rounds/{number}/updates", responses=raises(CohortNotFound, RoundNotFound))
def updates(
    principal: Reader, cohort_name: str, number: Number, here: Here, session: Reading, paging: Paging
) -> Page[UpdateView]:
    """Each member's part in a round, newest first; never what he sent."""
    cohort = CohortService(session, here.artifacts).get(principal.tenant, cohort_name)
    parts = RoundRepository(session).parts_page(RoundService(session).get(cohort, number), paging)
    return paging.page(CohortViews(session).updates(parts.rows), parts.before)
