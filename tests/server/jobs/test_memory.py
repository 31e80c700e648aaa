"""The memory that the server predicts before a program exists, against the peak of a run in the native runner."""

import json
from pathlib import Path

import pytest

from server.compiler.checkpoints.base import locate_base
from server.jobs.memory import planned_bytes, predicted_peak
from shared.privacy import ExamplePrivacy
from shared.recipe import BaseRef, Recipe
from shared.zo.lora import BaseShape
from tests.device_agent.conftest import launcher, run, runner_directory
from tests.device_agent.tiny import Program, dataset, write_base
from tests.device_agent.training.runs import train

__all__ = ["dataset", "launcher", "run", "runner_directory"]  # fixtures

SMOLLM2 = BaseShape(  # SmolLM2-135M
    architecture="llama",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49152,
    context_length=2048,
)
SIZES = {
    "tiny": {},
    "middle": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
PRIVACY = ExamplePrivacy(noise_multiplier=1.0, sampling_rate=0.5)
SETTINGS = {"rank": 8, "alpha": 16, "sequence_length": 40, "answer_length": 6, "choices": 2, "loss": "candidates"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        ("tiny", {"estimator": "replay"}),
        ("middle", {"estimator": "replay", "perturbed": "answers", "queries": 128}),
        ("middle", {"estimator": "gradient", "privacy": "clipped"}),
        ("middle", {"estimator": "directional", "queries": 512, "targets": ("v_proj", "o_proj")}),
    ],
)
def test_the_predicted_peak_is_near_the_measured_one(size, settings, program_store, launcher, dataset, run, tmp_path):
    sized_base = tmp_path / size
    write_base(sized_base, **SIZES[size])
    base = BaseRef(name=sized_base.name, sha256=locate_base(str(sized_base)).sha256)
    recipe = Recipe(base=base, **SETTINGS, **settings)
    program = Program(tmp_path / "program", program_store.put(recipe, sized_base, tmp_path / "program"))
    plan = program.plan(dataset, steps=3, evaluation_interval=3)
    Path(f"{program.path('weights')}.packed").mkdir()  # no file of packed weights, as on a phone: the most memory
    run.begin(plan if recipe.privacy == "none" else plan.model_copy(update={"privacy": PRIVACY}))
    train(run, launcher)
    manifest = program.manifest
    prediction = predicted_peak(recipe, manifest.shape, parameters_of(sized_base))
    assert prediction == pytest.approx(run.figures().peak_rss_bytes, rel=0.25)
    assert planned_bytes(recipe, manifest.shape) == pytest.approx(manifest.planned_bytes, rel=0.5)


def parameters_of(base):
    """The number of weights in a base's safetensors file, by its header."""
    with (base / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return (
        sum(
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        )
        // 4
    )
