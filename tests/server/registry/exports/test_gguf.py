"""GGUF adapters, loaded by llama.cpp itself: it answers as PEFT does."""

import gguf
import numpy as np
import pytest

from server.compiler.checkpoints.architectures import ARCHITECTURES, MULTIMODAL
from server.compiler.checkpoints.gguf_names import gguf_architecture
from server.registry.exports.gguf import gguf_lora
from shared.errors import UnsupportedFormat
from shared.zo.lora import a_fingerprint, flat_size
from tests.server.compiler.checkpoints.test_gguf_architectures import IN_GGUF
from tests.server.compiler.test_families import FAMILIES as TINY
from tests.server.compiler.test_families import make_family
from tests.server.gguf_files import write_gguf
from tests.server.registry.exports.stock import LlamaCpp, next_token, prompts

# Of phi3 with LongRoPE, llama.cpp chooses the factors by the size of its context.
QUICK = ("llama", "qwen2", "gemma3_text", "phi3", "gpt_neox", "lfm2")
FAMILIES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in IN_GGUF if name != "phi3 longrope"
]
# Of which llama.cpp has no architecture.
WITHOUT_GGUF = {"ministral", "helium", "opt"}


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_answers_as_peft_does(tmp_path, name):
    """All linear layers, of which some families hold several in one tensor."""
    architecture, settings = IN_GGUF[name]
    made = make_family(tmp_path / "base", name.split()[0], settings)
    recipe, flat = made.recipe(), made.random_b()
    (tmp_path / "adapter.gguf").write_bytes(gguf_lora(recipe, made.shape, flat, a_fingerprint(recipe, made.shape)))
    tokens = prompts(20, 8)
    plain = next_token(made.model, tokens)
    expected = next_token(made.stock_peft(flat, tmp_path / "peft"), tokens)
    assert (plain.argmax(1) != expected.argmax(1)).any()
    llama = LlamaCpp(write_gguf(made.model, architecture, tmp_path / "base.gguf"), tmp_path / "adapter.gguf")
    tops = [llama.top(row) for row in tokens]
    assert [token for token, _ in tops] == expected.argmax(1).tolist()
    np.testing.assert_allclose([value for _, value in tops], expected.max(1), atol=2e-3)
    assert [llama.top(row, 0.0)[0] for row in tokens[:10]] == plain[:10].argmax(1).tolist()


def test_other_families_are_refused_by_name(tmp_path):
    assert {name for name in (*ARCHITECTURES, *MULTIMODAL) if gguf_architecture(name) is None} == WITHOUT_GGUF
    made = make_family(tmp_path / "base", "opt", TINY["opt"])
    with pytest.raises(UnsupportedFormat, match=r"not written for architecture 'opt', only for llama\.cpp's llama, "):
        gguf_lora(*adapter_of(made, made.random_b()))


def adapter_of(made, flat, **settings):
    """Recipe, shape, B and the fingerprint of A, as exports take them."""
    recipe = made.recipe(**settings)
    return recipe, made.shape, flat, a_fingerprint(recipe, made.shape)


def test_one_llama_server_applies_the_adapter_that_a_request_names(tmp_path):
    """`llama-server --lora A --lora B --lora-init-without-apply`; xllamacpp's parameter has the option's name."""
    made = make_family(tmp_path / "base", "llama", {})
    tokens, expected, adapters = prompts(20, 8), [], []
    for number, flat in enumerate((3 * made.random_b(), -6 * made.random_b())):
        adapters.append(tmp_path / f"{number}.gguf")
        adapters[-1].write_bytes(gguf_lora(*adapter_of(made, flat)))
        expected.append(next_token(made.stock_peft(flat, tmp_path / f"peft-{number}"), tokens).argmax(1).tolist())
    plain = next_token(made.model, tokens).argmax(1).tolist()
    assert plain != expected[0] != expected[1] != plain
    llama = LlamaCpp(write_gguf(made.model, "llama", tmp_path / "base.gguf"), *adapters, apply=False)
    # The option leaves their scales at 1 for requests that name none, in the version here; 0 has to be said once.
    assert [each["path"] for each in llama.ask("/lora-adapters")] == [str(path) for path in adapters]
    assert llama.ask("/lora-adapters", [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.0}]) == {"success": True}
    assert [llama.top(row)[0] for row in tokens] == plain
    for scales, answers in (((1.0, 0.0), expected[0]), ((0.0, 1.0), expected[1]), ((0.0, 0.0), plain)):
        assert [llama.top(row, *scales)[0] for row in tokens] == answers


def test_what_the_file_says_of_itself(tmp_path):
    made, settings = make_family(tmp_path / "base", "llama", {}), {"targets": ("q_proj", "k_proj"), "layers": (0, 2)}
    size = flat_size(made.recipe(**settings), made.shape)
    recipe, shape, flat, a_sha256 = adapter_of(made, np.ones(size, np.float32), **settings)
    path = tmp_path / "adapter.gguf"
    data = gguf_lora(recipe, shape, flat, a_sha256)
    path.write_bytes(data)
    assert gguf_lora(recipe, shape, flat, a_sha256) == data
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert metadata == {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": recipe.alpha,
        "general.base_model.count": 1,
        "general.base_model.0.name": "tiny",
        "mobizo.base_sha256": recipe.base.sha256,
        "mobizo.recipe_id": recipe.id,
        "mobizo.a_sha256": a_sha256,
    }
    assert sorted(tensor.name for tensor in reader.tensors) == sorted(
        f"blk.{layer}.attn_{kind}.weight.lora_{matrix}" for layer in (0, 2) for kind in "qk" for matrix in "ab"
    )
