"""Who may ask each route of the application, and with which body: the table that `test_matrix` holds it to."""

from dataclasses import dataclass

from shared.signing import new_private_key, public_text
from tests.server.conftest import job_request, result
from tests.server.federation.conftest import cohort_request

ANYONE, ONE_TIME, DEVICE = "anyone", "the bearer of a one-time token", "a device"
EITHER = "either "  # and a scope: or a device
PERSON = "a person or a service, with any scopes"
PERSON_OR_DEVICE = EITHER + PERSON
SESSION = "a session"  # and scopes: of a person at the dashboard, which knows no bearer tokens
FORM = b"x="
BASE64, SIGNED = "A" * 43 + "=", "A" * 86 + "=="  # 32 and 64 bytes
KEYS = {"member": "x", "identity": BASE64, "sealing": BASE64, "masking": BASE64, "signature": SIGNED}
KEY = public_text(new_private_key().public_key())


@dataclass
class Row:
    """Who may ask a route (one of the words above, or a scope), with which body."""

    who: str
    body: object = None
    shared: bool = False  # what its path names is the same for every tenant
    query: str = ""
    owner: int = 200  # what answers whoever owns the things that its path names


# One row for each route: "METHOD /path" -> who may ask it. HEAD is as GET.
ROWS = {
    "GET /v1/server": Row(ANYONE),
    "GET /v1/server/keys": Row(ANYONE),
    "GET /v1/server/usage": Row("server:read"),
    "GET /healthz": Row(ANYONE),
    "GET /readyz": Row(ANYONE),
    "GET /metrics": Row("metrics:read"),
    "GET /v1/whoami": Row(PERSON_OR_DEVICE),
    "GET /v1/tokens": Row("tokens:write"),
    "POST /v1/tokens": Row("tokens:write", {"scopes": []}),
    "DELETE /v1/tokens/{token_id}": Row("tokens:write"),
    "POST /v1/enrollments": Row("devices:write", {}),
    "POST /v1/devices": Row(ONE_TIME, {"name": "phone", "public_key": KEY, "platform": "linux"}),
    "GET /v1/devices": Row("devices:read"),
    "GET /v1/devices/{device_id}": Row("devices:read"),
    "PATCH /v1/devices/{device_id}": Row("devices:write", {"labels": {}}),
    "POST /v1/devices/{device_id}/revoke": Row("devices:write"),
    "PUT /v1/devices/{device_id}/users/{user}": Row("devices:write"),
    "DELETE /v1/devices/{device_id}/users/{user}": Row("devices:write"),
    "GET /v1/devices/{device_id}/privacy": Row("jobs:read"),
    "POST /v1/jobs": Row("jobs:write", job_request()),
    "GET /v1/jobs": Row("jobs:read"),
    "GET /v1/jobs/{job_id}": Row("jobs:read"),
    "GET /v1/jobs/{job_id}/waiting": Row("jobs:read"),
    "POST /v1/jobs/{job_id}/cancel": Row("jobs:write"),
    "GET /v1/jobs/{job_id}/events": Row("jobs:read"),
    "POST /v1/leases": Row(DEVICE, {"datasets": []}),
    "POST /v1/leases/{lease_id}/heartbeat": Row(DEVICE, {"phase": "training"}),
    "POST /v1/leases/{lease_id}/fail": Row(DEVICE, {"code": "x", "detail": "y"}),
    "POST /v1/leases/{lease_id}/release": Row(DEVICE),
    "POST /v1/leases/{lease_id}/leave": Row(DEVICE),
    "POST /v1/leases/{lease_id}/decline": Row(DEVICE, {"needed_bytes": 2, "available_bytes": 1}),
    "PUT /v1/leases/{lease_id}/adapter": Row(DEVICE, b"bytes"),
    "GET /v1/leases/{lease_id}/start": Row(DEVICE),
    "PUT /v1/leases/{lease_id}/trajectory": Row(DEVICE, b"bytes"),
    "POST /v1/leases/{lease_id}/complete": Row(DEVICE, {"adapter_sha256": "0" * 64, "result": result()}),
    "GET /v1/leases/{lease_id}/masking": Row(DEVICE, owner=409),
    "POST /v1/leases/{lease_id}/masking/keys": Row(DEVICE, KEYS),
    "POST /v1/leases/{lease_id}/masking/shares": Row(DEVICE, {"sealed": "", "commitment": BASE64}),
    "PUT /v1/leases/{lease_id}/masking/vector": Row(DEVICE, b"bytes"),
    "POST /v1/leases/{lease_id}/masking/consent": Row(DEVICE, {"signature": SIGNED}),
    "POST /v1/leases/{lease_id}/masking/unmask": Row(DEVICE, {"seeds": "", "keys": ""}),
    "GET /v1/programs/{recipe_id}": Row("jobs:read"),
    "GET /v1/files/{sha256}": Row(EITHER + "jobs:read"),
    "GET /v1/bases": Row("jobs:read", shared=True),
    "GET /v1/calibrations": Row("jobs:read"),
    "GET /v1/users/{user}/privacy": Row("jobs:read", shared=True),
    "PUT /v1/users/{user}/privacy": Row("privacy:write", {"epsilon": 8}, shared=True),
    "POST /v1/score": Row("adapters:score", {"rows": [{"adapter": "a", "prompt": "a", "answers": ["x"]}]}),
    "POST /v1/adapters/{name}/classify": Row("adapters:score", {"fields": {"text": "a"}}),
    "GET /v1/models": Row("adapters:score"),
    "GET /v1/models/{model}": Row("adapters:score"),
    "POST /v1/completions": Row("adapters:score", {"model": "a", "prompt": "a"}),
    "POST /v1/chat/completions": Row("adapters:score", {"model": "a", "messages": [{"role": "user", "content": "a"}]}),
    "GET /v1/adapters": Row("adapters:read"),
    "GET /v1/adapters/{name}": Row("adapters:read"),
    "GET /v1/devices/self/adapters/{name}/{revision}": Row(DEVICE),
    "GET /v1/devices/self/adapters/{name}/{revision}/lora_B.safetensors": Row(DEVICE),
    "DELETE /v1/adapters/{name}": Row("adapters:write"),
    "POST /v1/adapters/{name}/undelete": Row("adapters:write"),
    "POST /v1/adapters/{name}/promote": Row("adapters:write", {"revision": "v1"}),
    "GET /v1/adapters/{name}/events": Row("adapters:read"),
    "GET /v1/adapters/{name}/compare": Row("adapters:read", query="left=v1&right=v1"),
    "GET /v1/adapters/{name}/rule": Row("adapters:read"),
    "PUT /v1/adapters/{name}/rule": Row("adapters:write", {"rule": None}),
    "GET /v1/approval-rule": Row("adapters:read"),
    "PUT /v1/approval-rule": Row("adapters:write", {"rule": None}),
    "GET /v1/adapters/{name}/revisions/{revision}": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}": Row("adapters:read"),
    "DELETE /v1/adapters/{name}/versions/{version}": Row("adapters:write"),
    "POST /v1/adapters/{name}/versions/{version}/undelete": Row("adapters:write"),
    "POST /v1/adapters/{name}/versions/{version}/approve": Row("adapters:write"),
    "GET /v1/adapters/{name}/versions/{version}/lora_B.safetensors": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/trajectory": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/trajectory.bin": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/peft": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/peft/{file}": Row("adapters:read"),
    "POST /v1/cohorts": Row("cohorts:write", cohort_request()),
    "GET /v1/cohorts": Row("cohorts:read"),
    "GET /v1/cohorts/{cohort_name}": Row("cohorts:read"),
    "GET /v1/cohorts/{cohort_name}/privacy": Row("cohorts:read"),
    "GET /v1/cohorts/{cohort_name}/members": Row("cohorts:read"),
    "PUT /v1/cohorts/{cohort_name}/members/{user}": Row("cohorts:write", {"device": "device_none"}),
    "DELETE /v1/cohorts/{cohort_name}/members/{user}": Row("cohorts:write"),
    "GET /v1/cohorts/{cohort_name}/rounds": Row("cohorts:read"),
    "POST /v1/cohorts/{cohort_name}/rounds": Row("cohorts:write"),
    "GET /v1/cohorts/{cohort_name}/rounds/{number}": Row("cohorts:read"),
    "POST /v1/cohorts/{cohort_name}/rounds/{number}/close": Row("cohorts:write"),
    "GET /v1/cohorts/{cohort_name}/rounds/{number}/updates": Row("cohorts:read"),
    "GET /": Row(SESSION),
    "GET /ui/login": Row(ANYONE),
    "POST /ui/login": Row(ANYONE, FORM),
    "POST /ui/logout": Row(SESSION, FORM),
    "GET /ui/static/{name}": Row(ANYONE),
    "GET /docs": Row(ANYONE),
    "GET /ui/{anything}": Row(SESSION),
    "GET /ui/jobs": Row(SESSION + " jobs:read"),
    "GET /ui/jobs/new": Row(SESSION + " jobs:write"),
    "POST /ui/jobs/new": Row(SESSION + " jobs:write", FORM),
    "GET /ui/jobs/{job_id}": Row(SESSION + " jobs:read"),
    "GET /ui/jobs/{job_id}/events": Row(SESSION + " jobs:read"),
    "POST /ui/jobs/{job_id}/cancel": Row(SESSION + " jobs:write", FORM),
    "GET /ui/compare": Row(SESSION + " jobs:read"),
    "GET /ui/devices": Row(SESSION + " devices:read"),
    "GET /ui/devices/join": Row(SESSION + " devices:write"),
    "POST /ui/devices/join": Row(SESSION + " devices:write", FORM),
    "GET /ui/devices/{device_id}": Row(SESSION + " devices:read"),
    "POST /ui/devices/{device_id}/revoke": Row(SESSION + " devices:write", FORM),
    "GET /ui/adapters": Row(SESSION + " adapters:read"),
    "GET /ui/adapters/{name}": Row(SESSION + " adapters:read"),
    "GET /ui/adapters/{name}/compare": Row(SESSION + " adapters:read"),
    "GET /ui/adapters/{name}/versions/{version}": Row(SESSION + " adapters:read"),
    "POST /ui/adapters/{name}/versions/{version}/choose": Row(SESSION + " adapters:score", FORM),
    "POST /ui/adapters/{name}/versions/{version}/try": Row(SESSION + " adapters:score", FORM),
    "POST /ui/adapters/{name}/versions/{version}/approve": Row(SESSION + " adapters:write", FORM),
    "POST /ui/adapters/{name}/versions/{version}/delete": Row(SESSION + " adapters:write", FORM),
    "POST /ui/adapters/{name}/versions/{version}/promote": Row(SESSION + " adapters:write", FORM),
    "GET /ui/cohorts": Row(SESSION + " cohorts:read"),
    "GET /ui/cohorts/{cohort_name}": Row(SESSION + " cohorts:read"),
    "GET /ui/cohorts/{cohort_name}/rounds/{number}": Row(SESSION + " cohorts:read"),
    "POST /ui/cohorts/{cohort_name}/rounds": Row(SESSION + " cohorts:write", FORM),
    "POST /ui/cohorts/{cohort_name}/rounds/{number}/close": Row(SESSION + " cohorts:write", FORM),
    "GET /ui/programs": Row(SESSION + " jobs:read"),
    "GET /ui/programs/{recipe_id}": Row(SESSION + " jobs:read"),
    "GET /ui/operations": Row(SESSION),
    "GET /ui/operations/tokens": Row(SESSION + " tokens:write"),
    "POST /ui/operations/tokens": Row(SESSION + " tokens:write", FORM),
    "POST /ui/operations/tokens/{token_id}/revoke": Row(SESSION + " tokens:write", FORM),
    "GET /ui/operations/audit": Row(SESSION + " adapters:read"),
    "GET /api/whoami-v2": Row(PERSON),
    "GET /api/models/{tenant}/{name}/revision/{revision}": Row("adapters:read"),
    "GET /api/models/{tenant}/{name}/tree/{revision}": Row("adapters:read"),
    "GET /{tenant}/{name}/resolve/{revision}/{path}": Row("adapters:read"),
}
