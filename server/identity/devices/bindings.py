"""Which users a device trains for: operators bind users to devices, and devices get jobs of their users only.

Submitters name users freely, and enrolled devices name their data sets freely. A binding is what connects the two, and
only an operator makes one: when it creates the enrollment token, approves the device, or later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.identity.devices.repository import BindingRepository, Device
from server.ports import Port
from server.settings import Settings
from shared.errors import Conflict, DeviceNotBound
from shared.protocol import MOST_USERS

# Take back what a device has of a user who was unbound from it, given the device's id and the user.
UNBOUND: Port[tuple[Callable[[Session, Settings, str, str], None], ...]] = Port("devices.unbound")


class BindingService:
    """Bindings in one writing transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._bindings = BindingRepository(session)

    def bind(self, device: Device, users: Iterable[str]) -> None:
        """Binds users to a device, which is locked or new. Idempotent. Raises Conflict for too many users."""
        new = frozenset(users) - self._bindings.users(device.id)
        if len(self._bindings.users(device.id)) + len(new) > MOST_USERS:
            raise Conflict(f"device {device.name} would have more than {MOST_USERS} users; unbind others first")
        self._bindings.add(device.id, sorted(new), utc_now())

    def unbind(self, device: Device, user: str, settings: Settings) -> None:
        """Unbinds a user from a device, which is locked, and takes back the user's jobs. Idempotent."""
        if self._bindings.remove(device.id, user):
            for take_back in UNBOUND.get():
                take_back(self._session, settings, device.id, user)

    def check(self, device_id: str, *users: str) -> None:
        """Raises DeviceNotBound unless a device trains for each of these users."""
        bound = self._bindings.users(device_id)
        for user in users:
            if user not in bound:
                raise DeviceNotBound(
                    f"device {device_id} is not bound to user {user!r}; if the user's data is on it, an operator runs "
                    f"`mobizo devices bind {device_id} {user}`"
                )
