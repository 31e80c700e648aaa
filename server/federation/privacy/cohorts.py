"""Privacy that a cohort's rounds spend: of members by the noise on their mean, of examples by each device's noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy.orm import Session

from server.federation.privacy.repository import PrivacyRepository
from shared.errors import BudgetExceeded
from shared.federation.accounting import Spending, epsilon_of, fast_epsilon_of, known_epsilon_of, rounds_spending
from shared.federation.cohort import CohortSettings
from shared.privacy import DELTA, CohortPrivacy


def members_epsilon(settings: CohortSettings, rounds: int) -> float | None:
    """Returns the cost of `rounds` published rounds to a member of all of them; None without members' privacy."""
    members = None if settings.privacy is None else settings.privacy.members
    if members is None:
        return None
    return 0.0 if rounds == 0 else epsilon_of([rounds_spending(members, rounds)], members.delta)


def check_next_round(settings: CohortSettings, rounds: int) -> None:
    """Raises BudgetExceeded if one more than `rounds` published rounds cost more than the cohort's own budget."""
    members = None if settings.privacy is None else settings.privacy.members
    if members is None or members.epsilon is None:
        return
    before, after = members_epsilon(settings, rounds), members_epsilon(settings, rounds + 1)
    if after is not None and after > members.epsilon:
        raise BudgetExceeded(
            f"cohort {settings.name!r}: {rounds} rounds have spent {before:.3g} of a privacy budget of epsilon "
            f"{members.epsilon:g} at delta {members.delta:g}, and with one more it would be {after:.3g}",
            spent=before,
            epsilon=after,
            budget=members.epsilon,
            delta=members.delta,
        )


def cohort_privacy(
    session: Session,
    tenant: str,
    settings: CohortSettings,
    rounds: int,
    examples_epsilon_of: Callable[[Sequence[Spending], float], float] = known_epsilon_of,
) -> CohortPrivacy:
    """Returns the privacy that a cohort has spent. rounds: how many of its rounds were published."""
    examples = None if settings.privacy is None else settings.privacy.examples
    members = None if settings.privacy is None else settings.privacy.members
    delta = DELTA if examples is None else examples.delta
    spent = PrivacyRepository(session).of_cohort(tenant, settings.name)
    worst: Sequence[Spending] = max(spent.values(), key=lambda runs: fast_epsilon_of(runs, delta), default=[])
    return CohortPrivacy(
        cohort=settings.name,
        rounds=rounds,
        members_epsilon=members_epsilon(settings, rounds),
        members_delta=None if members is None else members.delta,
        members_budget=None if members is None else members.epsilon,
        examples_epsilon=None if examples is None else examples_epsilon_of(worst, delta),
        examples_delta=None if examples is None else delta,
    )
