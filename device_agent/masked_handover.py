"""Handing in the update of a masked round: the agent's way from a finished run to its place in a sum.

The server gets masked numbers, and B itself in no case: what cannot be masked is not sent. Each phase may wait for
other devices for minutes; the lease is kept meanwhile, and a restart goes on with what is on disk. Knows no training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from device_agent.backoff import Backoff
from device_agent.client import DeviceClient
from device_agent.conduct import Conduct
from device_agent.durable import write_durably
from device_agent.errors import NotNow
from device_agent.handover import LONGEST_PAUSE_SECONDS, PAUSE_SECONDS, Sent
from device_agent.journal import RunDirectory
from device_agent.masking import FileNotebook, MaskedPart
from device_agent.peers import PeerBook
from device_agent.state import Home
from shared.canonical import sha256_hex
from shared.errors import Gone, MaskingOut, NotFound, Unavailable
from shared.job import Progress, Result
from shared.lora import load_adapter
from shared.masking.fixed_point import Words, encode
from shared.masking.messages import Advertisement, Consent, MaskingView, Phase, SealedShares, Unmasking
from shared.masking.settings import MaskingParameters
from shared.protocol import Lease

LOOK_SECONDS = 3.0  # between looks while other devices are waited for
WAITS = "its update is ready, masked; waits for the other devices of the round"

_log = structlog.get_logger()


@dataclass
class LeaseMasking:
    """The masked round's routes under one lease; counts what is sent. vector: where the vector's sha256 is noted."""

    client: DeviceClient
    lease_id: str
    vector: Path
    bytes: int = field(default=0)

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
        """Phase 2. The vector is named when the job is completed, which may be after a restart."""
        write_durably(self.vector, sha256_hex(vector).encode())
        self.bytes += len(vector)
        return self.client.send_masked(self.lease_id, vector)

    def consent(self, consent: Consent) -> MaskingView:
        """Phase 3."""
        return self._say("consent", consent)

    def unmask(self, unmasking: Unmasking) -> MaskingView:
        """Phase 4."""
        return self._say("unmask", unmasking)

    def _say(self, phase: str, body: Advertisement | SealedShares | Consent | Unmasking) -> MaskingView:
        self.bytes += len(body.model_dump_json())
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
        parameters = self._parameters()
        transport = LeaseMasking(self.client, self.lease.id, self.run.path / "masked.sha256")
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
        return Sent("masked", transport.bytes)

    def _parameters(self) -> MaskingParameters:
        if self.lease.round is None or self.lease.round.masking is None:
            raise MaskingOut("the round asks for masked numbers and does not say how they are masked")
        return self.lease.round.masking

    def _encoded(self, parameters: MaskingParameters, result: Result) -> Words:
        plan = self.run.plan()
        after = load_adapter(self.run.best.read_bytes(), plan.manifest.size)
        weight = min(max(result.train_examples, 1), parameters.most_weight)
        return encode(plan.half.update(after, plan.begin_b()), weight, parameters)

    def _complete(self, transport: LeaseMasking, result: Result) -> bool:
        try:
            named = transport.vector.read_text()
        except FileNotFoundError as error:
            raise MaskingOut("the round ended before this device's masked update was sent") from error
        receipt = self.client.complete_round(self.lease.id, named, result)
        facts = {"cohort": receipt.cohort, "round": receipt.round, "updates": receipt.updates}
        _log.info("update counts", **facts, form="masked", bytes=transport.bytes)
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
