"""Renders the pages: templates, their filters, the navigation of a session, and the headers of every page."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from server.dashboard.assets import accepts_gzip, asset_url
from server.dashboard.sessions import csrf_token
from server.database.columns import utc_now
from server.identity.tokens import Principal
from shared.access import Scope
from shared.job import JobState
from shared.result import Result

HTML = "text/html"
COMPRESSED_FROM = 1024  # bytes; smaller pages fit one packet anyway
CONTENT_POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NOTHING = "\N{EN DASH}"  # for a value that is not known
LOGIN = "/ui/login"
# (title, address, scope without which it is not shown)
NAVIGATION: tuple[tuple[str, str, Scope | None], ...] = (
    ("Overview", "/", None),
    ("Jobs", "/ui/jobs", Scope.JOBS_READ),
    ("Devices", "/ui/devices", Scope.DEVICES_READ),
    ("Adapters", "/ui/adapters", Scope.ADAPTERS_READ),
    ("Cohorts", "/ui/cohorts", Scope.COHORTS_READ),
    ("Programs", "/ui/programs", Scope.JOBS_READ),
    ("Operations", "/ui/operations", None),
)
# What a page says after an action; the address names only the key.
NOTES = {
    "submitted": "The job is submitted.",
    "cancelled": "The job is cancelled.",
    "device-revoked": "The device is revoked. Its jobs are back in the queue.",
    "approved": "The version is approved.",
    "deleted": "The version is deleted.",
    "promoted": "The version is main now.",
    "rated": "The rating is stored, with the prompt and the text.",
    "round-opened": "The round is open.",
    "round-closed": "The round is closed.",
    "token-revoked": "The token is revoked.",
    "webhook-test": "The test is sent within seconds. Reload the page to see its outcome.",
    "signed-out": "You are signed out.",
}
# The colour of a state, which is always shown with its word.
TONES = {
    **dict.fromkeys(
        ("succeeded", "ready", "approved", "used", "published", "online", "counted", "done", "ok", "delivered"), "good"
    ),
    **dict.fromkeys(("training", "compiling", "running", "open", "aggregating", "converting"), "busy"),
    **dict.fromkeys(("queued", "waiting", "pending", "held", "deprecated", "idle", "missed"), "wait"),
    **dict.fromkeys(("failed", "denied", "revoked", "abandoned", "deleted", "expired"), "bad"),
}
JOB_TONES = {JobState.READY: "wait"}


def _moment(value: datetime | None, absent: str = "never") -> Markup:
    """A time as its distance from now, with the exact time in its title."""
    if value is None:
        return Markup.escape(absent)
    exact = value.isoformat(timespec="seconds").replace("+00:00", "Z")
    text = distance((utc_now() - value).total_seconds())
    return Markup('<time datetime="{}" title="{}">{}</time>').format(exact, exact.replace("T", " "), text)


def distance(seconds: float) -> str:
    """Returns the distance of a moment in words; negative seconds lie in the future."""
    if abs(seconds) < 1:
        return "now"
    text = duration(int(abs(seconds)))
    return f"{text} ago" if seconds > 0 else f"in {text}"


def duration(seconds: float | None) -> str:
    """Returns a duration with its largest unit, and the next one where that matters: 45 s, 3 min 20 s, 5 h 12 min."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == int(seconds) else f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller, small in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            first, rest = divmod(whole, size)
            second = rest // smaller
            return f"{first} {unit} {second} {small}" if second and first < 10 else f"{first} {unit}"
    raise AssertionError("unreachable")


def size(number: float | None) -> str:
    """Returns bytes in a decimal unit with three digits."""
    if number is None:
        return NOTHING
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def percent(share: float | None) -> str:
    """Returns a share in percent with one digit."""
    return NOTHING if share is None else f"{share:.1%}"


def before(result: Result | None) -> str:
    """Returns the score before training: an accuracy, or a perplexity of a task that writes text."""
    if result is None:
        return NOTHING
    perplexities = result.perplexities
    return percent(result.before_accuracy) if perplexities is None else f"perplexity {perplexities[0]:.1f}"


def after(result: Result | None) -> str:
    """Returns the score of the trained adapter, as `before`, and on which examples both were measured."""
    if result is None:
        return NOTHING
    perplexities = result.perplexities
    score = percent(result.tuned_accuracy) if perplexities is None else f"perplexity {perplexities[1]:.1f}"
    return f"{score} ({result.accuracy_split})" if result.accuracy_split and score != NOTHING else score


