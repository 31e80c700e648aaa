"""Uploads the update of a masked round by secure aggregation, so that the server learns only the sum over devices.

Each phase may wait minutes for other devices. The lease is kept meanwhile, and a restart resumes from the files on
disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import structlog

from device_agent.home import AgentHome
from device_agent.jobs.lease_and_policy import PolicyGatedRun
from device_agent.jobs.upload import UploadSummary, until_answered
from device_agent.protocol.client import DeviceClient, LeaseSecureAggregationTransport
from device_agent.secure_aggregation.participant import SecureAggregationParticipant, trust_keys
from device_agent.training.run_directory import RunDirectory
from shared.errors import Untrusted
from shared.federation.cohort import RoundReceipt
from shared.federation.secure_aggregation.fixed_point import IntegerVector, encode
from shared.federation.secure_aggregation.redaction import NO_FILE, redacted_result
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from shared.job import Progress
from shared.protocol import Completion, Lease
from shared.result import Result
from shared.zo.lora import load_adapter

CHECK_SECONDS = 3.0  # between polls while waiting for other devices
GONE = "its round has ended"
WAITING = "the masked update is ready; waiting for the other devices of the round"

_log = structlog.get_logger()


@dataclass(frozen=True)
class SecureAggregationUpload:
    """The upload of one run of a masked round."""

    client: DeviceClient
    lease: Lease
    run: RunDirectory
    home: AgentHome

    def send(self, policy_run: PolicyGatedRun, result: Result) -> UploadSummary:
        """Takes part in every phase and completes the job.

        Raises LeftOutOfRound or Untrusted if this device's update is not counted, Gone when the round is over,
        PolicyForbids if the rules forbid the network for too long.
        """
        parameters = secure_aggregation_parameters(self.lease)
        transport = LeaseSecureAggregationTransport(self.client, self.lease.id)
        participant = SecureAggregationParticipant(
            transport,
            self.run.path / "masking.json",
            parameters,
            self.home.config().device_id,
            self.home.device_key(),
            partial(trust_keys, self.home.peers),
            lambda: self._encoded(parameters, result),
        )
        waiting = Progress(phase="uploading", step=result.steps, steps=result.steps, why=WAITING)
        while not until_answered(participant.advance, policy_run, GONE):
            policy_run.report(waiting)
            policy_run.wait(CHECK_SECONDS)
        body = Completion(adapter_sha256=NO_FILE, result=redacted_result(result))
        receipt = until_answered(lambda: self.client.complete(RoundReceipt, self.lease.id, body), policy_run, GONE)
        facts = {"cohort": receipt.cohort, "round": receipt.round, "updates": receipt.updates}
        _log.info("update accepted", **facts, form="masked", bytes=transport.sent_bytes)
        return UploadSummary("masked", transport.sent_bytes)

    def _encoded(self, parameters: SecureAggregationParameters, result: Result) -> IntegerVector:
        plan = self.run.plan()
        adapter = load_adapter(self.run.best.read_bytes(), plan.manifest.size)
        weight = min(max(result.train_examples or 1, 1), parameters.most_weight)
        return encode(plan.device_algorithm.update(adapter, plan.begin_b()), weight, parameters)


def secure_aggregation_parameters(lease: Lease) -> SecureAggregationParameters:
    """Returns the masking parameters of a lease. Raises Untrusted unless they match its job, program and start."""
    task = lease.round
    if task is None or task.masking is None:
        raise Untrusted("the masked round has no masking parameters")
    parameters, program = task.masking, lease.manifest.manifest
    start = None if lease.start is None else lease.start.manifest.sha256
    values = (parameters.cohort, parameters.round, parameters.recipe_id, parameters.size, parameters.start_sha256)
    if values != (task.cohort, task.number, program.recipe_id, program.size, start):
        raise Untrusted("the masking parameters differ from the job's round, program or start")
    return parameters
