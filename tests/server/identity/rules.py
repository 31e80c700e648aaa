"""What each route asks of its caller, found in the application itself: every route, and the rule in its tree."""

import inspect
from dataclasses import dataclass

from fastapi.routing import APIRoute
from starlette.routing import Mount

from server.identity.access_rules import Rule


@dataclass(frozen=True)
class Found:
    """A route of the application: its methods and path, its rules, and whether a transaction begins before them."""

    method: str
    path: str
    rules: tuple[object, ...]
    late: bool

    @property
    def name(self):
        return f"{self.method} {self.path}"


def _calls(dependant):
    """Every dependency, in the order in which FastAPI resolves them."""
    for child in dependant.dependencies:
        yield from _calls(child)
        yield child.call


def _every(routes, prefix=""):
    """(path, route) of routes, of those of included routers, and of mounted applications."""
    for route in routes:
        if isinstance(route, Mount):
            yield prefix + route.path, route
        elif hasattr(route, "original_router"):
            yield from _every(route.original_router.routes, prefix + route.include_context.prefix)
        else:
            yield prefix + route.path, route


def found_routes(app):
    """Every route of an application, one for each method; plain ones and mounted applications have no rules."""
    for path, route in _every(app.routes):
        calls = list(_calls(route.dependant)) if isinstance(route, APIRoute) else []
        # What a route takes may ask who calls as well: that is the same rule again, and is not asked twice.
        rules = tuple(dict.fromkeys(call for call in calls if isinstance(call, Rule)))
        before = calls[: calls.index(rules[0])] if rules else []
        late = any(inspect.isgeneratorfunction(call) for call in before)
        for method in sorted(getattr(route, "methods", None) or {"ANY"}):
            # As the description writes it: without the kind of a parameter.
            yield Found(method, path.replace(":path}", "}"), rules, late)
