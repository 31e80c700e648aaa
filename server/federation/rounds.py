"""The life cycle of rounds: opening, submitting jobs, ending.

A synchronous round asks every current member when it opens, and ends when all members have answered or at its deadline.
An asynchronous round ends when its buffer is full; unfinished members continue and count in the next round. A round
below its quorum produces no version. The caller of every method holds the lock on the cohort's row.
"""

from __future__ import annotations

from datetime import timedelta

import structlog
from sqlalchemy.orm import Session

from server.catalog.bases import BaseModelEntry, BaseRepository
from server.database.columns import new_id, utc_now
from server.federation.member_recipes import MemberRecipes, part_request
from server.federation.models import AGGREGATE, Cohort, CohortMember, CohortRound, MemberUpdate
from server.federation.privacy.cohorts import check_next_round
from server.federation.repository import CohortRepository, record
from server.federation.round_repository import RoundRepository
from server.federation.secure_aggregation.service import SecureAggregationProgress
from server.jobs.leases.repository import LeaseRepository
from server.jobs.service import JobLifecycle, JobService
from server.registry.models import SERVER, Actor, Adapter, StoredVersion
from server.registry.repository import AdapterRepository, find_adapter, find_version
from server.registry.warm_start import parent_of
from server.storage.store import ArtifactStore
from server.tasks.requests import request_task
from shared.errors import (
    BaseMismatch,
    BudgetExceeded,
    Conflict,
    DeviceNotBound,
    MobizoError,
    NotFound,
    RoundNotFound,
    UnknownBase,
    VersionHeld,
)
from shared.federation.algorithms import algorithm_of
from shared.federation.cohort import RoundState, UpdateState
from shared.federation.secure_aggregation.fixed_point import vector_bytes
from shared.federation.secure_aggregation.messages import Phase
from shared.job import JobState, RoundRef
from shared.registry import MAIN, AdapterAction, VersionState

_log = structlog.get_logger()
BATCH = 50  # jobs submitted in one transaction; other writers run between two transactions


