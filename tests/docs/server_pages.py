"""`python -m tests.docs.server_pages` writes the pages of docs/ that follow from the server's code.

These are the OpenAPI document, the problem codes, who may call each route and what one request may cost, and the tables
of all settings and of all supported architectures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute

from server.app import create_api
from server.compiler.checkpoints.architectures import ARCHITECTURES, MULTIMODAL
from server.compiler.checkpoints.gguf_names import gguf_architecture
from server.compiler.checkpoints.hf_config import config_facts
from server.dashboard.access import SignedIn
from server.identity.access_rules import OneTime, Open
from server.identity.quotas import DEFAULTS
from server.results.endpoints import READERS
from server.settings import MEBIBYTE, Settings
from server.web import body_budgets
from server.web.middleware import BODY_SECONDS, SLOWEST, MethodNotAllowed
from server.web.openapi import PROBLEM_JSON
from server.web.routes import BodyKind, Route, Rule
from server.web.state import BURST_SECONDS, REFUSAL_BURST, REFUSAL_RATE
from shared.errors import PROBLEM_TYPE, MobizoError

DOCS = Path(__file__).resolve().parents[2] / "docs"
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


_WEIGHTS = Cost(0.1, 0.02, 3 * MEBIBYTE)
# Bounds that tests/server/web/test_hostile_uploads.py holds, by route.
UPLOADS = {
    "/v1/leases/{lease_id}/adapter": UploadCost(_WEIGHTS, "4 D bytes and a header, D of the job's program"),
    "/v1/leases/{lease_id}/masking/vector": UploadCost(_WEIGHTS, "the words of D + 1 numbers, D of the job's program"),
    "/v1/leases/{lease_id}/trajectory": UploadCost(Cost(3, 0.02, 40 * MEBIBYTE), "64 MiB, and the steps of the job"),
}

ROUTES_HEAD = """# Routes

<!-- python -m tests.docs.server_pages -->

Who may call each route, how often, with how large a body, and the most that one request costs the server process,
whatever it contains. [openapi.json](openapi.json) describes requests and responses.

- **callers**: a scope stands for a person or service whose token has it.
- **rate**: the limit that counts requests.
{rates}
- **body**: its kind and largest size by default. `MOBIZO_UPLOAD_BYTES` changes that of
  files. A client may be at most {body_seconds:.0f} seconds behind a pace of {slowest} a second: what it sent before
  gives no further time.
- **Bodies at the same time**: each server process holds at most {memory} of JSON and forms in memory, and
  {uploads_at_once} times the largest upload in staging files on its disk. A tenant may hold half of each, and a token a
  quarter; while others hold some, a tenant as much as it leaves free, and a token half of what its tenant may still
  take. Beyond that the response is 429 with `limit` `body-memory` or `uploads`. Requests without a valid token count
  as one tenant, and by address.
- **Turns**: tokens that are looked up, requests that are handled in threads, event streams that open or read, writes,
  large JSON bodies, checks of uploads, reading and replaying trajectories and exact privacy costs have a few places
  each. The tenants of the last 5 seconds (tokens: each by itself) have equal shares of half of them, and one alone
  leaves a place to the others. 5,000 requests of a tenant may wait, 100 of the heavy ones; beyond that the response is
  429.
- **Refusals**: of one token, session or address, 10 responses 429 are sent a second, 20 at once; further ones are
  held back, each for up to 30 seconds.
- **Quotas** bound what a tenant has; beyond one the response is 409 `quota-exceeded`, which names it.
  `mobizo-server tenant quota` changes them, and `mobizo-server tenant view` and the dashboard show them. The defaults:
{quotas}
  Beyond `job_events`, progress is shown and adds no event: heartbeats are not refused.
- **CPU, memory**: bounds on the CPU time of one request, how much of it runs on the event loop, where other requests
  wait, and the growth of the process. `tests/server/web/test_hostile_requests.py` sends the largest, deepest, widest
  and most invalid bodies to each route and measures them. The bounds are several times what was measured, since CPUs
  differ. What a request starts beside the server process (compiling, exporting, scoring) is not counted; it has limits
  of its own. Responses are bounded by pages, and by what is stored.
