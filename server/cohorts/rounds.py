"""Rounds: opened, filled, ended. Knows no HTTP, and not how a version is made of updates.

A synchronous round asks all who are members when it opens, and ends when all have answered, or at its deadline. An
asynchronous one ends with the buffer's last update; whoever was not ready goes on, and counts in the next. Below quorum
a round makes no version. Every method takes the cohort with its row locked.
"""

from __future__ import annotations

from datetime import timedelta

import structlog
from sqlalchemy.orm import Session

from server.adapters.audit import SERVER, Actor
from server.adapters.models import Adapter, StoredVersion
from server.adapters.repository import AdapterRepository
from server.adapters.resolution import find_adapter, find_version
from server.artifacts.store import ArtifactStore
from server.bases.models import BaseModelEntry
from server.bases.service import BaseService
from server.clock import utc_now
from server.cohorts.asking import part_request
from server.cohorts.models import Cohort, CohortMember, CohortRound, MemberUpdate
from server.cohorts.repository import CohortRepository
from server.cohorts.round_repository import Part, RoundRepository
from server.cohorts.trail import note
from server.identity import new_id
from server.jobs.lifecycle import JobLifecycle
from server.jobs.service import JobService, Making
from server.jobs.starts import parent_of
from server.leases.repository import LeaseRepository
from server.masking.progress import MaskingProgress
from server.privacy.cohorts import check_next_round
from server.programs.announcement import note_wanted
from shared.cohort import RoundState, UpdateState
from shared.errors import (
    BaseMismatch,
    BudgetExceeded,
    Conflict,
    MobizoError,
    NotFound,
    RoundNotFound,
    UnknownBase,
    VersionHeld,
)
from shared.federation.algorithms import find
from shared.job import JobState, RoundRef
from shared.masking.fixed_point import vector_bytes
from shared.masking.messages import Phase
from shared.registry import MAIN, AdapterAction, VersionState

_log = structlog.get_logger()
BATCH = 50  # jobs made in one transaction: others write between two


