"""The page on which a person confirms the code of a program that logs in, such as `mobizo login`."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from server.dashboard.access import FORM_BODY, Fields, signed_in
from server.dashboard.double_submit import Once
from server.dashboard.pages import page, redirect
from server.dashboard.routes import PageRoutes
from server.dashboard.sessions import Visitor
from server.identity.logins.endpoints import PAGE
from server.identity.logins.service import LoginService
from server.identity.oauth import read_user_code
from server.identity.tokens import TOKEN_DAYS
from server.web.state import Reading, State, Writing
from shared.access import Scope
from shared.errors import BadRequest, NotFound

router = PageRoutes()
Maker = Annotated[Visitor, signed_in(Scope.TOKENS_WRITE)]
GRANT = "grant:"  # begins the names of the scopes' fields
DECISIONS = {"approve": "login-approved", "deny": "login-denied"}


@router.get(PAGE)
def activate(
    request: Request,
    visitor: Maker,
    state: State,
    session: Reading,
    user_code: Annotated[str, Query(max_length=40)] = "",
) -> Response:
    """The program that shows a code, and what confirming the code grants."""
    login_request, problem = None, None
    if user_code:
        try:
            login_request = LoginService(session).find(visitor.principal, user_code)
        except NotFound as error:
            problem = error.detail
    return page(
        request,
        visitor,
        "activate.html",
        "Confirm a login",
        404 if problem else 200,
        login_request=login_request,
        problem=problem,
        user_code=user_code,
        days=TOKEN_DAYS,
        path=PAGE,
        grant=GRANT,
    )


@router.post(PAGE, openapi_extra=FORM_BODY)
def decide(visitor: Maker, form: Fields, state: State, session: Writing, once: Once) -> Response:
    """Grants or refuses a login, as POST /v1/login-requests/CODE/approve and /deny do."""
    decision = form.get("decision", "")
    if decision not in DECISIONS or read_user_code(form.get("user_code", "")) is None:
        raise BadRequest("the form has no code or no decision; go back and choose again")
    scopes = [scope for scope in Scope if f"{GRANT}{scope}" in form]
    service = LoginService(session)
    service.decide(visitor.principal, form["user_code"], approved=decision == "approve", scopes=scopes)
    return redirect(PAGE, DECISIONS[decision])
