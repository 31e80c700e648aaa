"""`mobizo privacy`: what was spent, budgets, and how much noise an epsilon takes. The client knows the API."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from mobizo.console import DEFAULT_SERVER, Json, Server, Token, connected, out, print_json, stop
from shared.accounting import epsilon_of, noise_for, of_run
from shared.errors import MobizoError
from shared.privacy import DELTA, ExamplePrivacy, PrivacyBudget, UserPrivacy

privacy = typer.Typer(help="What private jobs cost, and what they may.", no_args_is_help=True)
Delta = Annotated[float, typer.Option(help="chance that epsilon may fail to hold with")]


@privacy.command()
def show(user: str, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show what all jobs together have spent on a user's data."""
    with connected(server, token) as client:
        _tell(client.user_privacy(user), as_json)


@privacy.command()
def limit(
    user: str,
    epsilon: Annotated[float | None, typer.Option(help="that all jobs together may spend; left out: no limit")] = None,
    delta: Delta = DELTA,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Set a user's budget (operator): a job that would exceed it is refused, and so is any without privacy."""
    try:
        budget = PrivacyBudget(epsilon=epsilon, delta=delta)
    except ValidationError as error:
        raise stop(_first(error), 2) from error
    with connected(server, token) as client:
        _tell(client.limit_privacy(user, budget.epsilon, budget.delta), as_json)


@privacy.command()
def cohort(name: str, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show what a cohort's rounds have spent on its members, and on their examples."""
    with connected(server, token) as client:
        found = client.cohort_privacy(name)
    if as_json:
        print_json(found)
        return
    lines = [f"{found.cohort}  {found.rounds} rounds published"]
    if found.members_epsilon is None and found.examples_epsilon is None:
        lines.append("no privacy: what its versions tell of its members has no bound")
    if found.members_epsilon is not None:
        most = "" if found.members_budget is None else f" of {found.members_budget:g}"
        lines.append(f"each member: epsilon {found.members_epsilon:.3f}{most} at delta {found.members_delta:g}")
    if found.examples_epsilon is not None:
        lines.append(f"each example: epsilon {found.examples_epsilon:.3f} at delta {found.examples_delta:g}")
    out.print("\n".join(lines), markup=False)


@privacy.command()
def noise(
    steps: Annotated[int, typer.Option(min=1, help="of the run")],
    rate: Annotated[float, typer.Option(help="sampling rate of each example in each step")],
    epsilon: Annotated[float | None, typer.Option(help="to find the noise multiplier for")] = None,
    multiplier: Annotated[float | None, typer.Option(help="to find the epsilon of")] = None,
    delta: Delta = DELTA,
) -> None:
    """Find how much noise an epsilon takes, or what an amount of noise costs. Asks no server."""
    if (epsilon is None) == (multiplier is None):
        raise stop("give --epsilon or --multiplier", 2)
    try:
        asked = ExamplePrivacy(sampling_rate=rate, epsilon=epsilon, noise_multiplier=multiplier, delta=delta)
        if asked.epsilon is not None:
            found = noise_for(asked.epsilon, delta, rate, steps)
            asked = asked.model_copy(update={"noise_multiplier": found})
        cost = epsilon_of([of_run(asked, steps)], delta)
    except ValidationError as error:
        raise stop(_first(error), 2) from error
    except MobizoError as error:
        raise stop(error.detail, 1) from error
    out.print(f"noise_multiplier {asked.sigma:g}  epsilon {cost:.3f}  delta {delta:g}", markup=False)


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, and of what."""
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


def _tell(found: UserPrivacy, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    spent = "beyond any number" if found.epsilon is None else f"{found.epsilon:.3f}"
    most = "" if found.budget is None else f" of {found.budget:g}"
    lines = [f"{found.user}  epsilon {spent}{most} at delta {found.delta:g}  {found.runs} private runs"]
    if found.unprotected:
        lines.append(f"besides, {found.unprotected} jobs without privacy: what they told has no bound")
    out.print("\n".join(lines), markup=False)
