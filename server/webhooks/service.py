"""Creating, testing and deleting webhooks, and their secrets.

A secret is stored encrypted (AES-256-GCM) under a key derived from the server's signing key, so the database alone
signs no message.
"""

from __future__ import annotations

import base64
import secrets

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy.orm import Session

from server.database.columns import new_id, utc_now
from server.identity.quotas import Quota, QuotaService
from server.identity.signing_keys.service import KeyService
from server.identity.tokens import Principal
from server.settings import Settings
from server.webhooks.repository import MAX_WAITING, Webhook, WebhookDelivery, WebhookRepository
from server.webhooks.sending import SECRET_PREFIX, check_url
from shared.errors import Conflict, Forbidden, NotFound
from shared.signing import private_bytes
from shared.webhooks import EVENT_SCOPES, TEST_EVENT, WebhookRequest

SECRET_BYTES, NONCE_BYTES = 32, 12


class WebhookService:
    """Webhooks of one caller's tenant, in one transaction."""

    def __init__(self, session: Session, settings: Settings, principal: Principal) -> None:
        self._session, self._settings, self._principal = session, settings, principal
        self._webhooks = WebhookRepository(session)

    def create(self, request: WebhookRequest) -> tuple[Webhook, str]:
        """Creates a webhook; returns it with its secret, which is shown once.

        Raises WebhookAddressRefused, Forbidden for events that the caller may not read, QuotaExceeded.
        """
        check_url(request.url, self._settings.webhook_networks)
        needed = {EVENT_SCOPES[event.partition(".")[0]] for event in request.events}
        if missing := sorted(needed - self._principal.scopes):
            raise Forbidden(f"the token lacks the scopes of these events: {', '.join(missing)}", missing=missing)
        key = KeyService(self._session, self._settings).private()
        secret = SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
        now, webhook_id, tenant = utc_now(), new_id("webhook"), self._principal.tenant
        webhook = Webhook(
            id=webhook_id,
            tenant=tenant,
            url=request.url,
            events=sorted(set(request.events)),
            sealed=seal(key, webhook_id, secret),
            created_at=now,
            due_at=now,
            failures=0,
        )
        self._session.add(webhook)
        self._session.flush()
        QuotaService(self._session).check(tenant, Quota.WEBHOOKS, lambda: self._webhooks.count(tenant))
        return webhook, secret

    def get(self, webhook_id: str) -> Webhook:
        """Returns a webhook. Raises NotFound."""
        webhook = self._webhooks.get(self._principal.tenant, webhook_id)
        if webhook is None:
            raise NotFound(f"there is no webhook {webhook_id!r}")
        return webhook

    def test(self, webhook_id: str) -> WebhookDelivery:
        """Stores a test message, which is sent once. Raises NotFound, or Conflict if too many messages wait."""
        webhook = self.get(webhook_id)
        delivery = self._webhooks.add_delivery(webhook, TEST_EVENT, {"webhook": webhook.id})
        if delivery is None:
            raise Conflict(f"{MAX_WAITING} messages of this webhook wait; test it once they were sent or have failed")
        return delivery


def _cipher(key: Ed25519PrivateKey) -> AESGCM:
    return AESGCM(HKDF(SHA256(), length=32, salt=None, info=b"mobizo\nwebhook secrets").derive(private_bytes(key)))


def seal(key: Ed25519PrivateKey, webhook_id: str, secret: str) -> bytes:
    """Returns a webhook's secret, encrypted. key: the server's signing key."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _cipher(key).encrypt(nonce, secret.encode(), webhook_id.encode())


def unseal(key: Ed25519PrivateKey, webhook: Webhook) -> str:
    """Returns the secret of a webhook. Raises InvalidTag if it was encrypted under another key."""
    nonce, sealed = webhook.sealed[:NONCE_BYTES], webhook.sealed[NONCE_BYTES:]
    return _cipher(key).decrypt(nonce, sealed, webhook.id.encode()).decode()


def reseal(session: Session, former: Ed25519PrivateKey | None, following: Ed25519PrivateKey) -> None:
    """Encrypts all secrets under the next signing key.

    former: None: it is compromised, and the secrets with it, so all webhooks are disabled.
    """
    for webhook in WebhookRepository(session).all():
        if former is None:
            webhook.disabled_at = webhook.disabled_at or utc_now()
        else:
            webhook.sealed = seal(following, webhook.id, unseal(former, webhook))
