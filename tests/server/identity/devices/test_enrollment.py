"""The device authorization grant over HTTP, by requests put together from RFC 8628's text."""

from datetime import timedelta
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select, update

from server.identity.devices.authorization import DeviceRequest
from server.identity.oauth import format_user_code, new_user_code, read_user_code
from shared.signing import fingerprint, new_private_key, public_text
from tests.server.homes import at_once

GRANT = "urn:ietf:params:oauth:grant-type:device_code"
KEY = public_text(new_private_key().public_key())
FIELDS = {"client_id": "mobizo-agent", "device_name": "phone", "public_key": KEY, "platform": "linux <b>"}


class Joining:
    """A device that asks to join, with a clock that the test turns."""

    def __init__(self, fleet):
        self.fleet, self.actor = fleet, fleet.actor()

    def form(self, path, fields):
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return self.actor.post(path, content=urlencode(fields), headers=headers)

    def ask(self, **changes):
        answer = self.form("/v1/oauth/device_authorization", FIELDS | changes)
        assert answer.status_code == 200, answer.text
        assert answer.headers["cache-control"] == "no-store"
        return answer.json()

    def poll(self, code, **changes):
        fields = {"grant_type": GRANT, "device_code": code, "client_id": "mobizo-agent"} | changes
        return self.form("/v1/oauth/token", fields)

    def later(self, seconds):
        """Puts every request's times into the past."""
        with self.fleet.home.database.writing() as session:
            for request in session.scalars(select(DeviceRequest)):
                request.expires_at -= timedelta(seconds=seconds)
                if request.polled_at is not None:
                    request.polled_at -= timedelta(seconds=seconds)

    def assert_refused(self, answer, error, status=400):
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json()["error"] == error, answer.text
        assert answer.json()["error_description"]


@pytest.fixture
def joining(fleet):
    return Joining(fleet)


def test_a_device_that_an_operator_lets_in(fleet, joining, operator):
    authorization = joining.ask()
    assert set(authorization) == {
        *("device_code", "user_code", "verification_uri", "verification_uri_complete", "expires_in", "interval")
    }
    assert authorization["verification_uri"] == f"{fleet.url}/device"
    assert authorization["verification_uri_complete"] == f"{fleet.url}/device?user_code={authorization['user_code']}"
    assert (authorization["expires_in"], authorization["interval"]) == (900, 5)
    joining.assert_refused(joining.poll(authorization["device_code"]), "authorization_pending")
    code = authorization["user_code"].lower().replace("-", "")
    view = operator.get(f"/v1/device-requests/{code}").json()
    assert (view["name"], view["platform"], view["address"]) == ("phone", "linux <b>", "127.0.0.1")
    assert (view["state"], view["fingerprint"]) == ("pending", fingerprint(KEY))
    for _ in range(2):
        assert operator.post(f"/v1/device-requests/{code}/approve").json()["state"] == "approved"
    joining.later(5)
    granted = joining.poll(authorization["device_code"])
    assert granted.status_code == 200
    assert granted.headers["cache-control"] == "no-store"
    grant = granted.json()
    assert grant["token_type"] == "Bearer"
    assert grant["server"] == fleet.actor().get("/v1/server").json()
    (device,) = operator.get("/v1/devices").json()["items"]
    assert (device["id"], device["name"]) == (grant["device_id"], "phone")
    assert fleet.actor(grant["access_token"]).post("/v1/leases", json={"datasets": []}).status_code == 204
    joining.later(5)
    joining.assert_refused(joining.poll(authorization["device_code"]), "invalid_grant")
    assert operator.get(f"/v1/device-requests/{code}").json()["device_id"] == grant["device_id"]


def test_neither_code_is_kept_in_clear_that_opens_anything(fleet, joining):
    authorization = joining.ask()
    with fleet.home.database.reading() as session:
        (row,) = session.scalars(select(DeviceRequest))
        text = " ".join(str(getattr(row, column.key)) for column in DeviceRequest.__table__.columns)
    assert authorization["device_code"] not in text
    assert authorization["device_code"].split("-")[-1] not in text


def test_it_joins_the_operators_tenant_and_no_other_sees_it_any_more(fleet, joining, operator, problem):
    authorization = joining.ask()
    other = fleet.operator("other")
    path = f"/v1/device-requests/{authorization['user_code']}"
    assert other.get(path).status_code == 200
    assert other.post(f"{path}/approve").status_code == 200
    problem(operator.get(path), 404, "not-found")
    problem(operator.post(f"{path}/deny"), 404, "not-found")
    grant = joining.poll(authorization["device_code"]).json()
    assert [device["id"] for device in other.get("/v1/devices").json()["items"]] == [grant["device_id"]]
    assert operator.get("/v1/devices").json()["items"] == []


def test_a_device_that_is_refused(joining, operator, problem):
    authorization = joining.ask()
    path = f"/v1/device-requests/{authorization['user_code']}"
    assert operator.post(f"{path}/deny").json()["state"] == "denied"
    problem(operator.post(f"{path}/approve"), 409, "conflict")
    joining.assert_refused(joining.poll(authorization["device_code"]), "access_denied")
    joining.later(5)
    joining.assert_refused(joining.poll(authorization["device_code"]), "access_denied")
    assert operator.get("/v1/devices").json()["items"] == []


def test_one_that_asks_too_often_must_ask_ever_slower(joining):
    code = joining.ask()["device_code"]
    joining.assert_refused(joining.poll(code), "authorization_pending")
    joining.assert_refused(joining.poll(code), "slow_down")
    joining.later(6)  # the interval is 10 s by now
    joining.assert_refused(joining.poll(code), "slow_down")
    joining.later(16)
    joining.assert_refused(joining.poll(code), "authorization_pending")


