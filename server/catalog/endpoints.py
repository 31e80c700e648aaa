"""The routes of base models and calibrations, which are the same for every tenant: they contain only public data."""

from __future__ import annotations

from typing import Annotated

from server.catalog.bases import BaseRepository
from server.catalog.calibrations.service import CalibrationRepository
from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import Reading
from shared.access import Scope
from shared.catalog import BaseView, CalibrationView
from shared.protocol import Page

router = Routes(prefix="/v1")
Reader = Annotated[Principal, needs(Scope.JOBS_READ)]


@router.get("/bases", tags=["bases"])
def list_bases(principal: Reader, session: Reading) -> list[BaseView]:
    """Lists the base models that jobs may use, by name."""
    return [base.view() for base in BaseRepository(session).all()]


@router.get("/calibrations", tags=["calibrations"])
def list_calibrations(principal: Reader, session: Reading, paging: Paging) -> Page[CalibrationView]:
    """Lists calibrations, newest first. `recipe.calibration` of a job is the sha256 of one."""
    repository = CalibrationRepository(session)
    page_rows = repository.page(paging)
    return paging.page(repository.views(page_rows.rows), page_rows.before)
