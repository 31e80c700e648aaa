"""A server with a real tiny Llama and adapters of two tenants, for all tests of a module: its scorer takes seconds."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from server.app import create_app
from server.catalog.bases import BaseModelEntry
from server.compiler.checkpoints.base import locate_base
from shared.canonical import sha256_hex
from shared.recipe import TARGETS, Recipe
from shared.zo.lora import a_fingerprint, dump_adapter, flat_size
from tests.server.actors import Fleet, result, serving
from tests.server.homes import SHAPE, copy_home, home_of
from tests.server.peft_directory import write_peft

FIVE = ("red", "one", "two", "old", "new")  # adapters of the tenant `default`, each of another recipe
RECIPES = {
    "red": {},
    "one": {"a_seed": 7},
    "two": {"rank": 3, "alpha": 5, "targets": list(TARGETS)},
    "old": {"layers": "last:1"},
    "new": {},
}


def pytest_configure(config):
    for library in ("torch", "transformers", "executorch", "copyreg"):
        config.addinivalue_line("filterwarnings", f"ignore:::{library}")


def write_llama(directory):
    """A model of SHAPE with random weights, large enough that adapters and answers differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SHAPE.vocabulary,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        max_position_embeddings=SHAPE.context_length,
        tie_word_embeddings=True,
        initializer_range=0.6,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


@dataclass
class Site:
    """The server, and what its adapters are outside of it."""

    fleet: Fleet
    stock: dict = field(default_factory=dict)  # (tenant, adapter or None): the stock model with it
    devices: dict = field(default_factory=dict)  # (tenant, user)

    def __post_init__(self):
        self.source = self.fleet.home.source
        self.tokenizer = Tokenizer.from_file(str(self.source / "tokenizer.json"))
        self.sha256 = locate_base(str(self.source)).sha256

    def publish(self, tenant, name, seed, **changes):
        """A version of an adapter with random B, as a device uploads it."""
        app = self.fleet.app(tenant)
        if (tenant, name) not in self.devices:  # another device's version would wait for approval
            self.devices[tenant, name] = self.fleet.device(tenant, f"phone-{name}", users=(name,))
        device = self.devices[tenant, name]
        dataset = f"data-{name}-{seed}"
        job = self.fleet.ready_job(app, adapter=name, user=name, dataset=dataset, recipe=RECIPES.get(name, {}))
        lease = device.lease(dataset)
        assert lease["job"]["id"] == job["id"]
        recipe = Recipe.model_validate(lease["manifest"]["manifest"]["recipe"])
        flat = np.random.default_rng(seed).normal(0, 0.5, flat_size(recipe, SHAPE)).astype(np.float32)
        data = dump_adapter(flat, {"job": job["id"]})
        assert device.upload(lease, data).status_code == 200
        body = {"adapter_sha256": sha256_hex(data), "result": result(**changes)}
        response = device.post(f"/v1/leases/{lease['id']}/complete", json=body)
        assert response.status_code == 200, response.text
        directory = self.fleet.home.settings.home.parent / f"peft-{tenant}-{name}-{seed}"
        write_peft(recipe, SHAPE, flat, a_fingerprint(recipe, SHAPE), directory)
        model = AutoModelForCausalLM.from_pretrained(self.source)
        self.stock[tenant, name] = PeftModel.from_pretrained(model, directory).eval()
        return response.json()

    @torch.no_grad()
    def expected(self, tenant, adapter, prompt, answer):
        """log P(answer | prompt) by the stock model, nats."""
        before, after = self.tokenizer.encode(prompt).ids, self.tokenizer.encode(answer).ids
        logits = self.stock[tenant, adapter](torch.tensor([before + after])).logits[0].double()
        chances = torch.log_softmax(logits, dim=-1)
        return sum(float(chances[len(before) - 1 + at, token]) for at, token in enumerate(after))

    @torch.no_grad()
    def continued(self, tenant, adapter, prompt, count):
        """The likeliest tokens after a prompt by the stock model."""
        tokens = self.tokenizer.encode(prompt).ids
        start = len(tokens)
        for _ in range(count):
            tokens.append(int(self.stock[tenant, adapter](torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[start:]


@pytest.fixture(scope="module")
def site(home_template, tmp_path_factory):
    root = tmp_path_factory.mktemp("scoring") / "server"
    settings = copy_home(home_template, root, None)
    write_llama(root / "source")
    with home_of(settings, root / "source") as home:
        home.change(BaseModelEntry, sha256=locate_base(str(root / "source")).sha256)
        app = create_app(settings)
        with serving(app) as url:
            fleet = Fleet(home, url)
            new_site = Site(fleet)
            new_site.app = app
            new_site.stock["default", None] = AutoModelForCausalLM.from_pretrained(root / "source").eval()
            new_site.stock["other", None] = new_site.stock["default", None]
            for seed, name in enumerate(FIVE):
                new_site.publish("default", name, seed)
            new_site.publish("other", "red", 50)
            new_site.publish("other", "secret", 51)
            yield new_site
            fleet.close()
