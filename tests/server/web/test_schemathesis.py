"""Anything that the description allows, and much that it does not: never a 5xx, and no answer it does not describe."""

import contextlib
import json
from pathlib import Path

import pytest
from schemathesis.core.failures import FailureGroup

from tests.server.conftest import job_request, result
from tests.server.web.fuzz import Fuzzer

DOCUMENT = json.loads((Path(__file__).resolve().parents[3] / "docs" / "openapi.json").read_text())
BODIES = {
    "create_job": job_request(),
    "renew_lease": {"phase": "training", "step": 1, "steps": 3},
    "complete_lease": {"adapter_sha256": "0" * 64, "result": result()},
    "acquire_lease": {"datasets": ["movies"]},
}
EXAMPLES = 6  # to each operation


@pytest.fixture
def path_parameters(fleet, app, operator, device):
    """Path parameters of operations that find something."""
    job = fleet.ready_job(app)
    lease = device.lease()
    device.finish(lease)
    second_job = fleet.ready_job(app, adapter="second")
    held_lease = device.lease()
    version = {"name": "alice-movies", "version": 1}
    spare = operator.post("/v1/tokens", json={"name": "spare", "role": "app"}).json()
    webhook = app.post("/v1/webhooks", json={"url": "https://shop.example", "events": ["job.failed"]}).json()
    ids = {
        "webhook_id": webhook["view"]["id"],
        "job_id": job["id"],
        "lease_id": held_lease["id"],
        "recipe_id": second_job["recipe_id"],
        "sha256": lease["manifest"]["manifest"]["files"][0]["sha256"],
        "device_id": device.device_id,
        "token_id": spare["view"]["id"],
        "file": "adapter_config.json",
        "platform": "linux-x86_64",
        **version,
    }
    ids_of = {}
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
            if names and all(name in ids for name in names):
                ids_of[operation["operationId"]] = {name: ids[name] for name in names}
    return ids_of


@contextlib.contextmanager
def fuzzer(document, url, tokens, path_parameters, bodies):
    new_fuzzer = Fuzzer(document, url, tokens, path_parameters, bodies)
    yield new_fuzzer
    new_fuzzer.close()


def test_an_answer_that_is_not_described_is_found(fleet, app):
    document = json.loads(json.dumps(DOCUMENT))
    del document["paths"]["/v1/jobs/{job_id}"]["get"]["responses"]["404"]
    with fuzzer(document, fleet.url, [app.token], {}, {}) as new_fuzzer, pytest.raises(FailureGroup, match="404"):
        new_fuzzer.run(EXAMPLES, only={"get_job"})


@pytest.mark.slow
def test_every_answer_is_described(fleet, operator, app, device, path_parameters):
    with fuzzer(
        DOCUMENT, fleet.url, [operator.token, app.token, device.token, None], path_parameters, BODIES
    ) as new_fuzzer:
        new_fuzzer.run(EXAMPLES)
    names = {name for name, _ in new_fuzzer.answers}
    assert len(names) == sum(len(operations) for operations in DOCUMENT["paths"].values())
    assert {status for _, status in new_fuzzer.answers} >= {200, 400, 401, 403, 404, 422}
