"""The server as installed, with its real compiler on a tiny random Llama: from `init` to a PEFT directory."""

import json
import os
import re
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer, models, pre_tokenizers

from mobizo import Client
from shared.canonical import sha256_hex
from shared.job import JobView
from shared.program import SignedManifest
from shared.request_signature import RequestSigner
from shared.signing import new_private_key, parse_public, public_text, verify_manifest
from shared.zo.calibration import read_calibration
from tests.server.conftest import WORDS, Actor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_llama(directory):
    """A Hugging Face directory with random weights."""
    directory.mkdir()
    random = np.random.default_rng(0)
    hidden, inner, keys = CONFIG["hidden_size"], CONFIG["intermediate_size"], 8
    shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        root = f"model.layers.{layer}"
        shapes |= {
            f"{root}.self_attn.q_proj.weight": (hidden, hidden),
            f"{root}.self_attn.k_proj.weight": (keys, hidden),
            f"{root}.self_attn.v_proj.weight": (keys, hidden),
            f"{root}.self_attn.o_proj.weight": (hidden, hidden),
            f"{root}.mlp.gate_proj.weight": (inner, hidden),
            f"{root}.mlp.up_proj.weight": (inner, hidden),
            f"{root}.mlp.down_proj.weight": (hidden, inner),
            f"{root}.input_layernorm.weight": (hidden,),
            f"{root}.post_attention_layernorm.weight": (hidden,),
        }
    tensors = {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(("[UNK]", *WORDS))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.fixture
def installed(tmp_path):
    """A server of its own, set up and running as an operator would; its URL, operator's token and a calibration."""
    write_llama(tmp_path / "llama")
    env = os.environ | {"MOBIZO_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

    def command(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "server.cli.main", *arguments], env=env, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    token = command("init", "--json")["token"]
    command("bases", "add", "tiny", str(tmp_path / "llama"), "--json")
    made = tmp_path / "calibration"
    records = [{"text": f"{word} film", "label": number % 2} for number, word in enumerate(WORDS)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = ("--task", "sst2", "--data", str(tmp_path / "data.jsonl"), "--width", "2")
    command("calibrate", "--base", "tiny", *data, "--out", str(made), "--json")
    command("calibrations", "add", str(made), "--json")
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli.main", "run", "--port", "0"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    yield re.search(r"http://\S+", process.stdout.readline()).group(), token, read_calibration(made)
    process.terminate()
    assert process.wait(60) == 0
    process.stdout.close()
    log.close()


@pytest.mark.slow
def test_from_init_to_a_peft_directory(installed, tmp_path):
    url, token, calibration = installed
    with Actor(url, token) as operator:
        recipe = {"rank": 2, "sequence_length": 8, "queries": 1, "effective_batch": 1}
        recipe |= {"calibration": calibration.sha256}
        job = operator.submit(recipe=recipe)
        with operator.stream("GET", f"/v1/jobs/{job['id']}/events", timeout=600) as events:
            for line in events.iter_lines():
                assert '"state":"failed"' not in line, (line, (tmp_path / "log").read_text())
                if '"state":"ready"' in line:
                    break
        invitation = operator.post("/v1/enrollments", json={"users": ["alice"]}).json()["token"]
        key = new_private_key()
        body = {"name": "phone", "public_key": public_text(key.public_key()), "platform": "linux"}
        grant = httpx.post(f"{url}/v1/devices", json=body, headers={"Authorization": f"Bearer {invitation}"}).json()
        with Actor(url, grant["token"]) as device:
            device.signer = RequestSigner(key, time.time)
            lease = device.lease()
            signed = SignedManifest.model_validate(lease["manifest"])
            manifest = verify_manifest(signed, parse_public(grant["server"]["public_key"]))
            for file in manifest.files:
                assert sha256_hex(device.get(f"/v1/files/{file.sha256}").content) == file.sha256
            device.finish(lease)
        with Client(url, token) as client:
            pulled = client.adapters.download("alice-movies", tmp_path / "adapter")
            events = list(client.jobs.watch(job["id"]))
        assert pulled.version == 1
        assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "mobizo.json",
        }
        tensors = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert len(tensors) == 8
        for name, directions in calibration.directions.items():
            np.testing.assert_array_equal(
                tensors[f"base_model.model.{name}.lora_A.weight"], directions.T / np.float32(np.sqrt(3))
            )
        states = [event.state for event in events if isinstance(event, JobView)]
        assert states == ["queued", "compiling", "ready", "training", "succeeded"]
        assert operator.submit(recipe=recipe)["state"] == "ready"
        assert operator.get("/v1/server/usage").json()["compiler_peak_rss_bytes"] > 100 << 20


@pytest.mark.slow
def test_models_that_cannot_be_registered(tmp_path):
    env = os.environ | {"MOBIZO_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "server.cli.main", *arguments], env=env, capture_output=True, text=True, check=False
        )

    assert command("init").returncode == 0
    write_llama(tmp_path / "llama")
    weights = tmp_path / "llama" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    write_llama(tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps(CONFIG | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    for source in (tmp_path / "llama", tmp_path / "other", tmp_path / "nothing"):
        done = command("bases", "add", "tiny", str(source))
        assert done.returncode == 1, source
        assert done.stderr.startswith("error: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    assert json.loads(command("bases", "list", "--json").stdout) == []
