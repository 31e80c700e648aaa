"""`client.devices`: enrollment of devices."""

from __future__ import annotations

from urllib.parse import quote

from mobizo.connection import Connection
from shared.protocol import DeviceRequestView, Enrollment, EnrollmentRequest


class Devices:
    """Enrollment of devices, by a one-time token or by a code that the device shows. Requires an operator's token.

    user_code: the code that a device shows; letter case and dashes are ignored. Methods with a `user_code` raise
    NotFound if no device is waiting with this code.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create_enrollment_token(self, request: EnrollmentRequest | None = None) -> Enrollment:
        """Creates a one-time token with which one device can enroll.

        request: how long the token is valid, in seconds; None: one hour.
        """
        body = (request or EnrollmentRequest.model_validate({})).model_dump(mode="json")
        return Enrollment.model_validate(self._connection.create("/v1/enrollments", body))

    def get_request(self, user_code: str) -> DeviceRequestView:
        """Returns the enrollment request of the device that shows this code."""
        return DeviceRequestView.model_validate(self._connection.get(_request_path(user_code)))

    def approve(self, user_code: str) -> DeviceRequestView:
        """Lets the device join the tenant. Raises Conflict if the request was denied before."""
        return DeviceRequestView.model_validate(self._connection.send("POST", f"{_request_path(user_code)}/approve"))

    def deny(self, user_code: str) -> DeviceRequestView:
        """Rejects the device's request. Raises Conflict if the request was approved before."""
        return DeviceRequestView.model_validate(self._connection.send("POST", f"{_request_path(user_code)}/deny"))


def _request_path(user_code: str) -> str:
    return f"/v1/device-requests/{quote(user_code, safe='')}"
