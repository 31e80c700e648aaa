"""Builds the API representations of cohorts, members, rounds and updates."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from server.database.columns import view_of
from server.federation.models import Cohort, CohortMember, CohortRound, MemberUpdate
from server.federation.repository import CohortRepository
from server.federation.round_repository import Figures, RoundRepository
from server.registry.repository import AdapterRepository
from shared.federation.cohort import CohortView, MemberView, RoundView, UpdateView


class CohortViews:
    """Builds views in one transaction."""

    def __init__(self, session: Session) -> None:
        self._cohorts, self._rounds = CohortRepository(session), RoundRepository(session)
        self._adapters = AdapterRepository(session)

    def cohort(self, cohort: Cohort) -> CohortView:
        """Returns the view of one cohort."""
        return self.cohorts([cohort])[0]

    def cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortView]:
        """Returns the views of cohorts with their latest rounds."""
        members, latest = self._cohorts.count_members(cohorts), self._rounds.latest(cohorts)
        cohorts_by_number = {cohort.number: cohort for cohort in cohorts}
        rounds = list(latest.values())
        figures = self._rounds.figures(rounds)
        views = {
            each.cohort_number: _round(cohorts_by_number[each.cohort_number], each, figures.get(each.number))
            for each in rounds
        }
        return [self._view(cohort, members.get(cohort.number, 0), views.get(cohort.number)) for cohort in cohorts]

    def _view(self, cohort: Cohort, members: int, latest: RoundView | None) -> CohortView:
        adapter = self._adapters.get(cohort.tenant, cohort.name)
        version = None if adapter is None or adapter.deleted_at is not None else adapter.main_version
        return view_of(CohortView, cohort, members=members, round=latest, version=version)

    def members(self, members: Sequence[CohortMember]) -> list[MemberView]:
        """Returns the views of members with their numbers of accepted updates."""
        updates = self._cohorts.count_updates(members)
        return [view_of(MemberView, member, updates=updates.get(member.number, 0)) for member in members]

    def rounds(self, cohort: Cohort, rounds: Sequence[CohortRound]) -> list[RoundView]:
        """Returns the views of rounds of one cohort."""
        figures = self._rounds.figures(rounds)
        return [_round(cohort, each, figures.get(each.number)) for each in rounds]

    def round(self, cohort: Cohort, cohort_round: CohortRound) -> RoundView:
        """Returns the view of one round."""
        return self.rounds(cohort, [cohort_round])[0]

    def updates(self, parts: Sequence[MemberUpdate]) -> list[UpdateView]:
        """Returns the views of members' parts in a round."""
        return [
            view_of(
                UpdateView,
                part,
                user=part.member.user,
                device_id=part.member.device_id,
                job_id=None if part.job is None else part.job.id,
                bytes=part.sent_bytes,
            )
            for part in parts
        ]


def _round(cohort: Cohort, cohort_round: CohortRound, figures: Figures | None) -> RoundView:
    figures = figures or Figures()
    return view_of(
        RoundView,
        cohort_round,
        cohort=cohort.name,
        number=cohort_round.position,
        start_version=None if cohort_round.start is None else cohort_round.start.version,
        start_accuracy=figures.start_accuracy,
        tuned_accuracy=figures.tuned_accuracy,
        measured=figures.measured,
        upload_bytes=figures.upload_bytes,
    )
