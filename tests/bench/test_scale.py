"""`bench scale`: random bases that load, claims from given rows, and rows that are kept."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")

    from bench.scale.bases import QUICK, SIZES, Size, random_tensor, shards, write_random_base
    from bench.scale.command import claims_of, scale
    from server.compiler import inspect_base

OPT = Size(
    "opt",
    {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    },
)


@pytest.mark.parametrize("size", [QUICK, OPT], ids=["llama", "opt"])
def test_a_random_base_is_one_that_transformers_and_the_compiler_read(
    size: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.scale.bases.SHARD_BYTES", 20_000)
    count = write_random_base(size, tmp_path / "base")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert count == model.num_parameters() == inspect_base(str(tmp_path / "base")).parameters
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        assert model(torch.arange(8).unsqueeze(0)).logits.isfinite().all()


def test_shards_have_every_tensor_once_and_their_size_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.scale.bases.SHARD_BYTES", 100)
    shapes = {"a": (40,), "b": (10,), "c": (200,), "d": (1,), "e": (50,)}
    assert list(shards(shapes)) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_tensors_repeat_the_noise_and_differ_by_name() -> None:
    noise = torch.arange(200, dtype=torch.bfloat16)
    first, second = (random_tensor(noise, name, (2, 200)) for name in ("a.weight", "b.weight"))
    assert sorted(first[0].tolist()) == sorted(second[1].tolist()) == noise.tolist()
    assert not torch.equal(first, second)  # equal tensors would be stored once
    assert random_tensor(noise, "n.bias", (2,)).tolist() == [0, 0]
    assert random_tensor(noise, "n.weight", (2,)).tolist() == [1, 1]


def test_the_sizes_are_those_of_their_names() -> None:
    """Parameters in millions, as the models' pages state them."""
    stated = {
        "SmolLM2-135M": 135,
        "SmolLM2-360M": 362,
        "TinyLlama-1.1B": 1100,
        "Llama-3.2-1B": 1236,
        "OPT-1.3B": 1316,
        "Qwen3-1.7B": 1721,
        "Llama2-7B": 6738,
    }
    from transformers import AutoConfig

    for name, size in SIZES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(size.model, **size.config))
        assert round(model.num_parameters() / 1e6) == pytest.approx(stated[name], rel=2e-3), name


def row(base: str, size: float, estimator: str = "replay", precision: str = "int8", **more: float) -> dict[str, object]:
    """A row whose seconds and bytes follow power laws of `size`."""
    fixed = {"base": base, "precision": precision, "estimator": estimator, "parameters": size}
    laws = {"compile_seconds": 3 * size, "compile_peak_bytes": 7 * size**0.5, "ptd_bytes": size}
    device = {"load_seconds": 2 * size, "peak_rss_bytes": 1.2 * size, "step_seconds": size**1.5}
    return fixed | laws | device | {"flops_per_step": size} | more


def test_claims() -> None:
    rows = [
        row("SmolLM2-135M", 10),
        row("TinyLlama-1.1B", 100, compile_peak_bytes=130),
        row("TinyLlama-1.1B", 400, precision="fp32", peak_rss_bytes=440, step_seconds=9, floor_seconds=6),
        row("TinyLlama-1.1B", 100, estimator="gradient", compile_peak_bytes=900, peak_rss_bytes=999),
        row("Llama2-7B", 1000, compile_peak_bytes=70),
    ]
    claims = claims_of(rows, {name: size.name for name, size in SIZES.items()})
    assert claims == pytest.approx(
        {
            "device_peak_rss_over_weights_int8": 1.2,
            "device_peak_rss_over_weights_fp32": 1.1,
            "compile_peak_over_result_1b": 1.3,
            "step_seconds_1b_over_floor": 1.5,
        }
    )


def test_a_base_that_was_compiled_only_has_no_claims_of_the_device() -> None:
    compiled = {
        name: value
        for name, value in row("TinyLlama-1.1B", 100).items()
        if name not in ("load_seconds", "step_seconds")
    }
    assert set(claims_of([compiled], {"TinyLlama-1.1B": "1b"})) == {"compile_peak_over_result_1b"}


def test_finished_rows_are_not_measured_again(tmp_path: Path) -> None:
    rows = [row("tiny", 10, estimator, precision) for precision, estimator in QUICK.runs]
    for each in rows:
        (tmp_path / f"tiny.{each['precision']}.{each['estimator']}.json").write_text(json.dumps(each))
    scale(tmp_path / "result.json", quick=True, keep=tmp_path)
    assert json.loads((tmp_path / "result.json").read_bytes())["rows"] == rows
