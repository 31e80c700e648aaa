"""Uploads of trajectories under leases, and the proof that a trajectory yields the job's adapter.

A trajectory is checked against the lease's job before any of it is stored. When the device completes the job, the
trajectory is replayed, outside of transactions: `Trajectories.begin` checks the lease before it, and the completion
checks it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlalchemy.orm import Session

from server.database.database import Database
from server.federation.repository import CohortRepository
from server.federation.updates import ExpectedUpdate, UpdateService
from server.jobs.leases.repository import Ending
from server.jobs.leases.service import LeaseService
from server.jobs.repository import Job
from server.registry.trajectories.reconstruction import replay_slot, start_of
from server.registry.trajectories.service import Proof, check_sent
from server.registry.warm_start import StartService
from server.settings import Settings
from server.storage.store import ArtifactStore
from shared.canonical import sha256_hex
from shared.errors import InvalidTrajectory, NotReplayable, StartDeleted, TrajectoryMismatch
from shared.federation.algorithms import DeviceAlgorithm, algorithm_of
from shared.program import ProgramManifest
from shared.protocol import Completion
from shared.recipe import LEDGER_ESTIMATORS
from shared.training_settings import TrainingSettings
from shared.trajectory_checks import check_result, check_run, ledger_limit
from shared.zo.lora import F32, adapter_file, split_adapter
from shared.zo.replay import replay
from shared.zo.trajectory import Trajectory, TrajectoryHeader
from shared.zo.trajectory_reader import read_ledger

TRAJECTORY_BYTES = 64 << 20  # maximum of a trajectory
REPLAY_UPDATES = 30_000_000_000  # steps times queries times elements; a longer trajectory stays unverified


@dataclass(frozen=True)
class Expected:
    """The run that a lease's trajectory must record. limit: maximum size, bytes."""

    header: TrajectoryHeader
    training: TrainingSettings
    limit: int


def header_of(session: Session, job: Job, manifest: ProgramManifest) -> TrajectoryHeader:
    """Returns the header of a job's trajectory. Raises InvalidTrajectory if the job's start was deleted."""
    try:
        start_sha256 = None if job.start is None else StartService(session).file(job).sha256
    except StartDeleted as error:
        raise InvalidTrajectory(f"{error.detail}: the trajectory cannot be replayed; send the adapter alone") from error
    return TrajectoryHeader(
        job_id=job.id,
        job_seed=job.request.training.seed,
        recipe_id=job.recipe_id,
        noise=manifest.recipe.noise,
        queries=manifest.recipe.queries,
        size=manifest.size,
        start_sha256=start_sha256,
        proximal=_proximal(session, job),
    )


def _proximal(session: Session, job: Job) -> float | None:
    """Returns mu of the proximal term of a job or its round; None for a job without one."""
    if job.round is None:
        half = DeviceAlgorithm(job.request.training.proximal)
    else:
        half = algorithm_of(CohortRepository(session).find(job.tenant, job.round.cohort).settings.algorithm).device
    return half.mu if half.has_proximal_term else None


@dataclass(frozen=True)
class ProofRequest:
    """A completion that names a trajectory, with the facts of its job.

    update: what the file must be in a cohort's round. uploaded: the adapter file was uploaded, too.
    """

    completion: Completion
    tenant: str
    header: TrajectoryHeader
    training: TrainingSettings
    manifest: ProgramManifest
    update: ExpectedUpdate | None
    uploaded: bool


