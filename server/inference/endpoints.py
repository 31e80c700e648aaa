"""The routes of scores and labels, and the errors and the scope that it shares with OpenAI's routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request

from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.inference import responses
from server.inference.errors import BaseNotServed, ScorerBusy, ScorerFull, ScorerLate, ScorerOff, ScorerStopped
from server.inference.responses import classify
from server.storage.store import Damaged
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import State
from server.web.streams import cancelled_on_disconnect
from shared.access import Scope
from shared.errors import (
    AdapterNotFound,
    BaseMismatch,
    InvalidDataset,
    InvalidTask,
    MobizoError,
    RevisionNotFound,
    UnknownBase,
    VersionHeld,
)
from shared.scoring import ClassifyRequest, ClassifyResult, ScoreRequest, ScoreResult
from shared.tokenizer import TextTooLong, UnknownToken

router = Routes(prefix="/v1", tags=["scoring"])
ScoringPrincipal = Annotated[Principal, needs(Scope.ADAPTERS_SCORE)]
REFUSALS: tuple[type[MobizoError], ...] = (
    *(
        UnknownBase,
        AdapterNotFound,
        RevisionNotFound,
        VersionHeld,
        BaseMismatch,
        InvalidTask,
        TextTooLong,
        UnknownToken,
    ),
    *(ScorerOff, ScorerBusy, ScorerStopped, ScorerLate, ScorerFull, BaseNotServed, Damaged),
)


@router.post("/score", responses=raises(*REFUSALS, InvalidDataset))
async def score_answers(
    principal: ScoringPrincipal, request: ScoreRequest, connection: Request, state: State
) -> ScoreResult:
    """Returns the log-probabilities of answers after their prompts. Each row has its own adapter; rows share batches.

    A score does not depend on the other rows of a request. Texts are read whole, up to the base's context.
    """
    return await cancelled_on_disconnect(connection, responses.score(state, principal.tenant, request))


@router.post("/adapters/{name}/classify", responses=raises(*REFUSALS, InvalidDataset))
async def classify_record(
    principal: ScoringPrincipal, name: str, request: ClassifyRequest, connection: Request, state: State
) -> ClassifyResult:
    """Returns the probability of each label for a record. `name` is NAME or NAME@REVISION; the default is `main`.

    The adapter's own task makes the prompt of the fields. The scores are those of `POST /v1/score`.
    """
    return await cancelled_on_disconnect(connection, classify(state, principal.tenant, name, request))