- **Uploads of files** have bounds for each MiB of the body, in addition to the bound of a request without a body;
  `tests/server/web/test_hostile_uploads.py` measures them. The job of the lease bounds the size further:
{uploads}
  A trajectory has at most the steps of its job, 20,000 evaluations and changes of limits, and a fixed cost for each
  of them. At most {readers} trajectories are read at the same time, in threads.

| route | callers | rate | body | CPU (event loop) | memory |
|---|---|---|---|---|---|
"""


def route_page(routes: Iterable[BaseRoute]) -> str:
    """Returns the page in Markdown, with the settings' defaults."""
    settings = Settings.model_construct()
    api_routes = [route for route in routes if isinstance(route, Route)]
    rows = [_row(method, route, settings) for route in api_routes for method in route.methods or ()]
    head = ROUTES_HEAD.format(
        rates=_rates(settings),
        uploads=_uploads(),
        body_seconds=BODY_SECONDS,
        slowest=_size(SLOWEST),
        memory=_size(body_budgets.MEMORY_BYTES),
        uploads_at_once=body_budgets.UPLOADS,
        quotas="\n".join(f"  `{quota}`: {limit:,}." for quota, limit in DEFAULTS.items()),
        readers=READERS.places,
    )
    return head + "".join(sorted(rows))


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
    cells = (f"`{route.path} {method}`", *_callers(route.rule), size, cpu, memory)
    return f"| {' | '.join(cells)} |\n"


def _callers(rule: Rule) -> tuple[str, str]:
    """Returns who may call, in words, and the name of the rate limit."""
    if isinstance(rule, OneTime):
        return "bearer of a one-time token", "refusals"
    if isinstance(rule, Open):
        return "anyone", "address" if rule.limited else "none"
    scopes = " and ".join(f"`{scope}`" for scope in sorted(rule.scopes))
    if isinstance(rule, SignedIn):
        return f"session with {scopes}" if scopes else "session", "token"
    callers = (scopes or "person or service") + (", or device" if rule.devices else "")
    return callers if rule.people else "device", "token"


def _rates(settings: Settings) -> str:
    rates = {
        "token": (settings.token_rate, settings.token_rate * BURST_SECONDS),
        "address": (settings.address_rate, settings.address_rate * BURST_SECONDS),
        "refusals": (REFUSAL_RATE, REFUSAL_BURST),
    }
    lines = [f"  `{name}`: {rate:g} a second, {burst:,} at once." for name, (rate, burst) in rates.items()]
    return "\n".join((*lines, "  `refusals` counts wrong tokens by address, also where the limit is `token`."))


def _uploads() -> str:
    return "\n".join(f"  `{path}`: {cost.size}." for path, cost in UPLOADS.items())


