"""`mobizo privacy`: differential privacy spent, users' budgets, and the noise that an epsilon needs."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, out, print_json, show, stop
from shared.errors import MobizoError
from shared.federation.accounting import epsilon_of, noise_for, run_spending
from shared.invalid_fields import first_invalid
from shared.privacy import DELTA, ExamplePrivacy, PrivacyBudget, UserPrivacy

group = typer.Typer(help="Show and limit the differential privacy that users and cohorts spend.", no_args_is_help=True)
Delta = Annotated[float, typer.Option(help="Probability with which the epsilon bound may fail.")]
User = Annotated[str, typer.Argument(help="Name of the user.")]


@group.command()
@server_command
def view(connect: Connect, user: User, as_json: Json = False) -> None:
    """Show the epsilon that all jobs of a user have spent together."""
    with connect() as client:
        _print_privacy(client.privacy.user(user), as_json)


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
        raise stop(str(first_invalid(error)), 2) from error
    with connect() as client:
        _print_privacy(client.privacy.set_user_budget(user, budget.epsilon, budget.delta), as_json)


@group.command()
@server_command
def device(
    connect: Connect,
    device_id: Annotated[str, typer.Argument(metavar="DEVICE", help="Id of the device.")],
    as_json: Json = False,
) -> None:
    """Show the epsilon that runs have spent on each data set of a device, for all users together."""
    with connect() as client:
        datasets = client.privacy.device(device_id)
    if as_json:
        print_json([*datasets])
        return
    for item in datasets:
        epsilon = "unbounded" if item.epsilon is None else f"{item.epsilon:.3f}"
        budget = "" if item.budget is None else f" of {item.budget:g}"
        users = ", ".join(item.users)
        out.print(
            f"{item.dataset}  epsilon {epsilon}{budget} at delta {item.delta:g}  {item.runs} private runs for {users}",
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
        privacy = client.privacy.cohort(name)
    lines = [f"{privacy.cohort}  {privacy.rounds} published rounds"]
    if privacy.members_epsilon is None and privacy.examples_epsilon is None:
        lines.append("no privacy: the cohort's rounds give no epsilon bound for its members")
    if privacy.members_epsilon is not None:
        budget = "" if privacy.members_budget is None else f" of {privacy.members_budget:g}"
        lines.append(f"each member: epsilon {privacy.members_epsilon:.3f}{budget} at delta {privacy.members_delta:g}")
    if privacy.examples_epsilon is not None:
        lines.append(f"each example: epsilon {privacy.examples_epsilon:.3f} at delta {privacy.examples_delta:g}")
    show(as_json, privacy, "\n".join(lines))


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
            sigma = noise_for(settings.epsilon, delta, rate, steps)
            settings = settings.model_copy(update={"noise_multiplier": sigma})
        spent_epsilon = epsilon_of([run_spending(settings, steps)], delta)
    except ValidationError as error:
        raise stop(str(first_invalid(error)), 2) from error
    except MobizoError as error:
        raise stop(error.detail, 1) from error
    facts = {"noise_multiplier": settings.sigma, "epsilon": spent_epsilon, "delta": delta}
    show(as_json, facts, f"noise_multiplier {settings.sigma:g}  epsilon {spent_epsilon:.3f}  delta {delta:g}")


def _print_privacy(privacy: UserPrivacy, as_json: bool) -> None:
    epsilon = "unbounded" if privacy.epsilon is None else f"{privacy.epsilon:.3f}"
    budget = "" if privacy.budget is None else f" of {privacy.budget:g}"
    lines = [f"{privacy.user}  epsilon {epsilon}{budget} at delta {privacy.delta:g}  {privacy.runs} private runs"]
    if privacy.unprotected:
        lines.append(f"{privacy.unprotected} more jobs had no differential privacy; epsilon does not cover them")
    show(as_json, privacy, "\n".join(lines))
