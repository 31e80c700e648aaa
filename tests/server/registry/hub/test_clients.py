"""The stock client of the Hub, old and new, reads the registry as it would read the Hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shared.canonical import sha256_hex
from shared.recipe import Recipe
from shared.zo.lora import init_a, lora_modules
from tests.server.homes import SHAPE
from tests.server.registry.hub.stock import Refused

MOVIES = "default/alice-movies"
LISTED = ["README.md", "adapter_config.json", "adapter_model.safetensors", "mobizo.json"]
HIDDEN = "lora_B.safetensors"


@pytest.fixture
def second(hub):
    """The latest version of the movies' adapter."""
    return hub.versions["alice-movies"][1]


def files_of(directory):
    return sorted(path.relative_to(directory).as_posix() for path in Path(directory).rglob("*") if path.is_file())


def assert_raises(kind, call, *arguments, **options):
    """The refusal that a call ends with, which is of that kind."""
    with pytest.raises(Refused) as error_info:
        call(*arguments, **options)
    assert error_info.value.name == kind, error_info.value
    return error_info.value


def assert_entry_missing(client, *arguments, **options):
    """The words of an error that says that the repository has no such entry."""
    with pytest.raises(Refused) as error_info:
        client(*arguments, **options)
    assert "EntryNotFoundError" in error_info.value.classes
    assert "LocalEntryNotFoundError" not in error_info.value.classes
    return error_info.value.text


def test_a_snapshot_is_the_directory(client, at, relay, hub, second, tmp_path):
    path = Path(client("snapshot_download", MOVIES, cache_dir=str(tmp_path), **at))
    assert path.name == second["revision"]
    assert files_of(path) == LISTED
    files = hub.fleet.app().get("/v1/adapters/alice-movies/versions/2/peft").json()["files"]
    for file in files:
        data = (path / file["path"]).read_bytes()
        assert (len(data), sha256_hex(data)) == (file["size"], file["sha256"])
        assert (path / file["path"]).resolve().name == file["sha256"]  # blobs are named by their ETag
    assert (path.parent.parent / "refs" / "main").read_text() == second["revision"]
    assert {exchange.headers["authorization"] for exchange in relay.exchanges} == {f"Bearer {hub.token}"}
    assert all("content-encoding" not in exchange.answer_headers for exchange in relay.exchanges)
    assert not any(name.startswith("x-xet") for exchange in relay.exchanges for name in exchange.answer_headers)


def test_what_is_cached_is_not_fetched_again(client, at, relay, second, tmp_path):
    first = client("snapshot_download", MOVIES, cache_dir=str(tmp_path), **at)
    assert len(relay.bodies()) == len(LISTED)
    relay.take()
    assert client("snapshot_download", MOVIES, cache_dir=str(tmp_path), **at) == first
    assert relay.take()  # whether `main` has moved
    relay_free = {"cache_dir": str(tmp_path), "revision": second["revision"], **at}
    assert client("hf_hub_download", MOVIES, "adapter_model.safetensors", **relay_free) == f"{first}/{LISTED[2]}"
    assert relay.take() == []
    assert client("snapshot_download", MOVIES, cache_dir=str(tmp_path), local_files_only=True) == first
    assert client("hf_hub_download", MOVIES, "README.md", cache_dir=str(tmp_path), **at) == f"{first}/README.md"
    (exchange,) = relay.take()
    assert (exchange.method, exchange.status) == ("HEAD", 200)
    assert relay.bodies() == []


def test_every_name_of_a_version_leads_to_it(client, at, hub, tmp_path):
    first = hub.versions["alice-movies"][0]
    for revision in ("v1", "1", first["revision"], first["revision"][:7]):
        path = Path(client("hf_hub_download", MOVIES, HIDDEN, revision=revision, cache_dir=str(tmp_path), **at))
        assert sha256_hex(path.read_bytes()) == first["sha256"]
        assert path.parent.name == first["revision"]


def test_the_model_is_described(client, at, hub, second):
    info = client("api.model_info", MOVIES, revision="main", **at)
    assert (info["id"], info["author"], info["sha"]) == (MOVIES, "default", second["revision"])
    assert info["private"] is True
    assert info["library_name"] == "peft"
    assert [file["rfilename"] for file in info["siblings"]] == LISTED
    at_first = client("api.model_info", MOVIES, revision="v1", **at)
    assert at_first["sha"] == hub.versions["alice-movies"][0]["revision"]


def test_files_are_listed(client, at):
    files = client("api.list_repo_tree", MOVIES, recursive=True, **at)
    assert [file["path"] for file in files] == LISTED
    assert all(file["size"] == file["lfs"]["size"] for file in files)
    assert client("api.list_repo_files", MOVIES, **at) == LISTED  # which vLLM's resolver calls


