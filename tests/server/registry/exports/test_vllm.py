"""vLLM finds and loads our PEFT directory by name: its rules, since it runs with a GPU only.

Sources, of github.com/vllm-project/vllm: `vllm/plugins/lora_resolvers/filesystem_resolver.py` and `hf_hub_resolver.py`
(which directory is an adapter of the served base), `vllm/lora/peft_helper.py` (its configuration),
`vllm/lora/lora_model.py` and `vllm/lora/utils.py` (names of its tensors).
"""

import json
from pathlib import Path

import safetensors.numpy
from huggingface_hub import snapshot_download

SERVED = "acme/tiny"  # as in `vllm serve acme/tiny`
ADAPTER = "default/alice-movies"
MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # of Llama, Qwen and Gemma


def test_what_is_downloaded_is_found_and_loaded(fleet, app, version, tmp_path):
    # The file system's resolver joins the request's name with VLLM_LORA_RESOLVER_CACHE_DIR.
    options = {"local_dir": tmp_path / "adapters" / "alice", "endpoint": fleet.url, "token": app.token}
    path = Path(snapshot_download(repo_id=ADAPTER, **options))
    config = json.loads((path / "adapter_config.json").read_text())
    # The rule of both resolvers: a LoRA's configuration that names the served base.
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", SERVED)
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
