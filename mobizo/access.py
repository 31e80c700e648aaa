"""The client's people and devices: tokens, enrolments, devices that ask to join. Knows their routes."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

from mobizo.connection import Connection
from shared.access import TokenGrant, TokenRequest, TokenView, WhoAmI
from shared.protocol import DeviceRequestView, Enrolment, EnrolmentRequest


class Access(Connection):
    """Who may do what in one tenant; all but `whoami` for its operator."""

    def whoami(self) -> WhoAmI:
        """Whose token this is, and what it may do."""
        return WhoAmI.model_validate(self._get("/v1/whoami"))

    def tokens(self) -> Iterator[TokenView]:
        """Every token of the tenant's people and services, newest first (operator)."""
        for item in self._pages("/v1/tokens"):
            yield TokenView.model_validate(item)

    def make_token(self, request: TokenRequest) -> TokenGrant:
        """A new token, which may do no more than this client's; its text is told this once (operator)."""
        body = request.model_dump(mode="json")
        return TokenGrant.model_validate(self._make("/v1/tokens", body))

    def revoke_token(self, token_id: str) -> None:
        """Ends a token at once (operator)."""
        self._transport.request("DELETE", f"/v1/tokens/{token_id}", retry=False)

    def enrolment(self, request: EnrolmentRequest | None = None) -> Enrolment:
        """A one-time token with which a device may enrol (operator)."""
        body = (request or EnrolmentRequest.model_validate({})).model_dump(mode="json")
        return Enrolment.model_validate(self._make("/v1/enrolments", body))

    def device_request(self, user_code: str) -> DeviceRequestView:
        """The device that shows a code and asks to join (operator). Raises NotFound."""
        return DeviceRequestView.model_validate(self._get(f"/v1/device-requests/{quote(user_code, safe='')}"))

    def decide(self, user_code: str, approved: bool) -> DeviceRequestView:
        """Lets that device into the operator's tenant, or refuses it. Raises NotFound, Conflict."""
        path = f"/v1/device-requests/{quote(user_code, safe='')}/{'approve' if approved else 'deny'}"
        return DeviceRequestView.model_validate(self._transport.request("POST", path).json())