def plain(value: Any) -> str:
    """Returns a setting's value as text: lists with commas, other documents as JSON."""
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return ", ".join(map(plain, value))
    return json.dumps(value, ensure_ascii=False)


def figure(number: float | None, digits: int = 3) -> str:
    """Returns a number with some significant digits."""
    if number is None:
        return NOTHING
    whole = isinstance(number, int) or (number.is_integer() and abs(number) >= 1000)
    return f"{number:,.0f}" if whole else f"{number:.{digits}g}"


def code(text: str) -> Markup:
    """Returns a text whose parts between backticks are shown as code."""
    quoted = Markup("<code>{}</code>")
    parts = enumerate(text.split("`"))
    return Markup().join(quoted.format(part) if number % 2 else part for number, part in parts)


def _state(word: object, tone: str | None = None) -> Markup:
    """A state as a word with a colour."""
    text = str(word)
    tone = tone or (JOB_TONES.get(word) if isinstance(word, JobState) else None) or TONES.get(text, "none")
    return Markup('<span class="state {}">{}</span>').format(tone, text)


@cache
def environment() -> Environment:
    """Returns the templates; every value is escaped, and an unknown name is an error."""
    templates = Environment(
        loader=FileSystemLoader(str(files("server.dashboard").joinpath("templates"))),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "moment": _moment,
        "duration": duration,
        "size": size,
        "percent": percent,
        "before": before,
        "after": after,
        "plain": plain,
        "figure": figure,
        "code": code,
        "state": _state,
    }
    templates.globals |= {"asset": asset_url, "Scope": Scope}
    return templates


@dataclass(frozen=True)
class Visitor:
    """A person with a session, and their request. secret: the session's, from the cookie."""

    principal: Principal
    secret: str
    request: Request

    def may(self, *scopes: Scope) -> bool:
        """Whether the token of the session has all these scopes."""
        return self.principal.scopes.issuperset(scopes)

    def page(self, template: str, title: str, status: int = 200, **context: Any) -> HTMLResponse:
        """Returns a page for this person."""
        return page(self.request, self, template, title, status, **context)


def page(
    request: Request, visitor: Visitor | None, template: str, title: str, status: int = 200, **context: Any
) -> HTMLResponse:
    """Returns a page. visitor: whose session it is; None: a page without a session."""
    section = "/" + "/".join(request.url.path.split("/")[1:3])
    links = [
        {"title": name, "url": url, "current": url == (section if section != "/ui" else "/")}
        for name, url, scope in NAVIGATION
        if visitor is not None and (scope is None or visitor.may(scope))
    ]
    text = (
        environment()
        .get_template(template)
        .render(
            title=title,
            visitor=visitor,
            may=visitor.may if visitor is not None else lambda *scopes: False,
            csrf="" if visitor is None else csrf_token(visitor.secret),
            links=links,
            note=NOTES.get(request.query_params.get("note", "")),
            request=request,
            server_url=str(request.base_url).rstrip("/"),
            **context,
        )
    )
    return HTMLResponse(text, status)


def redirect(url: str, note: str | None = None) -> RedirectResponse:
    """Returns the answer to a form that was processed: the page to show, with a note."""
    return RedirectResponse(url if note is None else f"{url}{'&' if '?' in url else '?'}note={note}", 303)


def return_path(text: str) -> str:
    """Returns the page to show after signing in: `text` if it is a page of this server, otherwise the overview."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return "/"
    is_local = not parts.scheme and not parts.netloc and text.startswith("/") and not text.startswith("//")
    clean = "\\" not in text and all(" " < sign < "\x7f" for sign in text) and len(text) < 2000
    if not is_local or not clean or parts.path.startswith((LOGIN, "/ui/logout")):
        return "/"
    return text if parts.path == "/" or parts.path.startswith("/ui/") else "/"


def finished(request: Request, response: Response) -> Response:
    """Returns a response with the headers of every page, compressed if it is a page and the browser accepts that."""
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    if response.headers.get("content-type", "").startswith(HTML):
        response.headers["Cache-Control"] = "no-store"
        response.headers["Vary"] = "Accept-Encoding, Cookie"
        if accepts_gzip(request) and len(response.body) >= COMPRESSED_FROM:
            response.body = gzip.compress(bytes(response.body), 6)
            response.headers["Content-Encoding"] = "gzip"
            response.headers["Content-Length"] = str(len(response.body))
    return response
