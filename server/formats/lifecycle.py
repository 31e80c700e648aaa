"""The one way a conversion changes: along its state machine. Knows no worker and no HTTP."""

from __future__ import annotations

from typing import Any

from server.formats.models import Conversion, ConversionState
from shared.errors import Conflict

MOVES: dict[ConversionState, frozenset[ConversionState]] = {
    ConversionState.PENDING: frozenset({ConversionState.CONVERTING, ConversionState.FAILED}),
    ConversionState.CONVERTING: frozenset({ConversionState.PENDING, ConversionState.READY, ConversionState.FAILED}),
    ConversionState.READY: frozenset(),
    ConversionState.FAILED: frozenset({ConversionState.PENDING}),  # asked for again: the cause may be gone
}


def move(conversion: Conversion, state: ConversionState, **changes: Any) -> None:
    """Moves a conversion to `state` and sets other columns with it. Raises Conflict if it cannot go there."""
    if state not in MOVES[conversion.state]:
        raise Conflict(f"the conversion {conversion.id} is {conversion.state}; it cannot become {state}")
    conversion.state = state
    for name, value in changes.items():
        setattr(conversion, name, value)
    if state is not ConversionState.CONVERTING:
        conversion.worker_id = conversion.lease_expires_at = None
    if state is not ConversionState.PENDING:
        conversion.next_attempt_at = None
