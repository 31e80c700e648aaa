"""The routes for cohorts, their members and their rounds."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request, Response

from server.federation.privacy.cohorts import cohort_privacy
from server.federation.privacy.service import resolve_privacy
from server.federation.repository import CohortRepository
from server.federation.round_repository import RoundRepository
from server.federation.rounds import RoundService
from server.federation.service import CohortService, request_of_member
from server.federation.views import CohortViews
from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.jobs.accounting import accounted
from server.registry.models import Actor
from server.web.idempotency import Once
from server.web.openapi import Responses, raises
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import Reading, State, Writing
from shared.access import Role, Scope
from shared.errors import (
    AdapterNotFound,
    BudgetExceeded,
    CohortNotFound,
    Conflict,
    DeviceNotBound,
    Forbidden,
    InvalidRecipe,
    InvalidTask,
    NotFound,
    QuotaExceeded,
    RoundNotFound,
    UnknownBase,
    VersionHeld,
)
from shared.federation.accounting import exact_epsilon_of, known_answer
from shared.federation.cohort import CohortSettings, CohortView, MemberRequest, MemberView, RoundView, UpdateView
from shared.job import NAME
from shared.privacy import CohortPrivacy
from shared.protocol import Page

router = Routes(prefix="/v1/cohorts", tags=["cohorts"])
Reader = Annotated[Principal, needs(Scope.COHORTS_READ)]
Writer = Annotated[Principal, needs(Scope.COHORTS_WRITE)]
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]
User = Annotated[str, Path(pattern=NAME)]
LOCATION: Responses = {
    201: {"headers": {"Location": {"description": "URL of the created resource", "schema": {"type": "string"}}}}
}
ABSENT = raises(CohortNotFound)


async def _prepare(principal: Writer, settings: CohortSettings, connection: Request) -> None:
    """Accounts for the privacy of a member's job before the transaction begins, which then finds it in the cache."""
    if settings.privacy is not None:
        await accounted(
            connection, principal.tenant, lambda: resolve_privacy(request_of_member(settings), known_answer)
        )


Prepared = Annotated[None, Depends(_prepare)]


@router.post(
    "",
    status_code=201,
    responses=LOCATION | raises(UnknownBase, InvalidTask, InvalidRecipe, BudgetExceeded, Conflict, QuotaExceeded),
)
def create_cohort(
    principal: Writer,
    settings: CohortSettings,
    response: Response,
    state: State,
    prepared: Prepared,
    session: Writing,
    once: Once,
) -> CohortView:
    """Creates a cohort and its shared adapter, which has no version yet. The settings cannot be changed later."""
    cohort = CohortService(session, state.artifacts).create(principal.tenant, settings, Actor.of(principal))
    response.headers["Location"] = f"/v1/cohorts/{cohort.name}"
    return CohortViews(session).cohort(cohort)


@router.get("")
def list_cohorts(principal: Reader, session: Reading, paging: Paging) -> Page[CohortView]:
    """Lists the tenant's cohorts, newest first."""
    page_rows = CohortRepository(session).page(principal.tenant, paging)
    return paging.page(CohortViews(session).cohorts(page_rows.rows), page_rows.before)


@router.get("/{cohort_name}", responses=ABSENT)
def get_cohort(principal: Reader, cohort_name: str, session: Reading) -> CohortView:
    """Returns a cohort with its latest round."""
    return CohortViews(session).cohort(CohortRepository(session).find(principal.tenant, cohort_name))


@router.get("/{cohort_name}/privacy", responses=ABSENT)
async def get_cohort_privacy(principal: Reader, cohort_name: str, state: State, connection: Request) -> CohortPrivacy:
    """Returns the privacy budget that the published rounds have spent, for members and for their examples."""

    def read() -> CohortPrivacy:
        with state.database.reading() as session:
            cohort = CohortRepository(session).find(principal.tenant, cohort_name)
            published = RoundRepository(session).published_since(cohort, 0)
            return cohort_privacy(session, principal.tenant, cohort.settings, published, exact_epsilon_of)

    return await accounted(connection, principal.tenant, read)


@router.get("/{cohort_name}/members", responses=ABSENT)
def list_members(principal: Reader, cohort_name: str, session: Reading, paging: Paging) -> Page[MemberView]:
    """Lists the members of a cohort, newest first."""
    cohort = CohortRepository(session).find(principal.tenant, cohort_name)
    page_rows = CohortRepository(session).members_page(cohort, paging)
    return paging.page(CohortViews(session).members(page_rows.rows), page_rows.before)


