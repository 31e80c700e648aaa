"""The server's own test server, for its client."""

from tests.server.conftest import app, device, fleet, home, home_template, operator, standing

__all__ = ["app", "device", "fleet", "home", "home_template", "operator", "standing"]