class RoundService:
    """Rounds of cohorts in one writing transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._cohorts, self._rounds = CohortRepository(session), RoundRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._masking = MaskingProgress(session)

    def get(self, cohort: Cohort, position: int) -> CohortRound:
        """A round of a cohort. Raises RoundNotFound."""
        found = self._rounds.at(cohort, position)
        if found is None:
            raise RoundNotFound(f"cohort {cohort.name!r} has no round {position}")
        return found

    def open(self, cohort: Cohort, artifacts: ArtifactStore, actor: Actor = SERVER) -> CohortRound:
        """A new round, from what is `main` of the cohort's adapter; its first jobs are made.

        Raises Conflict if one is under way, if there were enough, or if there are too few members; BudgetExceeded if it
        would cost its members more privacy than the cohort may; VersionHeld if the
        latest version waits for approval; AdapterNotFound if the adapter was deleted.
        """
        self._check_may_open(cohort)
        found = self._begin(cohort)
        self._enlist(found)
        self._tell_opened(cohort, found, actor)
        self.issue(cohort, artifacts)
        return found

    def may_open(self, cohort: Cohort) -> bool:
        """Whether `open` would open one now; changes nothing."""
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
            raise Conflict(f"cohort {cohort.name!r} has had {cohort.rounds} rounds, the most that it may")
        members = self._cohorts.count_members([cohort]).get(cohort.number, 0)
        if settings.masking is not None and members > settings.masking.most_members:
            raise Conflict(
                f"cohort {cohort.name!r} has {members} members, and its masked rounds have room for "
                f"{settings.masking.most_members}; make another cohort with more masking.most_members",
                members=members,
            )
        if members < settings.quorum:
            raise Conflict(
                f"cohort {cohort.name!r} has {members} members, and a round needs {settings.quorum}; let more join",
                members=members,
                quorum=settings.quorum,
            )
        check_next_round(settings, self._rounds.published_since(cohort, 0))
        adapter = find_adapter(self._session, cohort.tenant, cohort.name)
        if held := self.held(adapter):
            raise VersionHeld(
                f"version {held} of {cohort.name!r}, which the next round starts from, waits for approval"
            )

    def held(self, adapter: Adapter) -> int | None:
        """The latest version of a cohort's adapter, if it waits for a person."""
        latest = AdapterRepository(self._session).latest([adapter]).get(adapter.number)
        return latest.version if latest is not None and latest.state is VersionState.HELD else None

    def head(self, cohort: Cohort) -> StoredVersion | None:
        """What `main` is; None: no version was approved. Raises AdapterNotFound or RevisionNotFound."""
        adapter = find_adapter(self._session, cohort.tenant, cohort.name)
        return None if adapter.main_version is None else find_version(self._session, adapter, MAIN)

    def _begin(self, cohort: Cohort) -> CohortRound:
        now, start, settings = utc_now(), self.head(cohort), cohort.settings
        cohort.rounds += 1
        cohort.busy = True
        cohort.opens = settings.automatic and (settings.most_rounds is None or cohort.rounds < settings.most_rounds)
        found = CohortRound(
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
            attempts=0,
        )
        self._rounds.add(found)
        return found

    def _tell_opened(self, cohort: Cohort, found: CohortRound, actor: Actor) -> None:
        told = f"round {found.position}: {found.members} members, until {found.deadline:%Y-%m-%d %H:%M:%S} UTC"
        note(self._session, cohort, actor, AdapterAction.ROUND_OPENED, told)

    def enlist(self, cohort: Cohort) -> None:
        """Who joined since takes part in the open round, if it takes updates of any start."""
        found = self._rounds.open(cohort)
        if found is not None and cohort.settings.algorithm.asynchronous:
            self._enlist(found)

    def _enlist(self, found: CohortRound) -> None:
        parts = [
            MemberUpdate(
                round_number=found.number,
                member_number=member.number,
                state=UpdateState.WAITING,
                updated_at=utc_now(),
            )
            for member in self._cohorts.unlisted(found)
        ]
        self._rounds.add(*parts)
        found.members += len(parts)

    def issue(self, cohort: Cohort, artifacts: ArtifactStore) -> None:
        """Makes some of the jobs that the open round lacks; the worker makes the others.

        A round whose jobs cannot be made, since its start or the base model is gone, is abandoned.
        """
        found = self._rounds.open(cohort)
        parts = [] if found is None else self._rounds.without_job(found, BATCH)
        if found is None or not parts or self.holds_back(cohort):
            return
        try:
            base = BaseService(self._session, artifacts).named(cohort.settings.base)
            _check_base(cohort, base)
            making = Making(base, cohort.task, cohort.recipe, self._start_of(cohort, found))
            for part in parts:
                self._ask(JobService(self._session, artifacts), cohort, part, making)
        except (NotFound, UnknownBase, BaseMismatch) as error:
            self.abandon(cohort, found, error.detail)
        self._session.flush()

    def _ask(self, jobs: JobService, cohort: Cohort, part: Part, making: Making) -> None:
        """Makes the job of a member's part; one whose device was revoked, or who has no privacy to spend, has none."""
        update, start = part.update, making.start
        request, reference = part_request(cohort, part, start), RoundRef(cohort=cohort.name, number=part.round.position)
        try:
            job = jobs.submit_part(cohort.tenant, request, making, reference)
        except (NotFound, BudgetExceeded) as error:
            _log.info("member-not-asked", cohort=cohort.name, user=part.member.user, detail=error.detail)
            update.state, update.updated_at = UpdateState.FAILED, utc_now()
            return
        update.job_number = job.number
        update.start_version = None if start is None else start.version
        update.start_sha256 = None if start is None else start.sha256

    def holds_back(self, cohort: Cohort) -> bool:
        """Whether an open round makes no jobs for now: what they will start from is being made, or is to be approved.

        A synchronous round has its start before it opens.
        """
        if not cohort.settings.algorithm.asynchronous:
            return False
        making = any(found.state is RoundState.AGGREGATING for found in self._rounds.under_way(cohort))
        return making or self.waits_for_approval(cohort)

    def waits_for_approval(self, cohort: Cohort) -> bool:
        """Whether the latest version of the cohort's adapter waits for a person."""
        adapter = AdapterRepository(self._session).get(cohort.tenant, cohort.name)
        return adapter is not None and self.held(adapter) is not None

    def _start_of(self, cohort: Cohort, found: CohortRound) -> StoredVersion | None:
        """What jobs that are made now begin from: of a synchronous round, all from one version."""
        if cohort.settings.algorithm.asynchronous:
            return self.head(cohort)
        if found.start is None:
            return None
        adapter = find_adapter(self._session, cohort.tenant, cohort.name)
        return find_version(self._session, adapter, found.start.revision)

    def settle(self, cohort: Cohort) -> None:
        """Ends the open round if it is time: all have answered, the buffer is full, or the deadline is over."""
        found = self._rounds.open(cohort)
        if found is None:
            return
        for part in self._rounds.ended_badly(found):
            part.state, part.updated_at = UpdateState.FAILED, utc_now()
        self._session.flush()
        if cohort.settings.masking is not None:
            self._settle_masked(cohort, found)
            return
        waiting = self._rounds.count(found, UpdateState.WAITING)
        server = find(cohort.settings.algorithm).server
        late = utc_now() >= found.deadline
        if not late and not server.full(found.updates, found.updates + waiting):
            return
        self._end(cohort, found, "at the deadline" if late else "when all had answered")

    def _settle_masked(self, cohort: Cohort, found: CohortRound) -> None:
        """Ends a masked round once its devices have said all, or cannot: its phases have their own deadlines."""
        masked = self._masking.advance(found)
        if masked is None:
            if utc_now() >= found.deadline or not self._rounds.count(found, UpdateState.WAITING):
                self._end(cohort, found, "at its end")
        elif masked.phase is Phase.FAILED:
            self.abandon(cohort, found, masked.why or "its masks could not be removed")
        elif masked.phase is Phase.SUMMING:
            summed = self._masking.summed(masked)
            for state in (UpdateState.WAITING, UpdateState.FAILED):
                for part in self._rounds.parts(found, state):
                    if part.job_number in summed:
                        part.state, part.updated_at = UpdateState.COUNTED, utc_now()
                        part.sha256 = summed[part.job_number]
                        part.sent_bytes = vector_bytes(masked.parameters)
            found.updates = len(summed)
            self._end(cohort, found, "when the masks could be removed")

    def close(self, cohort: Cohort, found: CohortRound, actor: Actor) -> None:
        """A person ends a round before its time, and none opens by itself any more; closing twice is fine."""
        cohort.opens = False
        if found.state is RoundState.OPEN:
            note(self._session, cohort, actor, AdapterAction.ROUND_CLOSED, f"round {found.position}")
            self._end(cohort, found, "when it was closed")

    def _end(self, cohort: Cohort, found: CohortRound, when: str) -> None:
        quorum = cohort.settings.quorum
        if found.updates < quorum:
            self.abandon(cohort, found, f"{found.updates} of the {quorum} updates of its quorum were there {when}")
            return
        found.state = RoundState.AGGREGATING
        self._session.flush()
        if cohort.settings.algorithm.asynchronous and cohort.opens:
            self._go_on(cohort, found)
        self._let_go(found)
        note_wanted(self._session, found.id)

    def _go_on(self, cohort: Cohort, found: CohortRound) -> None:
        """The next asynchronous round takes the updates that come while the last one's version is made."""
        try:
            following = self._begin(cohort)
        except NotFound:  # the adapter was deleted; what it was trained to is lost with it
            return
        following.members = self._rounds.carry(found, following)
        found.members -= following.members
        self._enlist(following)
        self._tell_opened(cohort, following, SERVER)

    def abandon(self, cohort: Cohort, found: CohortRound, why: str) -> None:
        """Ends a round without a version; its updates are forgotten."""
        found.state, found.why, found.ended_at = RoundState.ABANDONED, why, utc_now()
        found.worker_id = found.lease_expires_at = None
        self._let_go(found)
        self.ended(cohort, found)
        note(self._session, cohort, SERVER, AdapterAction.ROUND_ABANDONED, f"round {found.position}: {why}")

    def ended(self, cohort: Cohort, found: CohortRound) -> None:
        """What follows when a round has made its version, or never will."""
        self._session.flush()
        self._rounds.forget_files(found)
        self._masking.finish(found, found.why or None)
        cohort.busy = bool(self._rounds.under_way(cohort))

    def _let_go(self, found: CohortRound) -> None:
        """Stops the jobs that a round waits for no longer."""
        for part in self._rounds.parts(found, UpdateState.WAITING):
            self._stop(part, UpdateState.MISSED)

    def drop(self, cohort: Cohort, member: CohortMember) -> None:
        """A member's parts in rounds that have not ended do not count."""
        for part in self._rounds.under_way_of(member):
            if part.update.state is UpdateState.COUNTED and cohort.settings.masking is not None:
                continue  # nobody can take a single update out of a sum
            if part.update.state is UpdateState.COUNTED:
                part.round.updates -= 1
                part.update.sha256 = part.update.start_sha256 = None
            self._stop(part.update, UpdateState.LEFT)
            if part.round.state is RoundState.AGGREGATING and part.round.updates < cohort.settings.quorum:
                self.abandon(cohort, part.round, "a member left, and fewer updates than its quorum remained")
        self._session.flush()
        self.settle(cohort)

    def _stop(self, part: MemberUpdate, state: UpdateState) -> None:
        part.state, part.updated_at = state, utc_now()
        job = self._rounds.jobs_of([part]).get(part.job_number or 0)
        if job is not None and not job.state.final:
            self._lifecycle.move(job, JobState.CANCELLED)
            LeaseRepository(self._session).cancel(job.number, utc_now())


def _check_base(cohort: Cohort, base: BaseModelEntry) -> None:
    if base.sha256 != cohort.recipe.base.sha256:
        raise BaseMismatch(
            f"{base.name!r} stands for the base model {base.sha256[:12]}... here; cohort {cohort.name!r} was made with "
            f"{cohort.recipe.base.sha256[:12]}..."
        )