@router.put("/{cohort_name}/members/{user}", responses=raises(CohortNotFound, NotFound, DeviceNotBound, Conflict))
def join_cohort(
    principal: Writer, cohort_name: str, user: User, member: MemberRequest, state: State, session: Writing
) -> MemberView:
    """Adds a user with the device that trains for the user, or changes the device. Idempotent.

    If the cohort's membership is `operator`, an operator token is required.
    """
    service = CohortService(session, state.artifacts)
    cohort = CohortRepository(session).find(principal.tenant, cohort_name, lock=True)
    if cohort.settings.membership == "operator" and principal.role is not Role.OPERATOR:
        raise Forbidden(f"only operators can add users to cohort {cohort.name!r}")
    joined = service.join(cohort, user, member, Actor.of(principal))
    return CohortViews(session).members([joined])[0]


@router.delete("/{cohort_name}/members/{user}", status_code=204, responses=raises(CohortNotFound, NotFound))
def leave_cohort(principal: Writer, cohort_name: str, user: User, state: State, session: Writing) -> None:
    """Removes a user. The user's updates to rounds that have not ended are discarded. Idempotent."""
    cohort = CohortRepository(session).find(principal.tenant, cohort_name, lock=True)
    CohortService(session, state.artifacts).leave(cohort, user, Actor.of(principal))


@router.get("/{cohort_name}/rounds", responses=ABSENT)
def list_rounds(principal: Reader, cohort_name: str, session: Reading, paging: Paging) -> Page[RoundView]:
    """Lists the rounds of a cohort, newest first."""
    cohort = CohortRepository(session).find(principal.tenant, cohort_name)
    page_rows = RoundRepository(session).page(cohort, paging)
    return paging.page(CohortViews(session).rounds(cohort, page_rows.rows), page_rows.before)


@router.post(
    "/{cohort_name}/rounds",
    status_code=201,
    responses=LOCATION | raises(CohortNotFound, AdapterNotFound, Conflict, VersionHeld, BudgetExceeded),
)
def open_round(
    principal: Writer, cohort_name: str, response: Response, state: State, session: Writing, once: Once
) -> RoundView:
    """Opens a round: each member's device is asked to train from `main` of the cohort's adapter."""
    cohort = CohortRepository(session).find(principal.tenant, cohort_name, lock=True)
    opened = RoundService(session).open(cohort, state.artifacts, Actor.of(principal))
    response.headers["Location"] = f"/v1/cohorts/{cohort.name}/rounds/{opened.position}"
    return CohortViews(session).round(cohort, opened)


@router.get("/{cohort_name}/rounds/{number}", responses=raises(CohortNotFound, RoundNotFound))
def get_round(principal: Reader, cohort_name: str, number: Number, session: Reading) -> RoundView:
    """Returns a round."""
    cohort = CohortRepository(session).find(principal.tenant, cohort_name)
    return CohortViews(session).round(cohort, RoundService(session).get(cohort, number))


@router.post("/{cohort_name}/rounds/{number}/close", responses=raises(CohortNotFound, RoundNotFound))
def close_round(principal: Writer, cohort_name: str, number: Number, session: Writing) -> RoundView:
    """Closes a round now: it is aggregated if the quorum is reached and abandoned otherwise. Idempotent.

    No further round opens automatically.
    """
    cohort = CohortRepository(session).find(principal.tenant, cohort_name, lock=True)
    rounds = RoundService(session)
    closed = rounds.get(cohort, number)
    rounds.close(cohort, closed, Actor.of(principal))
    return CohortViews(session).round(cohort, closed)


@router.get("/{cohort_name}/rounds/{number}/updates", responses=raises(CohortNotFound, RoundNotFound))
def list_updates(
    principal: Reader, cohort_name: str, number: Number, session: Reading, paging: Paging
) -> Page[UpdateView]:
    """Lists each member's part in a round, newest first, without the contents of the updates."""
    cohort = CohortRepository(session).find(principal.tenant, cohort_name)
    parts = RoundRepository(session).parts_page(RoundService(session).get(cohort, number), paging)
    return paging.page(CohortViews(session).updates(parts.rows), parts.before)
