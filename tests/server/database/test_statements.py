"""The SQL statements that a device's requests send: their exact number, since a fleet sends these all the time."""

from shared.canonical import sha256_hex
from tests.server.actors import adapter_bytes, result
from tests.server.database.test_plans import counting

# A signature's check reads the token with the first statement of each. A new adapter is the dearest completion.
STATEMENTS = {"poll without a job": 5, "poll": 17, "heartbeat": 7, "upload": 15, "completion": 25}


def test_requests_of_devices_send_few_statements(home, fleet, app, device):
    leases = []

    def count(call):
        with counting(home.database) as statements:
            assert call().status_code in (200, 204)
        return sum(not statement.startswith("BEGIN") for statement, _ in statements)  # which SQLite gets as one

    def poll():
        answer = device.post("/v1/leases", json={"datasets": ["movies"]})
        leases.append(answer.json() if answer.content else None)
        return answer

    def heartbeat(step):
        body = {"phase": "training", "step": step, "steps": 3, "loss": 0.5}
        return lambda: device.post(f"/v1/leases/{leases[-1]['id']}/heartbeat", json=body)

    def complete():
        body = {"adapter_sha256": sha256_hex(data), "result": result()}
        return device.post(f"/v1/leases/{leases[-1]['id']}/complete", json=body)

    poll()  # a device's first request also stores its report
    sent = {"poll without a job": count(poll)}
    fleet.ready_job(app)
    sent["poll"] = count(poll)
    sent["heartbeat"] = count(heartbeat(1))
    assert count(heartbeat(2)) == sent["heartbeat"]
    data = adapter_bytes(leases[-1]["manifest"]["manifest"]["size"])
    sent["upload"] = count(lambda: device.upload(leases[-1], data))
    sent["completion"] = count(complete)
    assert sent == STATEMENTS
