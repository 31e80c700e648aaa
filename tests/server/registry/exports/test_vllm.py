"""vLLM finds and loads our PEFT directory by name: its rules, since it runs with a GPU only.

Sources, of github.com/vllm-project/vllm: `vllm/plugins/lora_resolvers/filesystem_resolver.py` and `hf_hub_resolver.py`
(which directory is an adapter of the served base), `vllm/lora/peft_helper.py` (its configuration),
`vllm/lora/lora_model.py` and `vllm/lora/utils.py` (names of its tensors).
"""

import json
import os
from pathlib import Path

import pytest
import safetensors.numpy
from huggingface_hub import HfApi, snapshot_download

SERVED = "acme/tiny"  # as in `vllm serve acme/tiny`
ADAPTER = "default/alice-movies"
MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # of Llama, Qwen and Gemma


def is_adapter_of(path, base):
    """The rule of both resolvers: a directory with a LoRA's configuration that names the served base."""
    config = path / "adapter_config.json"
    if not config.exists():
        return False
    document = json.loads(config.read_text())
    return document["peft_type"] == "LORA" and document["base_model_name_or_path"] == base


@pytest.fixture
def hub(fleet, app, device, lease):
    """Where the registry is, as the Hub's client has it from HF_ENDPOINT and HF_TOKEN."""
    device.finish(lease)
    return {"endpoint": fleet.url, "token": app.token}


def test_the_hubs_resolver_finds_the_adapter_of_the_served_base(hub, tmp_path):
    names = HfApi(**hub).list_repo_files(repo_id=ADAPTER)
    assert "adapter_config.json" in names  # so the repository itself is an adapter's directory
    path = Path(snapshot_download(repo_id=ADAPTER, allow_patterns="*", cache_dir=tmp_path / "cache", **hub))
    assert is_adapter_of(path, SERVED)
    assert not is_adapter_of(path, "acme/other")


def test_what_is_downloaded_is_loaded(hub, tmp_path):
    path = Path(snapshot_download(repo_id=ADAPTER, local_dir=tmp_path / "adapters" / "alice", **hub))
    # The file system's resolver joins the request's name with VLLM_LORA_RESOLVER_CACHE_DIR.
    assert is_adapter_of(Path(os.path.realpath(tmp_path / "adapters" / "alice")), SERVED)
    config = json.loads((path / "adapter_config.json").read_text())
    assert {"r", "lora_alpha", "target_modules"} <= config.keys()
    assert not config.get("modules_to_save")
    assert not config.get("use_dora")
    assert config["bias"] == "none"
    assert set(config["target_modules"]) <= MODULES
    tensors = safetensors.numpy.load_file(path / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        prefix, model, *module, matrix, weight = name.split(".")
        assert (prefix, model, weight) == ("base_model", "model", "weight")
        assert module[-1] in config["target_modules"]
        assert tensor.shape[{"lora_A": 0, "lora_B": 1}[matrix]] == config["r"]