def test_so_many_devices_wait_and_no_more(fleet, joining, monkeypatch):
    monkeypatch.setattr("server.identity.devices.authorization.WAITING_PER_ADDRESS", 2)
    monkeypatch.setattr("server.identity.devices.authorization.WAITING_IN_ALL", 3)
    for _ in range(2):
        joining.ask()
    joining.assert_refused(joining.form("/v1/oauth/device_authorization", FIELDS), "slow_down", 429)
    with fleet.home.database.writing() as session:
        session.execute(update(DeviceRequest).values(address="192.0.2.1"))
    joining.ask()
    joining.assert_refused(joining.form("/v1/oauth/device_authorization", FIELDS), "slow_down", 429)


def test_a_code_that_is_over(joining, operator, problem):
    authorization = joining.ask()
    joining.later(901)
    joining.assert_refused(joining.poll(authorization["device_code"]), "expired_token")
    for answer in (
        operator.get(f"/v1/device-requests/{authorization['user_code']}"),
        operator.post(f"/v1/device-requests/{authorization['user_code']}/approve"),
    ):
        problem(answer, 404, "not-found")
    joining.later(3600)
    joining.ask()
    joining.assert_refused(joining.poll(authorization["device_code"]), "invalid_grant")


@pytest.mark.both_databases
def test_of_many_who_ask_at_once_one_gets_the_token(fleet, joining, operator):
    authorization = joining.ask()
    operator.post(f"/v1/device-requests/{authorization['user_code']}/approve")
    answers = at_once(*(lambda number=number: Joining(fleet).poll(authorization["device_code"]) for number in range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] + [400] * 5
    assert {answer.json()["error"] for answer in answers if answer.status_code == 400} == {"invalid_grant"}
    assert len(operator.get("/v1/devices").json()["items"]) == 1


def test_an_address_may_have_so_many_devices_wait(fleet, joining, operator):
    codes = [joining.ask()["user_code"] for _ in range(20)]
    answer = joining.form("/v1/oauth/device_authorization", FIELDS)
    joining.assert_refused(answer, "slow_down", 429)
    assert int(answer.headers["retry-after"]) > 0
    operator.post(f"/v1/device-requests/{codes[0]}/deny")
    joining.ask()
    with fleet.home.database.writing() as session:
        session.execute(update(DeviceRequest).values(address="192.0.2.1"))
    joining.ask()


@pytest.mark.parametrize(
    "changes",
    [
        {"client_id": ""},
        {"device_name": "No Spaces"},
        {"device_name": "a\0b"},
        {"public_key": "AAAA"},
        {"public_key": "é" * 44},
        {"platform": "x" * 201},
    ],
    ids=repr,
)
def test_a_bad_request_to_join_leaves_nothing(fleet, joining, changes):
    joining.assert_refused(joining.form("/v1/oauth/device_authorization", FIELDS | changes), "invalid_request")
    with fleet.home.database.reading() as session:
        assert session.scalar(select(func.count()).select_from(DeviceRequest)) == 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"grant_type": "authorization_code"}, "unsupported_grant_type"),
        ({"grant_type": ""}, "invalid_request"),
        ({"device_code": ""}, "invalid_request"),
        ({"device_code": "mobizo-join-x"}, "invalid_grant"),
        ({"client_id": "another"}, "invalid_grant"),
    ],
)
def test_a_bad_question(joining, operator, changes, error):
    authorization = joining.ask()
    operator.post(f"/v1/device-requests/{authorization['user_code']}/approve")
    joining.assert_refused(joining.poll(authorization["device_code"], **changes), error)
    assert joining.poll(authorization["device_code"]).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"client_id": "x"}', "application/json"),
        (b"client_id=a&client_id=b", "application/x-www-form-urlencoded"),
        (b"client_id=%ff%fe", "application/x-www-form-urlencoded"),
        (b"\xff", "application/x-www-form-urlencoded"),
        (b"&".join(b"a%d=1" % number for number in range(60)), "application/x-www-form-urlencoded"),
    ],
)
def test_what_is_no_form(joining, content, kind):
    for path in ("/v1/oauth/device_authorization", "/v1/oauth/token"):
        joining.assert_refused(
            joining.actor.post(path, content=content, headers={"Content-Type": kind}), "invalid_request"
        )


def test_the_page_tells_what_to_run_and_runs_nothing(fleet):
    answer = fleet.actor().get("/device", params={"user_code": "wdjb-mjht"})
    assert answer.status_code == 200
    assert f"mobizo device approve WDJB-MJHT --server {fleet.url}" in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "script" not in answer.text
    for hostile_code in ("<script>alert(1)</script>", '"><img src=x>', "A" * 100):
        text = fleet.actor().get("/device", params={"user_code": hostile_code}).text
        assert hostile_code == "A" * 100 or hostile_code not in text
        assert "approve CODE" in text
    assert fleet.actor().get("/device").status_code == 200


@given(st.text(max_size=30))
def test_no_text_is_a_code_but_a_code(text):
    code = read_user_code(text)
    if code is not None:
        assert len(code) == 8
        assert read_user_code(format_user_code(code)) == code


@given(st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZ", min_size=8, max_size=8))
def test_a_code_is_read_however_it_is_typed(code):
    assert read_user_code(format_user_code(code)) == code
    assert read_user_code(f" {format_user_code(code).lower()} ".replace("-", " ")) == code
    assert read_user_code(code.replace("1", "l").replace("0", "o")) == code
    assert read_user_code(code[:-1] + "U") is None


def test_a_code_is_forty_bits():
    codes = {new_user_code() for _ in range(2000)}
    assert len(codes) == 2000
    assert len(set("".join(codes))) == 32
