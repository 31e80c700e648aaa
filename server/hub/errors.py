"""What the Hub's API refuses that nobody else does. Knows no HTTP library."""

from __future__ import annotations

from shared.errors import Forbidden


class NotReleased(Forbidden):
    """No version of this adapter is approved, so it has no `main`; approve one, or name a version."""

    code, title = "not-released", "No approved version"
