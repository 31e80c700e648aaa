"""`client.devices`: enrollment of devices, and the users whose jobs they train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import quote

from mobizo.connection import Resource
from shared.protocol import DeviceChange, DeviceView, Enrollment, EnrollmentRequest


class Devices(Resource):
    """Enrollment of devices by one-time tokens. Requires an operator's token."""

    def create_enrollment_token(self, request: EnrollmentRequest | None = None) -> Enrollment:
        """Creates a one-time token with which one device can enroll.

        request: how long the token is valid, in seconds, and the users whose data is on the device; None: one hour, and
        no users, so that the device gets no job until `bind` names one.
        """
        body = (request or EnrollmentRequest.model_validate({})).model_dump(mode="json")
        return self._connection.create(Enrollment, "/v1/enrollments", body)

    def list(self) -> Iterator[DeviceView]:
        """Yields the tenant's devices, newest first."""
        return self._connection.pages(DeviceView, "/v1/devices")

    def get(self, device_id: str) -> DeviceView:
        """Returns a device. Raises NotFound."""
        return self._connection.get(DeviceView, _device_path(device_id))

    def label(self, device_id: str, labels: Mapping[str, str | None]) -> DeviceView:
        """Sets labels of a device, by which jobs may select it; None removes a label. Others stay. Raises NotFound."""
        change = DeviceChange(labels=dict(labels))
        body = change.model_dump(mode="json")
        return self._connection.send(DeviceView, "PATCH", _device_path(device_id), body)

    def bind(self, device_id: str, user: str) -> DeviceView:
        """Binds a user to a device, which then gets the user's jobs. Raises NotFound, or Conflict at 100 users."""
        return self._connection.send(DeviceView, "PUT", _binding_path(device_id, user))

    def unbind(self, device_id: str, user: str) -> None:
        """Unbinds a user from a device; the user's jobs on it return to the queue. Raises NotFound."""
        self._connection.transport.request("DELETE", _binding_path(device_id, user))

    def revoke(self, device_id: str) -> DeviceView:
        """Revokes a device at once; its jobs return to the queue. Raises NotFound."""
        return self._connection.send(DeviceView, "POST", f"{_device_path(device_id)}/revoke")


def _device_path(device_id: str) -> str:
    return f"/v1/devices/{quote(device_id, safe='')}"


def _binding_path(device_id: str, user: str) -> str:
    return f"{_device_path(device_id)}/users/{quote(user, safe='')}"
