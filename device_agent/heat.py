"""How a device that grows warm holds back: longer rests, then shorter examples. Pure; knows no rule but a ceiling."""

from __future__ import annotations

from dataclasses import dataclass

STAGE_EASE = 1.0  # degrees Celsius below a stage's edge before the stage before it holds again
SHORTEST = 32  # tokens; shorter examples would hardly hold a question and its answer


@dataclass(frozen=True)
class Stage:
    """What holds while a device is at most `below` degrees Celsius under its ceiling."""

    below: float
    rest: float  # seconds of pause for each second of work
    share: float  # of the sequence length, where the program takes shorter ones
    fixed_rest: float  # the rest where it does not


# Stage 0 is full speed; stage i is STAGES[i - 1].
STAGES = (
    Stage(8.0, 0.5, 1.0, 0.5),
    Stage(6.0, 1.0, 1.0, 1.0),
    Stage(4.0, 2.0, 1.0, 2.0),
    Stage(2.0, 2.0, 0.5, 4.0),
    Stage(1.0, 4.0, 0.25, 8.0),
)
THROTTLED_STAGE = 2  # at the least, while the system itself slows its processors down


def stage_at(ceiling: float, temperature: float | None, throttled: bool | None, last: int) -> int:
    """The stage, 0 to len(STAGES), at a temperature (degrees Celsius) after stage `last`."""
    stage = 0
    if temperature is not None:
        # Up at a stage's edge, down only STAGE_EASE below it: anything in between leaves the stage as it was.
        least = _edges_passed(ceiling - temperature)
        most = _edges_passed(ceiling - temperature - STAGE_EASE)
        stage = max(least, min(last, most))
    return max(stage, THROTTLED_STAGE) if throttled else stage


def _edges_passed(margin: float) -> int:
    return sum(margin <= stage.below for stage in STAGES)


def pace(stage: int, sequence_length: int | None) -> tuple[float, int | None]:
    """Seconds of rest for each of work, and the most tokens of an example (None: the recipe's) at a stage.

    sequence_length: the recipe's; None if the program takes no shorter one.
    """
    if stage == 0:
        return 0.0, None
    chosen = STAGES[stage - 1]
    if sequence_length is None or sequence_length <= SHORTEST:
        return chosen.fixed_rest, None
    length = max(SHORTEST, int(sequence_length * chosen.share))
    return chosen.rest, None if length == sequence_length else length