def _size(number: int) -> str:
    whole, unit = (number // MEBIBYTE, "MiB") if number >= MEBIBYTE else (number // _KIBIBYTE, "KiB")
    return f"{whole} {unit}"


PROBLEMS_HEAD = f"""# Problem codes

<!-- python -m tests.docs.server_pages -->

Every error response is `{PROBLEM_JSON}` (RFC 9457). `code` is stable and intended for programs; `type` is
`{PROBLEM_TYPE}` followed by the code; `detail` is intended for people and states the remedy.
[openapi.json](openapi.json) lists the codes of each route.

| code | status | meaning |
|---|---|---|
"""


def _classes(root: type[MobizoError]) -> Iterator[type[MobizoError]]:
    yield root
    for child in root.__subclasses__():
        # A process may hold the agent's errors, too, which have some of the same codes.
        if child.__module__.startswith(("shared.", "server.")):
            yield from _classes(child)


def _codes(document: dict[str, Any]) -> set[str]:
    codes = {MethodNotAllowed.code}
    for operations in document["paths"].values():
        for operation in operations.values():
            for response in operation["responses"].values():
                content = response.get("content", {}).get(PROBLEM_JSON)
                codes |= set(content["schema"]["properties"]["code"]["enum"] if content else ())
    return codes


def problem_page(document: dict[str, Any]) -> str:
    """Returns the page in Markdown."""
    codes = _codes(document)
    rows = sorted((error.status, error.code, (error.__doc__ or "").splitlines()[0]) for error in _classes(MobizoError))
    return PROBLEMS_HEAD + "".join(
        f"| `{code}` | {status} | {text} |\n" for status, code, text in rows if code in codes
    )


BEGIN, END = "<!-- settings: written by python -m tests.docs.server_pages -->", "<!-- end of settings -->"


def table() -> str:
    """Returns a Markdown table with one row per setting, in the order of the class."""
    rows = ["| variable | default | what |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        value = field.get_default(call_default_factory=True)
        description = (field.description or "").replace("|", "\\|")
        rows.append(f"| `MOBIZO_{name.upper()}` | {_formatted(value)} | {description} |")
    return "\n".join(rows)


def _formatted(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Path):
        return f"`{str(value).replace(str(Path.home()), '~', 1)}`"
    if isinstance(value, list):
        return f"`{' '.join(str(word).replace(sys.executable, 'python') for word in value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "none"


FAMILIES_BEGIN = "<!-- families: written by python -m tests.docs.server_pages -->"
FAMILIES_END = "<!-- end of families -->"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 1 << 20,
}


def families() -> str:
    """Returns a Markdown table with one row per supported architecture and the facts of its usual configuration."""
    rows = ["| architecture (`model_type`) | models | what it has | GGUF |", "|---|---|---|---|"]
    for name, architecture in ARCHITECTURES.items():
        spelling = {own: usual for usual, own in architecture.spelling.items()}
        sizes = {spelling.get(size, size): value for size, value in SIZES.items()}
        facts = config_facts({"model_type": name, **sizes})
        rows.append(f"| `{name}` | {architecture.models} | {', '.join(_features(facts))} | {_gguf_name(name)} |")
    rows += [
        f"| `{name}` | the text model of a multimodal model | as `{text}` | {_gguf_name(name)} |"
        for name, text in MULTIMODAL.items()
    ]
    return "\n".join(rows)


def _gguf_name(model_type: str) -> str:
    form = gguf_architecture(model_type)
    return "" if form is None else f"`{form.name}`"


def _features(facts: dict[str, Any]) -> list[str]:
    kinds, norms, learned = facts["attention"], facts["norms"], facts.get("learned_positions", False)
    places = {2: "norms before" if "input_norm" in norms else "norms after", 4: "norms before and after"}
    features = {
        f"{'layer' if facts.get('norm') == 'layer' else 'RMS'} norm": True,
        places.get(len(norms), "one norm"): len(norms) != 2 or "input_norm" not in norms,
        "attention and MLP in parallel": facts.get("parallel", False),
        f"query and key norms by {facts.get('qk_norm')}": facts.get("qk_norm"),
        "after RoPE": facts.get("qk_norm_after_rope"),
        "learned positions": learned,
        "partial RoPE": facts["rotary_dim"] and not learned,
        "interleaved RoPE": facts.get("interleaved"),
        "layers without RoPE": not learned and any(kind.rope is None for kind in kinds),
        "gated short convolutions": "conv_taps" in facts,
        "sliding window": any(kind.window for kind in kinds),
        "soft caps": facts.get("final_softcap"),
        "multipliers": facts["architecture"] in ("granite", "cohere", "cohere2"),
        str(facts["activation"]): facts["activation"] != "silu",
        "MLP without a gate": not facts.get("gated", True),
    }
    return [name for name, present in features.items() if present]


def with_table(document: str, begin: str, rows: str, end: str) -> str:
    """Returns a document with a table inserted between its markers."""
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{rows}\n{end}{after}"


def pages(api: FastAPI) -> dict[Path, str]:
    """Returns every page that follows from the code, by its path."""
    document, operations, programs = api.openapi(), DOCS / "operations.md", DOCS / "programs.md"
    return {
        DOCS / "openapi.json": json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
        DOCS / "problems.md": problem_page(document),
        DOCS / "routes.md": route_page(api.routes),
        operations: with_table(operations.read_text(encoding="utf-8"), BEGIN, table(), END),
        programs: with_table(programs.read_text(encoding="utf-8"), FAMILIES_BEGIN, families(), FAMILIES_END),
    }


if __name__ == "__main__":
    for path, text in pages(create_api()).items():
        path.write_text(text, encoding="utf-8")
