"""Webhooks over the API: events of every kind, signatures that another implementation checks, retries, and bounds."""

import contextlib
from datetime import timedelta

import pytest
from sqlalchemy import select

from server.database.columns import utc_now
from server.identity.quotas import Quota, QuotaService
from server.identity.signing_keys.service import rotate_key
from server.webhooks import delivery, repository
from server.webhooks.repository import Webhook, WebhookDelivery, WebhookRepository, publish
from shared.access import Role
from shared.webhooks import WebhookEvent
from tests.server.federation.conftest import cohort_request
from tests.server.homes import eventually
from tests.server.webhooks.receiver import create, deliveries, types


@pytest.fixture
def cancelled_job(app):
    """Submits a job and cancels it; its id."""

    def cancel():
        job = app.submit()["id"]
        assert app.post(f"/v1/jobs/{job}/cancel").status_code == 200
        return job

    return cancel


@pytest.mark.both_databases
def test_events_of_every_kind_are_sent_and_signed(fleet, app, operator, receiver, work, cancelled_job):
    webhook, secret = create(operator, receiver.url, *WebhookEvent)
    device = fleet.device()
    fleet.ready_job(app)
    device.finish(device.lease())
    cancelled = cancelled_job()
    operator.post("/v1/cohorts", json=cohort_request(quorum=1))
    member = operator.put("/v1/cohorts/readers/members/alice", json={"device": device.device_id})
    assert member.status_code == 200, member.text
    assert operator.post("/v1/cohorts/readers/rounds").status_code == 201
    assert operator.post("/v1/cohorts/readers/rounds/1/close").status_code == 200
    operator.post(f"/v1/devices/{device.device_id}/revoke")
    work()
    messages = receiver.verified(secret)
    assert {message["type"] for message in messages} >= {
        *("device.enrolled", "device.revoked", "version.published", "job.succeeded", "job.cancelled"),
        *("cohort.joined", "cohort.round_opened", "cohort.round_abandoned"),
    }
    data = {message["type"]: message["data"] for message in messages}
    assert data["version.published"] == {"adapter": "alice-movies", "version": 1, "main": 1, "reason": ""}
    assert (data["job.succeeded"]["adapter"], data["job.succeeded"]["adapter_version"]) == ("alice-movies", 1)
    assert data["device.revoked"] == {"id": device.device_id, "name": "phone"}
    assert cancelled in [message["data"]["id"] for message in messages if message["type"] == "job.cancelled"]
    log = deliveries(operator, webhook)
    assert [entry["id"] for entry in log] == receiver.ids()
    assert {(entry["state"], entry["attempts"], entry["status"]) for entry in log} == {("delivered", 1, 204)}


def test_an_event_that_is_rolled_back_is_not_sent(home, app, receiver, work):
    webhook, _ = create(app, receiver.url, "job.failed")
    with contextlib.suppress(ZeroDivisionError), home.database.writing() as session:
        publish(session, "default", "job.failed", {})
        assert len(WebhookRepository(session).due(utc_now())) == 1
        raise ZeroDivisionError
    work()
    assert deliveries(app, webhook) == []
    assert receiver.messages == []


@pytest.mark.both_databases
def test_a_message_that_failed_is_sent_again_without_the_environments_proxy(
    app, receiver, work, cancelled_job, monkeypatch
):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    webhook, secret = create(app, receiver.url, "job.cancelled")
    receiver.statuses = [500, 503]
    cancelled_job()
    work()
    assert len(set(receiver.ids())) == 1
    assert len(receiver.verified(secret)) == 3
    (entry,) = deliveries(app, webhook)
    assert (entry["state"], entry["attempts"], entry["error"]) == ("delivered", 3, None)
    assert app.get(f"/v1/webhooks/{webhook}").json()["failing_since"] is None


def test_a_message_that_always_fails_ends_and_others_are_sent(app, receiver, work, cancelled_job):
    webhook, _ = create(app, receiver.url, "job.cancelled")
    receiver.statuses = [500] * (len(delivery.RETRY_SECONDS) + 1)
    cancelled_job()
    work()
    cancelled_job()
    work()
    first, second = deliveries(app, webhook)
    assert (first["state"], first["attempts"], first["status"]) == ("failed", len(delivery.RETRY_SECONDS) + 1, 500)
    assert first["error"] == "the receiver answered 500"
    assert second["state"] == "delivered"


@pytest.mark.both_databases
def test_a_message_of_a_killed_worker_is_sent_by_another(app, receiver, start_worker, cancelled_job):
    webhook, secret = create(app, receiver.url, "job.cancelled")
    receiver.open.clear()
    first = start_worker()
    cancelled_job()
    eventually(lambda: receiver.messages)
    first.kill()
    receiver.open.set()
    start_worker()
    eventually(lambda: deliveries(app, webhook)[0]["state"] == "delivered")
    assert len(receiver.verified(secret)) == 2
    assert len(set(receiver.ids())) == 1


