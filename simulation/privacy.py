"""Privacy accounting of a simulated cohort, by the product's own accountant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shared.federation.accounting import epsilon_of, noise_for, rounds_spending, run_spending
from shared.privacy import check_clip
from simulation.records import RoundRecord
from simulation.settings import SimulationSettings


def with_noise(settings: SimulationSettings) -> SimulationSettings:
    """Returns the settings with a noise multiplier that keeps a run within its epsilon, if they have none.

    Raises InvalidRequest if no noise is sufficient, InvalidRecipe if the estimator needs a C that is not given,
    ToolchainMissing without dp-accounting.
    """
    privacy = settings.cohort.privacy
    requested = None if privacy is None else privacy.examples
    if privacy is None or requested is None:
        return settings
    check_clip(requested, settings.cohort.recipe.estimator)
    if requested.noise_multiplier is not None:
        return settings
    noise = noise_for(
        requested.epsilon or 0.0, requested.delta, requested.sampling_rate, settings.cohort.training.steps
    )
    examples = requested.model_copy(update={"noise_multiplier": noise})
    cohort = settings.cohort.model_copy(update={"privacy": privacy.model_copy(update={"examples": examples})})
    return settings.model_copy(update={"cohort": cohort})


def epsilon_spent(
    settings: SimulationSettings, earlier: Sequence[RoundRecord], trained: Sequence[int], publishes: bool
) -> dict[str, float]:
    """Returns epsilon after a round: of an example of the device that trained most often, and of a member.

    earlier: the earlier rounds. trained: the round's devices. publishes: whether the round publishes a version.
    """
    privacy, epsilon = settings.cohort.privacy, dict[str, float]()
    if privacy is None:
        return epsilon
    if privacy.examples is not None:
        runs = Counter([*trained, *(device for record in earlier for device in record.trained)])
        run_cost = run_spending(privacy.examples, settings.cohort.training.steps)
        epsilon["examples"] = epsilon_of([run_cost] * max(runs.values(), default=0), privacy.examples.delta)
    if privacy.members is not None:
        # Versions are public. A member who was not selected in a round is counted as if selected.
        versions = sum(record.published for record in earlier) + publishes
        spendings = [rounds_spending(privacy.members, versions)] if versions else []
        epsilon["members"] = epsilon_of(spendings, privacy.members.delta)
    return epsilon


def budget_objection(settings: SimulationSettings, earlier: Sequence[RoundRecord]) -> str | None:
    """Returns why the members' budget allows no further version, or None if it does."""
    members = settings.cohort.privacy and settings.cohort.privacy.members
    if not members or members.epsilon is None:
        return None
    next_epsilon = epsilon_spent(settings, earlier, (), True)["members"]
    if next_epsilon <= members.epsilon:
        return None
    return (
        f"another version would make epsilon {next_epsilon:.3g} at delta {members.delta:g}; "
        f"the budget is {members.epsilon:g}"
    )
