"""Verifies, before a job is completed, that its trajectory yields its adapter.

The replay runs outside of transactions: `begin` checks the lease before it, and the completion checks it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.database.database import Database
from server.jobs.leases.models import Ending
from server.jobs.leases.service import LeaseService
from server.registry.trajectories.reconstruction import replay_slot, start_of
from server.registry.trajectories.service import Proof, check_sent
from server.results.trajectories import header_of
from server.results.uploads import UploadService
from server.settings import Settings
from server.storage.store import ArtifactStore
from shared.canonical import sha256_hex
from shared.errors import NotReplayable, TrajectoryMismatch
from shared.job import TrainingSettings
from shared.program import ProgramManifest
from shared.protocol import Completion
from shared.recipe import LEDGER_ESTIMATORS
from shared.trajectory_checks import check_result, check_run
from shared.zo.lora import F32, adapter_file, split_adapter
from shared.zo.replay import replay
from shared.zo.trajectory import Trajectory, TrajectoryHeader
from shared.zo.trajectory_reader import read_ledger


@dataclass(frozen=True)
class ProofRequest:
    """A completion that names a trajectory, with the facts of its job. uploaded: the adapter file was uploaded, too."""

    device_id: str
    lease_id: str
    completion: Completion
    tenant: str
    header: TrajectoryHeader
    training: TrainingSettings
    manifest: ProgramManifest
    uploaded: bool


@dataclass(frozen=True)
class ProofService:
    """Proofs of one server."""

    database: Database
    artifacts: ArtifactStore
    settings: Settings

    def begin(self, device_id: str, lease_id: str, completion: Completion) -> ProofRequest | None:
        """Returns what is to be proved; None if the job was completed before. Raises Conflict, NotFound or Gone."""
        with self.database.writing() as session:
            leases = LeaseService(session, self.settings.lease_seconds)
            lease, job = leases.find(device_id, lease_id)
            if lease.ending is Ending.COMPLETED:
                return None
            leases.renew(lease)
            check_sent(lease, completion)
            manifest = leases.manifest(job).manifest
            return ProofRequest(
                device_id,
                lease_id,
                completion,
                tenant=job.tenant,
                header=header_of(session, job, manifest),
                training=job.request.training,
                manifest=manifest,
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
        rebuilt = None
        if flat is not None:
            rebuilt = _check(request, flat, file)
        head, _ = split_adapter(file or rebuilt or b"", request.manifest.size)
        return Proof(
            sha256=sha256,
            size=len(data),
            steps=trajectory.steps,
            start_sha256=trajectory.header.start_sha256,
            head=head,
            verified=flat is not None,
            rebuilt=rebuilt if file is None else None,
        )

    def store(self, request: ProofRequest, rebuilt: bytes) -> None:
        """Stores a rebuilt file as the lease's upload, with all checks of an upload."""
        settings = self.settings
        uploads = UploadService(self.database, self.artifacts, settings.lease_seconds, settings.upload_rms_limit)
        uploads.upload(request.device_id, request.lease_id, request.manifest.size, rebuilt)

    def _unproven(self, request: ProofRequest, trajectory: Trajectory) -> str | None:
        """Returns the reason why a trajectory is not replayed here; None if it is replayed."""
        recipe, size = request.manifest.recipe, request.manifest.size
        if recipe.noise != "rademacher" or recipe.estimator not in LEDGER_ESTIMATORS:
            return f"a run with noise {recipe.noise!r} and estimator {recipe.estimator!r} is exact on its device alone"
        updates = trajectory.steps * recipe.queries * size
        most = self.settings.replay_updates
        if updates > most:
            return f"replaying it takes {updates:,} updates, and this server makes {most:,} at most"
        return None

    def _replay(self, request: ProofRequest, trajectory: Trajectory) -> F32:
        start = start_of(self.database, self.artifacts, request.tenant, request.header)
        with replay_slot():
            return replay(trajectory, start, request.completion.result.best_step)


def _check(request: ProofRequest, flat: F32, file: bytes | None) -> bytes | None:
    """Returns the adapter file of flat B (D,) if none was uploaded. Raises TrajectoryMismatch if it differs."""
    step, manifest = request.completion.result.best_step, request.manifest
    if file is not None:
        theirs = np.frombuffer(split_adapter(file, manifest.size)[1], "<u4")
        differing = int(np.count_nonzero(theirs != flat.astype("<f4").view("<u4")))
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
