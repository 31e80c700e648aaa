"""In how many forward passes a step's 2q perturbed copies of B go through the network. Path p < q is +, q + p is -."""

from __future__ import annotations

from typing import Literal

Grouping = Literal["sequential", "inner", "outer", "both"]


def passes(grouping: Grouping, queries: int) -> list[list[int]]:
    """The paths of each pass, in order.

    sequential: one by one, as MeZO (the paper's Algorithm 3). inner: a query's + and - together. outer: all queries' +,
    then all their -. both: all 2q at once, as MobiZO (Algorithm 1).
    """
    paths = range(2 * queries)
    if grouping == "sequential":
        return [[path] for path in paths]
    if grouping == "inner":
        return [[query, queries + query] for query in range(queries)]
    if grouping == "outer":
        return [list(paths[:queries]), list(paths[queries:])]
    return [list(paths)]