def test_what_exists(client, at):
    assert client("api.revision_exists", MOVIES, "v2", **at)
    assert not client("api.revision_exists", MOVIES, "v3", **at)
    assert not client("api.revision_exists", MOVIES, "refs/pr/1", **at)
    assert client("api.file_exists", MOVIES, "README.md", **at)
    assert client("api.file_exists", MOVIES, HIDDEN, **at)
    assert not client("api.file_exists", MOVIES, "adapter_model.bin", **at)
    assert client("api.whoami", **at)["name"] == "default"


@pytest.mark.parametrize("repository", ["default/nothing", "other/secret", "nobody/secret"])
def test_what_is_absent_and_what_is_not_ones_own(client, at, repository):
    for call in ("snapshot_download", "api.model_info", "api.list_repo_files"):
        for options in ({"revision": "main"}, {"revision": "v1"}):
            refusal = assert_raises("RepositoryNotFoundError", client, call, repository, **options, **at)
            assert f"there is no adapter {repository} here, or it is not yours" in refusal.text
    assert_raises("RepositoryNotFoundError", client, "hf_hub_download", repository, "README.md", **at)


def test_without_a_token_there_is_nothing(client, relay):
    for repository in (MOVIES, "default/nothing"):
        for call in (("snapshot_download", repository), ("hf_hub_download", repository, "README.md")):
            assert_raises("RepositoryNotFoundError", client, *call, endpoint=relay.url, token=False)
    assert {exchange.status for exchange in relay.take()} == {401}


def test_a_bad_token_is_not_taken_for_an_absent_repository(client, relay):
    wrong = {"endpoint": relay.url, "token": "mobizo-app-" + "A" * 43}
    for call in (("snapshot_download", MOVIES), ("hf_hub_download", MOVIES, "README.md")):
        assert "Invalid credentials" in assert_raises("HfHubHTTPError", client, *call, **wrong).text


def test_revisions_and_files_that_are_not_there(client, at, second, tmp_path):
    for revision in ("v3", "0", "no-such-tag", "f" * 40, "0000000", "refs/pr/1"):
        assert_raises("RevisionNotFoundError", client, "snapshot_download", MOVIES, revision=revision, **at)
        assert_raises("RevisionNotFoundError", client, "hf_hub_download", MOVIES, "README.md", revision=revision, **at)
    for name in ("config.json", "folder/README.md"):
        assert_entry_missing(client, "hf_hub_download", MOVIES, name, cache_dir=str(tmp_path), **at)
    no_exist_directory = next(tmp_path.rglob(".no_exist")) / second["revision"]
    assert files_of(no_exist_directory) == ["config.json", "folder/README.md"]


def test_what_awaits_approval_is_there_by_its_number_only(client, at, tmp_path):
    refusal = assert_raises("GatedRepoError", client, "snapshot_download", "default/worse", **at)
    assert "No version of this adapter is approved" in refusal.text
    path = client("snapshot_download", "default/worse", revision="v1", cache_dir=str(tmp_path), **at)
    assert files_of(path) == LISTED


def test_a_download_that_breaks_off_goes_on(version, client, at, relay, big, tmp_path):
    relay.break_after = 15 << 20

    def fetch():
        return client("hf_hub_download", "default/big", LISTED[2], cache_dir=str(tmp_path), **at)

    if version == 0:
        # The old client goes on when it is called again, the new one by itself.
        with pytest.raises(Refused):
            fetch()
    path = fetch()
    assert Path(path).read_bytes() == big
    whole, rest = relay.bodies()
    assert (whole.status, whole.body_bytes) == (200, 15 << 20)
    assert (rest.status, rest.headers["range"]) == (206, f"bytes={10 << 20}-")
    assert rest.body_bytes == len(big) - (10 << 20)
    assert [path.name for path in tmp_path.rglob("*.incomplete")] == []


PEFT = """
import json, sys
import torch
from peft import AutoPeftModelForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM
shape = json.loads(sys.argv[1])
LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained("acme/tiny")  # in place of the Hub's copy of the base
peft = AutoPeftModelForCausalLM.from_pretrained("default/alice-movies")
told = {name: value.tolist() for name, value in peft.state_dict().items() if ".lora_" in name}
print(json.dumps(told))
"""


def test_peft_loads_an_adapter_by_its_name(hub, second, tmp_path):
    shape = {
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.intermediate,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "vocab_size": SHAPE.vocabulary,
    }
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", PEFT, json.dumps(shape)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    weights = json.loads(process.stdout)
    recipe = Recipe.model_validate(second["recipe"])
    modules = lora_modules(recipe, SHAPE)
    assert len(weights) == 2 * len(modules)
    for module in modules:
        name = f"base_model.model.{module.name}"
        np.testing.assert_array_equal(weights[f"{name}.lora_A.default.weight"], init_a(recipe, module).T)
        b = np.array(weights[f"{name}.lora_B.default.weight"])
        np.testing.assert_array_equal(b, np.full(b.shape, 0.25))
