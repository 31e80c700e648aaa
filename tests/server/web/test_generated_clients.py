"""Clients that other projects' tools generate from the served description."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow
TOOLS = str(Path(sys.executable).parent)

# What an app's developer writes with a client of `openapi-python-client`.
PYTHON = """
import sys
from client import AuthenticatedClient
from client.api.jobs import create_job, get_job, list_jobs
from client.models import JobRequest, JobState, JobView, Problem, RequestedRecipe, TrainingSettings

url, token = sys.argv[1:]
client = AuthenticatedClient(base_url=url, token=token)
request = JobRequest(
    base="tiny", user="alice", adapter="alice-movies", task="sst2", dataset="movies",
    recipe=RequestedRecipe(rank=2, sequence_length=16), training=TrainingSettings(steps=3),
)
job = create_job.sync(client=client, body=request, idempotency_key="once")
assert isinstance(job, JobView) and job.state is JobState.QUEUED, job
assert create_job.sync(client=client, body=request, idempotency_key="once").id == job.id
assert get_job.sync(job.id, client=client).request.training.steps == 3
assert [each.id for each in list_jobs.sync(client=client).items] == [job.id]
problem = get_job.sync("job_none", client=client)
assert isinstance(problem, Problem) and problem.code == "not-found", problem
"""
TYPESCRIPT = """
import type { components, operations } from "./api";

const request: components["schemas"]["JobRequest"] = {
  base: "tiny", user: "alice", adapter: "alice-movies", task: "sst2", dataset: "movies",
  recipe: { rank: 2 }, start: { adapter: "alice-movies", revision: "v2" }, training: { steps: 3 },
};
type Created = operations["create_job"]["responses"]["202"]["content"]["application/json"];
export const shown = (job: Created): string => `${job.id} ${job.state} ${request.adapter}`;
"""


@pytest.fixture
def description(fleet, tmp_path):
    """The description as the server sends it, in a file."""
    path = tmp_path / "openapi.json"
    path.write_bytes(httpx.get(f"{fleet.url}/openapi.json", timeout=60).content)
    return path


def run(*command, **options):
    environment = os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}"} | options.pop("env", {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_python_client_submits_a_job_and_reads_it(fleet, description, tmp_path):
    said = run(
        "openapi-python-client",
        "generate",
        "--path",
        description,
        "--meta",
        "none",
        "--output-path",
        "client",
        cwd=tmp_path,
    )
    assert "Warning" not in said, said
    run(sys.executable, "-c", PYTHON, fleet.url, fleet.app().token, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.skipif(not (shutil.which("npm") and shutil.which("node")), reason="npm or node is not installed")
def test_typescript_types_compile(description, tmp_path):
    (tmp_path / "use.ts").write_text(TYPESCRIPT)
    run("npm", "install", "--no-audit", "--no-fund", "openapi-typescript@7", "typescript@5", cwd=tmp_path)
    # A field with a default may be left out of a request.
    run("npx", "openapi-typescript", description, "-o", "api.ts", "--default-non-nullable=false", cwd=tmp_path)
    run("npx", "tsc", "--strict", "--noEmit", "use.ts", cwd=tmp_path)
