"""Generates docs/routes.md: who may call each route, how often, with which body, and what one request may cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from starlette.routing import BaseRoute

from server.settings import MEBIBYTE, Settings
from server.web.routes import BodyKind, Route
from server.web.state import RateLimit

_KIBIBYTE = 1 << 10


@dataclass(frozen=True)
class Cost:
    """The most that a route spends on one hostile request, by the kind of its body; see `COSTS`.

    cpu_seconds: of the server process. loop_seconds: of these, on the event loop, where other requests wait.
    memory_bytes: that the process grows by.
    """

    cpu_seconds: float
    loop_seconds: float
    memory_bytes: int


# Bounds that tests/server/web/test_hostile_requests.py holds, several times what was measured: CPUs differ.
COSTS = {
    BodyKind.NONE: Cost(0.5, 0.25, 16 * MEBIBYTE),
    BodyKind.JSON: Cost(1.5, 0.3, 96 * MEBIBYTE),
    BodyKind.FORM: Cost(1.5, 0.3, 96 * MEBIBYTE),
}


@dataclass(frozen=True)
class UploadCost:
    """The most that an upload spends on each MiB of its body, and how many MiB it may have; `UPLOADS` has them.

    size: in words, what bounds the size of the body.
    """

    per_mebibyte: Cost
    size: str


_WEIGHTS = Cost(0.1, 0.02, 8 * MEBIBYTE)
# Bounds that tests/server/web/test_hostile_uploads.py holds, by route.
UPLOADS = {
    "/v1/leases/{lease_id}/adapter": UploadCost(_WEIGHTS, "4 D bytes and a header, D of the job's program"),
    "/v1/leases/{lease_id}/masking/vector": UploadCost(_WEIGHTS, "the words of D + 1 numbers, D of the job's program"),
    "/v1/leases/{lease_id}/trajectory": UploadCost(
        Cost(3, 0.02, 40 * MEBIBYTE), "`MOBIZO_TRAJECTORY_BYTES` (64 MiB), and the steps of the job"
    ),
}

HEAD = """# Routes

<!-- mobizo-server openapi --routes > docs/routes.md -->

Who may call each route, how often, with how large a body, and the most that one request costs the server process,
whatever it contains. [openapi.json](openapi.json) describes requests and responses.

- **callers**: a scope stands for a person or service whose token has it.
- **rate**: the limit that counts requests.
{rates}
- **body**: its kind and largest size by default. `MOBIZO_MAX_BODY_BYTES` and `MOBIZO_UPLOAD_BYTES` change the larger
  ones. A body must arrive within `MOBIZO_BODY_SECONDS` and a second for each 4 KiB.
- **CPU, memory**: bounds on the CPU time of one request, how much of it runs on the event loop, where other requests
  wait, and the growth of the process. `tests/server/web/test_hostile_requests.py` sends the largest, deepest, widest
  and most invalid bodies to each route and measures them. The bounds are several times what was measured, since CPUs
  differ. What a request starts beside the server process (compiling, exporting, scoring) is not counted; it has limits
  of its own. Responses are bounded by pages, and by what is stored.
- **Uploads of files** have bounds for each MiB of the body, in addition to the bound of a request without a body;
  `tests/server/web/test_hostile_uploads.py` measures them. The job of the lease bounds the size further:
{uploads}
  A trajectory has at most the steps of its job, 20,000 evaluations and changes of limits, and a fixed cost for each
  of them. At most two trajectories are read at the same time, in threads.

| route | callers | rate | body | CPU (event loop) | memory |
|---|---|---|---|---|---|
"""


def route_page(routes: Iterable[BaseRoute]) -> str:
    """Returns the page in Markdown, with the settings' defaults."""
    settings = Settings.model_construct()
    api_routes = [route for route in routes if isinstance(route, Route)]
    rows = [_row(method, route, settings) for route in api_routes for method in route.methods or ()]
    return HEAD.format(rates=_rates(settings), uploads=_uploads()) + "".join(sorted(rows))


def _row(method: str, route: Route, settings: Settings) -> str:
    if route.rule is None:
        raise TypeError(f"{route.path} has no rule")
    kind = route.body_kind
    upload = kind is BodyKind.FILE
    cost = UPLOADS[route.path].per_mebibyte if upload else COSTS[kind]
    each = " for each MiB" if upload else ""
    size = f"{'no body' if kind is BodyKind.NONE else kind}, {_size(route.body_limit(settings))}"
    cpu = f"{cost.cpu_seconds:g} s ({cost.loop_seconds:g} s){each}"
    memory = _size(cost.memory_bytes) + each
    cells = (f"`{route.path} {method}`", route.rule.callers, route.rule.rate_limit, size, cpu, memory)
    return f"| {' | '.join(cells)} |\n"


def _rates(settings: Settings) -> str:
    rates = {
        RateLimit.CREDENTIAL: (settings.token_rate, settings.token_burst),
        RateLimit.ADDRESS: (settings.address_rate, settings.address_burst),
        RateLimit.REFUSALS: (settings.refusal_rate, settings.refusal_burst),
    }
    lines = [f"  `{name}`: {rate:g} a second, {burst:,} at once." for name, (rate, burst) in rates.items()]
    return "\n".join((*lines, "  `refusals` counts wrong tokens by address, also where the limit is `token`."))


def _uploads() -> str:
    return "\n".join(f"  `{path}`: {cost.size}." for path, cost in UPLOADS.items())


def _size(number: int) -> str:
    whole, unit = (number // MEBIBYTE, "MiB") if number >= MEBIBYTE else (number // _KIBIBYTE, "KiB")
    return f"{whole} {unit}"