def test_a_webhook_that_fails_for_days_is_disabled_until_a_test_succeeds(
    app, receiver, work, cancelled_job, monkeypatch
):
    monkeypatch.setattr(delivery, "DISABLED_AFTER", timedelta(seconds=-1))
    webhook, _ = create(app, receiver.url, "job.cancelled")
    receiver.statuses = [500]
    cancelled_job()
    cancelled_job()
    work()
    (view,) = app.get("/v1/webhooks").json()["items"]
    assert view["disabled_at"] is not None
    assert [(entry["state"], entry["attempts"]) for entry in deliveries(app, webhook)] == [("failed", 1), ("failed", 0)]
    cancelled_job()
    assert len(deliveries(app, webhook)) == 2
    assert app.post(f"/v1/webhooks/{webhook}/test").status_code == 202
    work()
    assert app.get(f"/v1/webhooks/{webhook}").json()["disabled_at"] is None
    assert types(receiver.messages) == ["job.cancelled", "webhook.test"]


def test_webhooks_of_one_tenant_get_no_events_of_another(fleet, receiver, work, cancelled_job):
    other = fleet.app("other")
    webhook, _ = create(other, receiver.url, "job.cancelled")
    cancelled_job()
    work()
    assert deliveries(other, webhook) == []
    assert other.delete(f"/v1/webhooks/{webhook}").status_code == 204
    assert other.get("/v1/webhooks").json()["items"] == []


def test_events_need_the_scopes_of_their_data(home, fleet, app, problem):
    body = {"url": "https://shop.example", "events": ["device.enrolled", "job.failed"]}
    document = problem(app.post("/v1/webhooks", json=body), 403, "forbidden")
    assert document["missing"] == ["devices:read"]
    assert fleet.operator().post("/v1/webhooks", json=body).status_code == 201


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"events": ["job.finished"]}, "invalid-request"),
        ({"events": []}, "invalid-request"),
        ({"url": "ftp://shop.example"}, "invalid-request"),
        ({"url": "https://10.0.0.1/hook"}, "webhook-address-refused"),
        ({"url": "https://user:password@shop.example"}, "webhook-address-refused"),
    ],
)
def test_bad_input_is_one_clear_problem(app, problem, change, code):
    body = {"url": "https://shop.example/hook", "events": ["job.failed"]} | change
    problem(app.post("/v1/webhooks", json=body), 422, code)
    assert app.get("/v1/webhooks").json()["items"] == []


@pytest.mark.both_databases
def test_webhooks_and_their_messages_are_bounded(home, app, receiver, problem, work, cancelled_job, monkeypatch):
    with home.database.writing() as session:
        QuotaService(session).set_limit("default", Quota.WEBHOOKS, 1)
    webhook, _ = create(app, receiver.url, "job.cancelled")
    second = app.post("/v1/webhooks", json={"url": receiver.url, "events": ["job.failed"]})
    assert problem(second, 409, "quota-exceeded")["quota"] == "webhooks"
    monkeypatch.setattr(repository, "MAX_WAITING", 2)
    monkeypatch.setattr(repository, "MAX_ENDED", 1)
    for _ in range(3):
        cancelled_job()
    assert len(deliveries(app, webhook)) == 2
    problem(app.post(f"/v1/webhooks/{webhook}/test"), 409, "conflict")
    work()
    assert len(receiver.messages) == 2
    (kept,) = deliveries(app, webhook)
    assert kept["id"] == receiver.ids()[-1]
    assert app.delete(f"/v1/webhooks/{webhook}").status_code == 204
    assert home.scalars(select(WebhookDelivery)) == []


def test_secrets_are_stored_encrypted_and_follow_the_signing_key(home, app, receiver, work, cancelled_job):
    webhook, secret = create(app, receiver.url, "job.cancelled")
    assert secret.encode() not in home.scalar(select(Webhook.sealed))
    rotate_key(home.database, home.settings, compromised=False)
    cancelled_job()
    work()
    assert len(receiver.verified(secret)) == 1
    rotate_key(home.database, home.settings, compromised=True)
    assert app.get(f"/v1/webhooks/{webhook}").json()["disabled_at"] is not None


def test_an_app_may_manage_webhooks_and_a_scope_is_enough(home, fleet):
    operator = fleet.operator()
    token = operator.post("/v1/tokens", json={"scopes": ["webhooks:write", "jobs:read"]}).json()["token"]
    create(fleet.actor(token), "https://shop.example", "job.failed")
    create(fleet.actor(home.token(Role.APP)), "https://shop.example", "version.held", "cohort.joined")
    assert len(operator.get("/v1/webhooks").json()["items"]) == 2
