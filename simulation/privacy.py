"""What a private cohort spends, by the product's own accountant, and when it may spend no more.

Knows neither devices' data nor how noise is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shared.accounting import epsilon_of, noise_for, of_rounds, of_run
from simulation.records import Round
from simulation.settings import SimulationSettings


def with_noise(settings: SimulationSettings) -> SimulationSettings:
    """The settings with the noise multiplier that keeps a run to its epsilon, where they leave it open.

    Raises InvalidRequest where no noise does, ToolchainMissing without dp-accounting.
    """
    privacy = settings.cohort.privacy
    if privacy is None or privacy.examples is None or privacy.examples.noise_multiplier is not None:
        return settings
    asked = privacy.examples
    noise = noise_for(asked.epsilon or 0.0, asked.delta, asked.sampling_rate, settings.cohort.training.steps)
    examples = asked.model_copy(update={"noise_multiplier": noise})
    cohort = settings.cohort.model_copy(update={"privacy": privacy.model_copy(update={"examples": examples})})
    return settings.model_copy(update={"cohort": cohort})


def spent(
    settings: SimulationSettings, before: Sequence[Round], trained: Sequence[int], made: bool
) -> dict[str, float]:
    """Epsilon after a round: of an example of the device that trained most often, and of a member.

    before: the rounds until then. trained: the round's devices. made: whether it made a version.
    """
    privacy, found = settings.cohort.privacy, dict[str, float]()
    if privacy is None:
        return found
    if privacy.examples is not None:
        runs = Counter([*trained, *(device for told in before for device in told.trained)])
        one = of_run(privacy.examples, settings.cohort.training.steps)
        found["examples"] = epsilon_of([one] * max(runs.values(), default=0), privacy.examples.delta)
    if privacy.members is not None:
        # A version is told to everybody; that some member was not asked is not counted in his favour.
        versions = sum(told.published for told in before) + made
        spendings = [of_rounds(privacy.members, versions)] if versions else []
        found["members"] = epsilon_of(spendings, privacy.members.delta)
    return found


def overspent(settings: SimulationSettings, before: Sequence[Round]) -> str | None:
    """Why the members' budget allows no further version; None if it does."""
    members = settings.cohort.privacy and settings.cohort.privacy.members
    if not members or members.epsilon is None:
        return None
    would = spent(settings, before, (), True)["members"]
    if would <= members.epsilon:
        return None
    return (
        f"another version would make epsilon {would:.3g} at delta {members.delta:g}; the budget is {members.epsilon:g}"
    )
