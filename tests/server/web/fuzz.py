"""Requests made from the committed description, sent to a running server, and their answers held against it."""

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

load_all_checks()
CHECK_NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


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

    def close(self):
        self._session.close()

    def run(self, examples, only=None):
        """`examples` requests to each operation, or to those named."""
        for result in self._schema.get_all_operations():
            operation = result.ok()
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
