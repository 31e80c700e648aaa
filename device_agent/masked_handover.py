"""Handing in the update of a masked round: the agent's way from a finished run to its place in a sum.

The server gets masked numbers, and B itself in no case: what cannot be masked is not sent. Each phase may wait for
other devices for minutes; the lease is kept meanwhile, and a restart goes on with what is on disk. Knows no training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from device_agent.backoff import Backoff
from device_agent.client import DeviceClient
from device_agent.conduct import Conduct
from device_agent.errors import NotNow
from device_agent.handover import LONGEST_PAUSE_SECONDS, PAUSE_SECONDS, Sent
from device_agent.journal import RunDirectory
from device_agent.masking import FileNotebook, MaskedPart
from device_agent.peers import PeerBook
from device_agent.state import Home
from shared.errors import Gone, NotFound, Unavailable, Untrusted
from shared.job import Progress, Result
from shared.lora import load_adapter
from shared.masking.fixed_point import Words, encode
from shared.masking.messages import Advertisement, Consent, MaskingView, Phase, SealedShares, Unmasking
from shared.masking.quiet import NO_FILE, quiet_result
from shared.masking.settings import MaskingParameters
from shared.protocol import Lease

LOOK_SECONDS = 3.0  # between looks while other devices are waited for
WAITS = "its update is ready, masked; waits for the other devices of the round"

_log = structlog.get_logger()


@dataclass
class LeaseMasking:
    """The masked round's routes under one lease; counts what is sent."""

    client: DeviceClient
    lease_id: str
    sent_bytes: int = 0

    def look(self, known: Phase | None) -> MaskingView:
        """How it stands."""
        return self.client.masking(self.lease_id, known)

    def advertise(self, advertisement: Advertisement) -> MaskingView:
        """Phase 0."""
        return self._say("keys", advertisement)

    def share(self, shares: SealedShares) -> MaskingView:
        """Phase 1."""
        return self._say("shares", shares)

    def mask(self, vector: bytes) -> MaskingView:
        """Phase 2."""
        self.sent_bytes += len(vector)
        return self.client.send_masked(self.lease_id, vector)

    def consent(self, consent: Consent) -> MaskingView:
        """Phase 3."""
        return self._say("consent", consent)

    def unmask(self, unmasking: Unmasking) -> MaskingView:
        """Phase 4."""
        return self._say("unmask", unmasking)

    def _say(self, phase: str, body: Advertisement | SealedShares | Consent | Unmasking) -> MaskingView:
        self.sent_bytes += len(body.model_dump_json())
        return self.client.say_in_masking(self.lease_id, phase, body)


@dataclass(frozen=True)
class MaskedHandOver:
    """One run of a masked round and where it goes; `check` and `wait` as in `HandOver`."""

    client: DeviceClient
    lease: Lease
    run: RunDirectory
    home: Home
    device_id: str
    check: Callable[[], None]
    wait: Callable[[float], bool]

    def send(self, conduct: Conduct, result: Result) -> Sent:
        """Takes part to the end of the last phase and completes the job.

        Raises MaskingOut or Untrusted where this device's part ends without its update, Gone when the round is over,
        NotNow when the rules keep it off the network for too long.
        """
        parameters = agreed(self.lease)
        transport = LeaseMasking(self.client, self.lease.id)
        part = MaskedPart(
            transport,
            FileNotebook(self.run.path / "masking.json"),
            parameters,
            self.device_id,
            self.home.device_key(),
            PeerBook(self.home.peers).trust,
            lambda: self._encoded(parameters, result),
        )
        waiting = Progress(phase="uploading", step=result.steps, steps=result.steps, why=WAITS)
        while not self._tried(conduct, lambda: part.turn()):
            conduct.tell(waiting)
            self.wait(LOOK_SECONDS)
        while not self._tried(conduct, lambda: self._complete(transport, result)):
            continue
        return Sent("masked", transport.sent_bytes)

    def _encoded(self, parameters: MaskingParameters, result: Result) -> Words:
        plan = self.run.plan()
        after = load_adapter(self.run.best.read_bytes(), plan.manifest.size)
        weight = min(max(result.train_examples or 1, 1), parameters.most_weight)
        return encode(plan.half.update(after, plan.begin_b()), weight, parameters)

    def _complete(self, transport: LeaseMasking, result: Result) -> bool:
        receipt = self.client.complete_round(self.lease.id, NO_FILE, quiet_result(result))
        facts = {"cohort": receipt.cohort, "round": receipt.round, "updates": receipt.updates}
        _log.info("update counts", **facts, form="masked", bytes=transport.sent_bytes)
        return True

    def _tried(self, conduct: Conduct, call: Callable[[], bool]) -> bool:
        """One call, begun again for as long as the server does not answer."""
        pauses = Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            self.check()
            try:
                return conduct.transfer(lambda _progress: call())
            except NotNow:
                raise
            except (Gone, NotFound) as error:
                raise Gone(f"the job is trained, but its round has ended ({error.detail})") from error
            except Unavailable as error:
                pause = pauses.pause()
                _log.warning("the masked round is not reached; tried again", detail=error.detail, seconds=round(pause))
                self.wait(pause)


def agreed(lease: Lease) -> MaskingParameters:
    """The parameters of a lease's masked round. Raises Untrusted unless they are of its job, program and start."""
    task = lease.round
    if task is None or task.masking is None:
        raise Untrusted("the round asks for masked numbers and does not say how they are masked")
    parameters, program = task.masking, lease.manifest.manifest
    start = None if lease.start is None else lease.start.manifest.sha256
    said = (parameters.cohort, parameters.round, parameters.recipe_id, parameters.size, parameters.start_sha256)
    if said != (task.cohort, task.number, program.recipe_id, program.size, start):
        raise Untrusted("the masked round's parameters are not those of the job that they came with")
    return parameters
