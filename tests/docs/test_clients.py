"""docs/clients.md and README's script, run as they stand, against a real server with one published adapter.

The base is a tiny Llama with random weights; the device only pretends to train. Sections that say that they were not
run here are not run here either.
"""

import re
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from device_agent.protocol.client import DeviceClient
from mobizo import Client
from shared.access import Role, TokenRequest
from shared.canonical import sha256_hex
from shared.job import JobRequest
from shared.protocol import AdapterVersion, Completion, EnrollmentRequest, LeaseRequest
from shared.result import Result
from shared.signing import new_private_key, public_text
from shared.zo.lora import BaseShape, dump_adapter
from tests.docs.test_commands import plain_environment, run_script
from tests.server import fake_compiler
from tests.server.actors import job_request, result
from tests.server.gguf_files import write_gguf
from tests.server.llama import CONFIG, write_llama

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", PAGE, re.MULTILINE))
NOT_RUN = ("vLLM", "LoRAX")
WHOLE = "*Not run here*:"  # how such a section begins
LOADING = """
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), ".")
print(any("lora_B" in name and bool(weight.any()) for name, weight in model.named_parameters()))
"""
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def publish(url, operator_token, request):
    """Publishes a version with a random B through the routes of a device, once a job for it is there.

    request: that is submitted first; None: another process submits it. Returns an app's token.
    """
    key = new_private_key()
    with Client(url, operator_token) as operator:
        enrollment = operator.devices.create_enrollment_token(EnrollmentRequest(users=["alice"]))
        with DeviceClient(url, enrollment.token) as joining:
            grant = joining.enroll(f"phone-{uuid.uuid4().hex}", public_text(key.public_key()))
        if request is not None:
            operator.jobs.submit(request)
        with DeviceClient(url, grant.token, key) as device:
            lease = device.lease(LeaseRequest(datasets=["reviews"], wait_seconds=30))
            flat = np.random.default_rng(6).standard_normal(lease.manifest.manifest.size).astype(np.float32) / 100
            data = dump_adapter(flat, {"job": lease.job.id})
            device.upload(lease.id, data)
            body = Completion(adapter_sha256=sha256_hex(data), result=Result.model_validate(result()))
            device.complete(AdapterVersion, lease.id, body)
        return operator.tokens.create(TokenRequest(name="reader", role=Role.APP)).token


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with `base`, and the environment that the page speaks of."""
    root = tmp_path_factory.mktemp("clients")
    write_llama(root / "base")
    shape = BaseShape(
        architecture="llama",
        layers=CONFIG["num_hidden_layers"],
        hidden=CONFIG["hidden_size"],
        intermediate=CONFIG["intermediate_size"],
        heads=CONFIG["num_attention_heads"],
        kv_heads=CONFIG["num_key_value_heads"],
        head_dim=CONFIG["hidden_size"] // CONFIG["num_attention_heads"],
        vocabulary=CONFIG["vocab_size"],
        context_length=CONFIG["max_position_embeddings"],
    )
    (root / "base" / "shape.json").write_text(shape.model_dump_json())
    write_gguf(AutoModelForCausalLM.from_pretrained(root / "base"), "llama", root / "base.gguf")
    env = {name: value for name, value in plain_environment().items() if not name.startswith("HF_")} | {
        "HOME": str(root / "user"),
        "MOBIZO_HOME": str(root / "home"),
        "MOBIZO_COMPILER_COMMAND": f'["{sys.executable}", "{fake_compiler.__file__}"]',
        "MOBIZO_POLL_SECONDS": "0.05",
        "PYTHONUNBUFFERED": "1",
    }
    (root / "user").mkdir()

    def command(*arguments):
        called = [sys.executable, "-m", "server.cli.main", *arguments]
        return subprocess.run(called, env=env, capture_output=True, text=True, check=True).stdout

    operator = re.search(r'"token": "([^"]+)"', command("init", "--json"))[1]
    command("base", "add", "tiny", str(root / "base"))
    with (
        (root / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "server.cli.main", "run", "--port", "0"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        try:
            url = re.search(r"http://\S+", server.stdout.readline()).group()
            token = publish(url, operator, JobRequest.model_validate(job_request(dataset="reviews")))
            yield root, env | {"MOBIZO_SERVER": url, "MOBIZO_TOKEN": token, "OPERATOR_TOKEN": operator}
        finally:
            server.terminate()
    assert server.returncode == 0


def script(section):
    """A section's blocks as one shell script; what one exports, the next has."""
    parts = []
    for language, text in BLOCK.findall(SECTIONS[section]):
        parts.append(text if language == "sh" else f"{sys.executable} - <<'PYTHON'\n{text}PYTHON\n")
    return "\n".join(parts)


def test_sections_that_are_not_run_say_so():
    assert [name for name, text in SECTIONS.items() if text.lstrip().startswith(WHOLE)] == list(NOT_RUN)


@pytest.mark.slow
@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in NOT_RUN])
def test_commands_run_as_they_stand(place, section, tmp_path):
    root, env = place
    for name in ("base", "base.gguf"):
        (tmp_path / name).symlink_to(root / name)
    assert BLOCK.search(SECTIONS[section])
    own = env | {"MOBIZO_AGENT_HOME": str(tmp_path / "agent")}
    run_script(script(section), tmp_path, own)


@pytest.mark.slow
def test_the_readmes_script_submits_waits_and_downloads(place):
    root, env = place
    blocks = [text for language, text in BLOCK.findall((ROOT / "README.md").read_text()) if language == "python"]
    assert len(blocks) == 1
    assert len(blocks[0].splitlines()) <= 25
    url = env["MOBIZO_SERVER"]
    with ThreadPoolExecutor() as pool:
        device = pool.submit(publish, url, env["OPERATOR_TOKEN"], None)
        done = subprocess.run(
            [sys.executable, "-c", blocks[0] + LOADING], cwd=root, env=env, capture_output=True, text=True, check=False
        )
        device.result()
    assert done.stdout.startswith("succeeded "), done.stdout + done.stderr
    assert done.stdout.endswith("True\n")
