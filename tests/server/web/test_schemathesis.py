"""Anything that the description allows, and much that it does not: never a 5xx, and no answer it does not describe."""

import json
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode

from tests.server.actors import job_request, result

load_all_checks()
CHECK_NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
DOCUMENT = json.loads((Path(__file__).resolve().parents[3] / "docs" / "openapi.json").read_text())
BODIES = {
    "create_job": job_request(),
    "renew_lease": {"phase": "training", "step": 1, "steps": 3},
    "complete_lease": {"adapter_sha256": "0" * 64, "result": result()},
    "acquire_lease": {"datasets": ["movies"]},
}
EXAMPLES = 6  # to each operation


def mixed(good, made_up, own):
    """`good` with some of what was made up; own: a set of bits that says which."""
    if not isinstance(made_up, dict):
        return good
    return good | {key: value for place, (key, value) in enumerate(sorted(made_up.items())) if own >> place & 1}


class Fuzzer:
    """Callers who send anything that the description allows, and much that it does not."""

    def __init__(self, document, url, tokens, path_parameters, bodies):
        """tokens: of the callers; None: who has none.

        path_parameters: those that name something, and bodies: JSON that is taken, both by operation id. Half the time
        they take the place of what was made up, all or in part.
        """
        self._schema = schemathesis.openapi.from_dict(document)
        self._url, self._path_parameters, self._bodies = url, path_parameters, bodies
        self._checks = CHECKS.get_by_names(CHECK_NAMES)
        self._session = requests.Session()
        self._callers = [{"Authorization": f"Bearer {token}"} if token else {} for token in tokens]
        self.answers = {}  # how many of each (operation id, status)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._session.close()

    def run(self, examples, only=None):
        """`examples` requests to each operation, or to those named."""
        for described in self._schema.get_all_operations():
            operation = described.ok()
            name = operation.definition.raw["operationId"]
            if only is None or name in only:
                self._run(operation, name, examples)

    def _run(self, operation, name, examples):
        good = operation.as_strategy()
        bad = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            case=st.one_of(good, good, bad),
            real=st.booleans(),
            own=st.integers(0, 255),
            caller=st.sampled_from(self._callers),
        )
        def send(case, real, own, caller):
            if real and name in self._path_parameters:
                case.path_parameters = dict(self._path_parameters[name])
            if real and name in self._bodies:
                case.body = mixed(self._bodies[name], case.body, own)
            if isinstance(case.body, dict) and "wait_seconds" in case.body:
                case.body["wait_seconds"] = 0
            response = case.call(base_url=self._url, session=self._session, headers=caller, timeout=30)
            key = (name, response.status_code)
            self.answers[key] = self.answers.get(key, 0) + 1
            case.validate_response(response, checks=self._checks)

        send()


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


def test_an_answer_that_is_not_described_is_found(fleet, app):
    document = json.loads(json.dumps(DOCUMENT))
    del document["paths"]["/v1/jobs/{job_id}"]["get"]["responses"]["404"]
    with Fuzzer(document, fleet.url, [app.token], {}, {}) as fuzzer, pytest.raises(FailureGroup, match="404"):
        fuzzer.run(EXAMPLES, only={"get_job"})


@pytest.mark.slow
def test_every_answer_is_described(fleet, operator, app, device, path_parameters):
    tokens = [operator.token, app.token, device.token, None]
    with Fuzzer(DOCUMENT, fleet.url, tokens, path_parameters, BODIES) as fuzzer:
        fuzzer.run(EXAMPLES)
    names = {name for name, _ in fuzzer.answers}
    assert len(names) == sum(len(operations) for operations in DOCUMENT["paths"].values())
    assert {status for _, status in fuzzer.answers} >= {200, 400, 401, 403, 404, 422}
