"""When a person last used a machine, from what logind says of its sessions. Knows no process and no file."""

from __future__ import annotations

from collections.abc import Iterator

SESSION_PROPERTIES = ("Type", "Class", "State", "IdleHint", "IdleSinceHint")
GRAPHICAL = ("x11", "wayland", "mir")


def session_ids(listed: str) -> list[str]:
    """The first word of each line of `loginctl list-sessions --no-legend`."""
    return [line.split()[0] for line in listed.splitlines() if line.split()]


def idle_seconds(shown: str, now: float, boot: float) -> float:
    """Seconds since a person last used any session in `loginctl show-session`'s answer.

    now, boot: seconds since 1970. A terminal tells when it was last read; a desktop tells only once it is idle, so
    that one which does not is in use. Nobody logged in: since boot.
    """
    last = [used for used in (_last_used(session, now) for session in _sessions(shown)) if used is not None]
    return max(now - max(last, default=boot), 0.0)


def _sessions(shown: str) -> Iterator[dict[str, str]]:
    for block in shown.split("\n\n"):
        yield dict(line.split("=", 1) for line in block.splitlines() if "=" in line)


def _last_used(session: dict[str, str], now: float) -> float | None:
    """Seconds since 1970; None for a session that is no person's: a login screen, a service, one that ends."""
    if not session.get("Class", "").startswith("user") or session.get("State") == "closing":
        return None
    graphical = session.get("Type") in GRAPHICAL
    if not graphical and session.get("Type") != "tty":
        return None
    since = session.get("IdleSinceHint", "0")
    if (graphical and session.get("IdleHint") != "yes") or not since.isdecimal() or since == "0":
        return now
    return int(since) / 1e6
