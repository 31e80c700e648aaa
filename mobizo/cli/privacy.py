"""`mobizo privacy`: differential privacy spent, users' budgets, and the noise that an epsilon needs."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, invalid_field, out, print_json, stop
from shared.errors import MobizoError
from shared.federation.accounting import epsilon_of, noise_for, run_spending
from shared.privacy import DELTA, ExamplePrivacy, PrivacyBudget, UserPrivacy

group = typer.Typer(help="Show and limit the differential privacy that users and cohorts spend.", no_args_is_help=True)
Delta = Annotated[float, typer.Option(help="Probability with which the epsilon bound may fail.")]
User = Annotated[str, typer.Argument(help="Name of the user.")]


@group.command()
@server_command
def view(connect: Connect, user: User, as_json: Json = False) -> None:
    """Show the epsilon that all jobs of a user have spent together."""
    with connect() as client:
        _print(client.privacy.user(user), as_json)


@group.command()
@server_command
def limit(
    connect: Connect,
    user: User,
    epsilon: Annotated[
        float | None, typer.Option(help="Epsilon that all jobs of the user may spend together. Default: no limit.")
    ] = None,
    delta: Delta = DELTA,
    as_json: Json = False,
) -> None:
    """Set a user's budget (operator). Jobs that would exceed it, and jobs without privacy, are rejected."""
    try:
        budget = PrivacyBudget(epsilon=epsilon, delta=delta)
    except ValidationError as error:
        raise stop(invalid_field(error), 2) from error
    with connect() as client:
        _print(client.privacy.set_user_budget(user, budget.epsilon, budget.delta), as_json)


@group.command()
@server_command
def device(
    connect: Connect,
    device_id: Annotated[str, typer.Argument(metavar="DEVICE", help="Id of the device.")],
    as_json: Json = False,
) -> None:
    """Show the epsilon that runs have spent on each data set of a device, whatever users the jobs named."""
    with connect() as client:
        found = client.privacy.device(device_id)
    if as_json:
        print_json([*found])
        return
    for item in found:
        spent = "unbounded" if item.epsilon is None else f"{item.epsilon:.3f}"
        budget = "" if item.budget is None else f" of {item.budget:g}"
        users = ", ".join(item.users)
        out.print(
            f"{item.dataset}  epsilon {spent}{budget} at delta {item.delta:g}  {item.runs} private runs for {users}",
            markup=False,
        )


@group.command()
@server_command
def cohort(
    connect: Connect,
    name: Annotated[str, typer.Argument(metavar="COHORT", help="Name of the cohort.")],
    as_json: Json = False,
) -> None:
    """Show the epsilon that a cohort's rounds have spent per member and per example."""
    with connect() as client:
        found = client.privacy.cohort(name)
    if as_json:
        print_json(found)
        return
    lines = [f"{found.cohort}  {found.rounds} published rounds"]
    if found.members_epsilon is None and found.examples_epsilon is None:
        lines.append("no privacy: the cohort's rounds give no epsilon bound for its members")
    if found.members_epsilon is not None:
        budget = "" if found.members_budget is None else f" of {found.members_budget:g}"
        lines.append(f"each member: epsilon {found.members_epsilon:.3f}{budget} at delta {found.members_delta:g}")
    if found.examples_epsilon is not None:
        lines.append(f"each example: epsilon {found.examples_epsilon:.3f} at delta {found.examples_delta:g}")
    out.print("\n".join(lines), markup=False)


@group.command()
def noise(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the run.")],
    rate: Annotated[float, typer.Option(help="Probability with which a step samples each example.")],
    epsilon: Annotated[float | None, typer.Option(help="Find the noise multiplier for this epsilon.")] = None,
    multiplier: Annotated[float | None, typer.Option(help="Find the epsilon of this noise multiplier.")] = None,
    delta: Delta = DELTA,
    as_json: Json = False,
) -> None:
    """Compute the noise multiplier that an epsilon needs, or the epsilon of a noise multiplier. Needs no server."""
    if (epsilon is None) == (multiplier is None):
        raise stop("give either --epsilon or --multiplier", 2)
    try:
        settings = ExamplePrivacy(sampling_rate=rate, epsilon=epsilon, noise_multiplier=multiplier, delta=delta)
        if settings.epsilon is not None:
            found = noise_for(settings.epsilon, delta, rate, steps)
            settings = settings.model_copy(update={"noise_multiplier": found})
        spent = epsilon_of([run_spending(settings, steps)], delta)
    except ValidationError as error:
        raise stop(invalid_field(error), 2) from error
    except MobizoError as error:
        raise stop(error.detail, 1) from error
    if as_json:
        print_json({"noise_multiplier": settings.sigma, "epsilon": spent, "delta": delta})
        return
    out.print(f"noise_multiplier {settings.sigma:g}  epsilon {spent:.3f}  delta {delta:g}", markup=False)


def _print(found: UserPrivacy, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    spent = "unbounded" if found.epsilon is None else f"{found.epsilon:.3f}"
    budget = "" if found.budget is None else f" of {found.budget:g}"
    lines = [f"{found.user}  epsilon {spent}{budget} at delta {found.delta:g}  {found.runs} private runs"]
    if found.unprotected:
        lines.append(f"in addition, {found.unprotected} jobs without privacy, for which there is no epsilon bound")
    out.print("\n".join(lines), markup=False)