class RoundService:
    """Manages the rounds of cohorts in one writing transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._cohorts, self._rounds = CohortRepository(session), RoundRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._secure_aggregation = SecureAggregationProgress(session)

    def get(self, cohort: Cohort, position: int) -> CohortRound:
        """Returns a round of a cohort. Raises RoundNotFound."""
        cohort_round = self._rounds.at(cohort, position)
        if cohort_round is None:
            raise RoundNotFound(f"cohort {cohort.name!r} has no round {position}")
        return cohort_round

    def open(self, cohort: Cohort, artifacts: ArtifactStore, actor: Actor = SERVER) -> CohortRound:
        """Opens a round that starts from `main` of the cohort's adapter, and submits its first jobs.

        Raises Conflict if a round is in progress, the maximum number of rounds is reached, or there are too few
        members; BudgetExceeded if the round would exceed the members' privacy budget; VersionHeld if the latest version
        waits for approval; AdapterNotFound if the adapter was deleted.
        """
        self._check_may_open(cohort)
        cohort_round = self._begin(cohort)
        self._enlist(cohort_round)
        self._note_opened(cohort, cohort_round, actor)
        self.issue(cohort, artifacts)
        return cohort_round

    def may_open(self, cohort: Cohort) -> bool:
        """Returns whether `open` would succeed now. Changes nothing."""
        try:
            self._check_may_open(cohort)
        except MobizoError:
            return False
        return True

    def _check_may_open(self, cohort: Cohort) -> None:
        settings = cohort.settings
        if cohort.busy:
            position = self._rounds.under_way(cohort)[0].position
            raise Conflict(f"round {position} of cohort {cohort.name!r} has not ended", round=position)
        if settings.most_rounds is not None and cohort.rounds >= settings.most_rounds:
            raise Conflict(f"cohort {cohort.name!r} has reached its maximum of {cohort.rounds} rounds")
        members = self._cohorts.count_members([cohort]).get(cohort.number, 0)
        if settings.masking is not None and members > settings.masking.most_members:
            raise Conflict(
                f"cohort {cohort.name!r} has {members} members, and its masked rounds allow at most "
                f"{settings.masking.most_members}; create a cohort with a larger masking.most_members",
                members=members,
            )
        if members < settings.quorum:
            raise Conflict(
                f"cohort {cohort.name!r} has {members} members, and a round needs {settings.quorum}; add members",
                members=members,
                quorum=settings.quorum,
            )
        check_next_round(settings, self._rounds.published_since(cohort, 0))
        adapter = find_adapter(self._session, cohort.tenant, cohort.name)
        if version := self.held_version(adapter):
            raise VersionHeld(
                f"version {version} of {cohort.name!r} waits for approval; approve it before the next round"
            )

    def held_version(self, adapter: Adapter) -> int | None:
        """Returns the latest version of a cohort's adapter if it waits for approval, otherwise None."""
        latest = AdapterRepository(self._session).latest([adapter]).get(adapter.number)
        return latest.version if latest is not None and latest.state is VersionState.HELD else None

    def head(self, cohort: Cohort) -> StoredVersion | None:
        """Returns `main`, or None if no version was approved. Raises AdapterNotFound or RevisionNotFound."""
        adapter = find_adapter(self._session, cohort.tenant, cohort.name)
        return None if adapter.main_version is None else find_version(self._session, adapter, MAIN)

    def _begin(self, cohort: Cohort) -> CohortRound:
        now, start, settings = utc_now(), self.head(cohort), cohort.settings
        cohort.rounds += 1
        cohort.busy = True
        cohort.opens = settings.automatic and (settings.most_rounds is None or cohort.rounds < settings.most_rounds)
        cohort_round = CohortRound(
            id=new_id("round"),
            cohort_number=cohort.number,
            position=cohort.rounds,
            state=RoundState.OPEN,
            why="",
            start=None if start is None else parent_of(start),
            start_sha256=None if start is None else start.sha256,
            members=0,
            updates=0,
            opened_at=now,
            deadline=now + timedelta(seconds=settings.deadline_seconds),
        )
        self._rounds.add(cohort_round)
        return cohort_round

    def _note_opened(self, cohort: Cohort, cohort_round: CohortRound, actor: Actor) -> None:
        deadline = f"{cohort_round.deadline:%Y-%m-%d %H:%M:%S} UTC"
        text = f"round {cohort_round.position}: {cohort_round.members} members, until {deadline}"
        record(self._session, cohort, actor, AdapterAction.ROUND_OPENED, text)

    def enlist(self, cohort: Cohort) -> None:
        """Adds members who joined since to the open round, if it is asynchronous."""
        cohort_round = self._rounds.open(cohort)
        if cohort_round is not None and cohort.settings.algorithm.asynchronous:
            self._enlist(cohort_round)

    def _enlist(self, cohort_round: CohortRound) -> None:
        parts = [
            MemberUpdate(
                round_number=cohort_round.number,
                member_number=member.number,
                state=UpdateState.WAITING,
                updated_at=utc_now(),
            )
            for member in self._cohorts.unlisted(cohort_round)
        ]
        self._rounds.add(*parts)
        cohort_round.members += len(parts)

    def issue(self, cohort: Cohort, artifacts: ArtifactStore) -> None:
        """Submits up to `BATCH` of the open round's missing jobs; the periodic sweep submits the rest.

        The round is abandoned if its starting version or its base model is gone.
        """
        cohort_round = self._rounds.open(cohort)
        parts = [] if cohort_round is None else self._rounds.without_job(cohort_round, BATCH)
        if cohort_round is None or not parts or self.holds_back(cohort):
            return
        try:
            base = BaseRepository(self._session).get(cohort.settings.base)
            _check_base(cohort, base)
            start = self.start_of(cohort, cohort_round)
            parent = None if start is None else parent_of(start)
            recipes = MemberRecipes(self._session, artifacts, cohort, base, parent)
            for part in parts:
                self._submit(JobService(self._session, artifacts), cohort, part, recipes, start)
        except (NotFound, UnknownBase, BaseMismatch) as error:
            self.abandon(cohort, cohort_round, error.detail)
        self._session.flush()

    def _submit(
        self, jobs: JobService, cohort: Cohort, part: MemberUpdate, recipes: MemberRecipes, start: StoredVersion | None
    ) -> None:
        """Submits the job of a part. The part fails if the device may not train it or a privacy budget is spent."""
        reference = RoundRef(cohort=cohort.name, number=part.round.position)
        request, resolved = recipes.resolve(part_request(cohort, part, start))
        try:
            job = jobs.submit_part(cohort.tenant, request, resolved, reference)
        except (NotFound, DeviceNotBound, BudgetExceeded) as error:
            _log.info("member-not-asked", cohort=cohort.name, user=part.member.user, detail=error.detail)
            part.state, part.updated_at = UpdateState.FAILED, utc_now()
            return
        part.job = job
        part.start_version = None if start is None else start.version
        part.start_sha256 = None if start is None else start.sha256

    def holds_back(self, cohort: Cohort) -> bool:
        """Returns whether an asynchronous round must wait for its starting version to be aggregated or approved.

        A synchronous round has its starting version before it opens.
        """
        if not cohort.settings.algorithm.asynchronous:
            return False
        aggregating = any(
            cohort_round.state is RoundState.AGGREGATING for cohort_round in self._rounds.under_way(cohort)
        )
        return aggregating or self.waits_for_approval(cohort)

    def waits_for_approval(self, cohort: Cohort) -> bool:
        """Returns whether the latest version of the cohort's adapter waits for approval."""
        adapter = AdapterRepository(self._session).get(cohort.tenant, cohort.name)
        return adapter is not None and self.held_version(adapter) is not None

    def start_of(self, cohort: Cohort, cohort_round: CohortRound, *, deleted: bool = False) -> StoredVersion | None:
        """Returns the starting version: the current `main` if asynchronous, the round's own start otherwise.

        deleted: the round's own start may be a deleted version. Raises AdapterNotFound or RevisionNotFound.
        """
        if cohort.settings.algorithm.asynchronous:
            return self.head(cohort)
        if cohort_round.start is None:
            return None
        adapter = find_adapter(self._session, cohort.tenant, cohort.name)
        return find_version(self._session, adapter, cohort_round.start.revision, deleted=deleted)

    def end_if_due(self, cohort: Cohort) -> None:
        """Ends the open round if all members have answered, the buffer is full, or the deadline has passed."""
        cohort_round = self._rounds.open(cohort)
        if cohort_round is None:
            return
        for part in self._rounds.ended_badly(cohort_round):
            part.state, part.updated_at = UpdateState.FAILED, utc_now()
        self._session.flush()
        if cohort.settings.masking is not None:
            self._end_masked_if_due(cohort, cohort_round)
            return
        waiting = self._rounds.count(cohort_round, UpdateState.WAITING)
        server = algorithm_of(cohort.settings.algorithm).server
        late = utc_now() >= cohort_round.deadline
        if not late and not server.is_complete(cohort_round.updates, cohort_round.updates + waiting):
            return
        self._end(cohort, cohort_round, "at the deadline" if late else "when all members had answered")

    def _end_masked_if_due(self, cohort: Cohort, cohort_round: CohortRound) -> None:
        """Ends a masked round once its phases are complete or have failed. Each phase has its own deadline."""
        masked = self._secure_aggregation.advance(cohort_round)
        if masked is None:
            if utc_now() >= cohort_round.deadline or not self._rounds.count(cohort_round, UpdateState.WAITING):
                self._end(cohort, cohort_round, "at the deadline")
        elif masked.phase is Phase.FAILED:
            self.abandon(cohort, cohort_round, masked.why or "its masks could not be removed")
        elif masked.phase is Phase.SUMMING:
            summed = self._secure_aggregation.summed(masked)
            for state in (UpdateState.WAITING, UpdateState.FAILED):
                for part in self._rounds.parts(cohort_round, state):
                    if part.job_number in summed:
                        part.state, part.updated_at = UpdateState.COUNTED, utc_now()
                        part.sha256 = summed[part.job_number]
                        part.sent_bytes = vector_bytes(masked.parameters)
            cohort_round.updates = len(summed)
            self._end(cohort, cohort_round, "when the masks were removed")

    def close(self, cohort: Cohort, cohort_round: CohortRound, actor: Actor) -> None:
        """Ends a round early on request. No further round opens automatically. Idempotent."""
        cohort.opens = False
        if cohort_round.state is RoundState.OPEN:
            record(self._session, cohort, actor, AdapterAction.ROUND_CLOSED, f"round {cohort_round.position}")
            self._end(cohort, cohort_round, "when it was closed")

    def _end(self, cohort: Cohort, cohort_round: CohortRound, when: str) -> None:
        quorum = cohort.settings.quorum
        if cohort_round.updates < quorum:
            self.abandon(
                cohort, cohort_round, f"{cohort_round.updates} updates had arrived {when}; the quorum is {quorum}"
            )
            return
        cohort_round.state = RoundState.AGGREGATING
        self._session.flush()
        if cohort.settings.algorithm.asynchronous and cohort.opens:
            self._open_following(cohort, cohort_round)
        self._cancel_waiting(cohort_round)
        self._aggregate_next(cohort)

    def _open_following(self, cohort: Cohort, cohort_round: CohortRound) -> None:
        """Opens the next asynchronous round, which accepts updates while the previous round is aggregated."""
        try:
            following = self._begin(cohort)
        except NotFound:  # the adapter was deleted
            return
        following.members = self._rounds.carry(cohort_round, following)
        cohort_round.members -= following.members
        self._enlist(following)
        self._note_opened(cohort, following, SERVER)

    def abandon(self, cohort: Cohort, cohort_round: CohortRound, why: str) -> None:
        """Ends a round without a version and discards its updates."""
        cohort_round.state, cohort_round.why, cohort_round.ended_at = RoundState.ABANDONED, why, utc_now()
        self._cancel_waiting(cohort_round)
        self.ended(cohort, cohort_round)
        record(self._session, cohort, SERVER, AdapterAction.ROUND_ABANDONED, f"round {cohort_round.position}: {why}")

    def ended(self, cohort: Cohort, cohort_round: CohortRound) -> None:
        """Releases the files of a round that has ended, and starts the next aggregation."""
        self._session.flush()
        self._rounds.forget_files(cohort_round)
        self._secure_aggregation.finish(cohort_round, cohort_round.why or None)
        cohort.busy = bool(self._rounds.under_way(cohort))
        self._aggregate_next(cohort)

    def _aggregate_next(self, cohort: Cohort) -> None:
        """Requests the aggregation of the first waiting round: the versions of a cohort are produced in order."""
        for cohort_round in self._rounds.under_way(cohort):
            if cohort_round.state is RoundState.AGGREGATING:
                request_task(self._session, AGGREGATE, cohort_round.id, cohort.tenant)
                return

    def _cancel_waiting(self, cohort_round: CohortRound) -> None:
        """Cancels the jobs of the round's waiting parts."""
        for part in self._rounds.parts(cohort_round, UpdateState.WAITING):
            self._stop(part, UpdateState.MISSED)

    def drop(self, cohort: Cohort, member: CohortMember) -> None:
        """Discards a member's parts in rounds that have not ended."""
        for part in self._rounds.under_way_of(member):
            if part.state is UpdateState.COUNTED and cohort.settings.masking is not None:
                continue  # a single update cannot be removed from a masked sum
            if part.state is UpdateState.COUNTED:
                part.round.updates -= 1
                part.sha256 = part.start_sha256 = None
            self._stop(part, UpdateState.LEFT)
            if part.round.state is RoundState.AGGREGATING and part.round.updates < cohort.settings.quorum:
                self.abandon(cohort, part.round, "a member left, and fewer updates than the quorum remained")
        self._session.flush()
        self.end_if_due(cohort)

    def _stop(self, part: MemberUpdate, state: UpdateState) -> None:
        part.state, part.updated_at = state, utc_now()
        if part.job is not None and not part.job.state.final:
            self._lifecycle.move(part.job, JobState.CANCELLED)
            LeaseRepository(self._session).cancel(part.job.number, utc_now())


def _check_base(cohort: Cohort, base: BaseModelEntry) -> None:
    if base.sha256 != cohort.recipe.base.sha256:
        raise BaseMismatch(
            f"{base.name!r} is now registered as the base model {base.sha256[:12]}...; cohort {cohort.name!r} was "
            f"created with {cohort.recipe.base.sha256[:12]}..."
        )