@dataclass(frozen=True)
class Trajectories:
    """Uploads of trajectories to one server, and their proofs."""

    database: Database
    artifacts: ArtifactStore
    settings: Settings

    def expect(self, session: Session, device_id: str, lease_id: str) -> Expected:
        """Returns what may be uploaded under a lease. Raises NotFound, or Gone if the lease has ended."""
        leases = LeaseService(session, self.settings.lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        if lease.ending is not Ending.COMPLETED:
            leases.renew(lease)
        UpdateService(session).check_clear(job)
        header, training = header_of(session, job, leases.manifest(job).manifest), job.request.training
        limit = min(ledger_limit(training, header.numbers), TRAJECTORY_BYTES)
        return Expected(header, training, limit)

    def check(self, expected: Expected, path: Path) -> None:
        """Checks the file of a trajectory, which may take a second. Raises InvalidTrajectory."""
        check_run(read_ledger(path.read_bytes(), expected.training.steps), expected.header, expected.training)

    def begin(self, session: Session, device_id: str, lease_id: str, completion: Completion) -> ProofRequest | None:
        """Returns what is to be proved; None if the job was completed before. Raises Conflict, NotFound or Gone."""
        leases = LeaseService(session, self.settings.lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        if lease.ending is Ending.COMPLETED:
            return None
        leases.renew(lease)
        check_sent(lease, completion)
        manifest = leases.manifest(job).manifest
        return ProofRequest(
            completion,
            tenant=job.tenant,
            header=header_of(session, job, manifest),
            training=job.request.training,
            manifest=manifest,
            update=UpdateService(session).expect(job),
            uploaded=lease.upload_sha256 == completion.adapter_sha256,
        )

    def prove(self, request: ProofRequest) -> Proof:
        """Replays the request's trajectory and returns its proof.

        Raises TrajectoryMismatch if it yields another adapter file, InvalidTrajectory, NotReplayable if the file must
        be uploaded, too, or Unavailable.
        """
        result, sha256 = request.completion.result, request.completion.trajectory_sha256 or ""
        data = self.artifacts.read(sha256)
        trajectory = read_ledger(data)
        check_run(trajectory, request.header, request.training)
        check_result(trajectory, result)
        why = self._unproven(request, trajectory)
        if why is not None and not request.uploaded:
            raise NotReplayable(f"upload the adapter, too: {why}")
        flat = self._replay(request, trajectory) if why is None else None
        file = self.artifacts.read(request.completion.adapter_sha256) if request.uploaded else None
        rebuilt = None if flat is None else _check(request, flat, file)
        head, _ = split_adapter(file or rebuilt or b"", request.manifest.size)
        return Proof(
            sha256=sha256,
            size=len(data),
            steps=trajectory.steps,
            start_sha256=trajectory.header.start_sha256,
            head=head,
            verified=flat is not None,
            rebuilt=rebuilt,
        )

    def _unproven(self, request: ProofRequest, trajectory: Trajectory) -> str | None:
        """Returns the reason why a trajectory is not replayed here; None if it is replayed."""
        recipe, size = request.manifest.recipe, request.manifest.size
        if recipe.noise != "rademacher" or recipe.estimator not in LEDGER_ESTIMATORS:
            return f"a run with noise {recipe.noise!r} and estimator {recipe.estimator!r} is exact on its device alone"
        updates = trajectory.steps * recipe.queries * size
        if updates > REPLAY_UPDATES:
            return f"replaying it takes {updates:,} updates, and this server makes {REPLAY_UPDATES:,} at most"
        return None

    def _replay(self, request: ProofRequest, trajectory: Trajectory) -> F32:
        start = start_of(self.database, self.artifacts, request.tenant, request.header)
        with replay_slot(request.tenant):
            return replay(trajectory, start, request.completion.result.best_step)


def _check(request: ProofRequest, flat: F32, file: bytes | None) -> bytes | None:
    """Returns the adapter file of flat B (D,) if none was uploaded. Raises TrajectoryMismatch if it differs."""
    step, manifest = request.completion.result.best_step, request.manifest
    if file is not None:
        device_bits = np.frombuffer(split_adapter(file, manifest.size)[1], "<u4")
        differing = int(np.count_nonzero(device_bits != flat.astype("<f4").view("<u4")))
        if differing:
            raise TrajectoryMismatch(
                f"after {step} steps the trajectory yields another B: {differing:,} of its {manifest.size:,} elements "
                "differ; nothing was lost: complete the job without the trajectory"
            )
        return None
    rebuilt = adapter_file(
        flat, job_id=request.header.job_id, recipe_id=manifest.recipe_id, a_sha256=manifest.a_sha256, step=step
    )
    if sha256_hex(rebuilt) != request.completion.adapter_sha256:
        raise TrajectoryMismatch(
            f"after {step} steps the trajectory yields another adapter file than {request.completion.adapter_sha256}; "
            "nothing was lost: upload that file and complete the job without the trajectory"
        )
    return rebuilt
