"""Checkpoint forms: what is read, and what is refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.base import AttentionKind, Rope, locate_base
from server.compiler.checkpoints.checkpoint import inspect_base, load_checkpoint
from server.compiler.checkpoints.tokenizer import write_tokenizer
from server.compiler.model.decoder import inverse_frequencies
from server.compiler.program import compile_program
from shared.errors import UnknownBase, UnreadableCheckpoint, UnsupportedModel
from tests.server import gguf_files
from tests.server.compiler.conftest import LLAMA3_ROPE, VOCABULARY, eager_logits, make_tiny


@pytest.fixture
def editable(tiny, tmp_path):
    """A copy of the tiny base to spoil."""
    return Path(shutil.copytree(tiny.directory, tmp_path / "base"))


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_gguf(base, path, rope_factors=None, **metadata):
    """The tiny base as GGUF, with other metadata."""

    def add(writer):
        for name, value in metadata.items():
            kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
            kinds.get(type(value), writer.add_float32)(name.replace("__", "."), value)
        if rope_factors is not None:
            writer.add_tensor("rope_freqs.weight", rope_factors)

    gguf_files.write_gguf(base.model, "llama", path, add=add, vocabulary=False)


def test_facts_of_a_directory(tiny, tiny_tied):
    facts = inspect_base(str(tiny.directory))
    assert (facts.architecture, facts.layers, facts.hidden, facts.intermediate) == ("llama", 2, 32, 48)
    assert (facts.heads, facts.kv_heads, facts.head_dim, facts.vocabulary) == (4, 2, 8, VOCABULARY)
    assert (facts.context_length, facts.tied, facts.norm_eps) == (64, False, 1e-6)
    assert facts.attention == (AttentionKind(rope=Rope(theta=10000.0)),)
    assert facts.parameters == sum(p.numel() for p in tiny.model.parameters())
    tied = inspect_base(str(tiny_tied.directory))
    assert tied.tied
    assert tied.parameters == sum(p.numel() for p in tiny_tied.model.parameters())


def test_the_digest_follows_names_and_bytes(editable):
    before = inspect_base(str(editable)).sha256
    (editable / "notes.txt").write_text("not pinned")
    assert inspect_base(str(editable)).sha256 == before
    (editable / "tokenizer.json").write_text("{}")
    assert inspect_base(str(editable)).sha256 != before


def assert_same_weights(ours, expected):
    assert torch.equal(ours.norms, expected.norms)
    for mine, theirs in zip((ours.tables, *ours.layers), (expected.tables, *expected.layers), strict=True):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), name


def test_gguf_gives_the_same_weights(tiny, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path)
    ours, expected = load_checkpoint(str(path)), load_checkpoint(str(tiny.directory))
    assert_same_weights(ours, expected)
    excluded_fields = {"sha256", "form", "norm_eps"}
    assert ours.facts.model_dump(exclude=excluded_fields) == expected.facts.model_dump(exclude=excluded_fields)


def stock_frequencies(base):
    """Radians per token of each pair of a head's features, as transformers turns them."""
    return base.model.model.rotary_emb.inv_freq.numpy()


def test_gguf_keeps_linear_rope_scaling(tiny, tmp_path):
    scaled = make_tiny(tmp_path / "scaled", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    for name, metadata in {
        "newer": {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
        "older": {"llama__rope__scale_linear": 4.0},
    }.items():
        write_gguf(tiny, tmp_path / name, **metadata)
        assert inspect_base(str(tmp_path / name)).attention == inspect_base(str(scaled.directory)).attention
    write_gguf(tiny, tmp_path / "none", llama__rope__scaling__type="none", llama__rope__scaling__factor=4.0)
    assert inspect_base(str(tmp_path / "none")).attention[0].rope == Rope(theta=10000.0)


def test_gguf_keeps_llama3_rope_scaling(tiny, tmp_path):
    scaled = make_tiny(tmp_path / "scaled", rope_parameters={**LLAMA3_ROPE, "rope_theta": 10000.0})
    frequencies = stock_frequencies(scaled)
    write_gguf(tiny, tmp_path / "llama3.gguf", (stock_frequencies(tiny) / frequencies).astype(np.float32))
    facts = inspect_base(str(tmp_path / "llama3.gguf"))
    rope = facts.attention[0].rope
    assert rope is not None
    np.testing.assert_allclose(inverse_frequencies(rope, facts.head_dim), frequencies, rtol=1e-6)
    assert facts.parameters == inspect_base(str(tiny.directory)).parameters


def test_gguf_refusals(tiny, tmp_path):
    write_gguf(tiny, tmp_path / "scaled.gguf", llama__rope__scaling__type="longrope")
    with pytest.raises(UnsupportedModel, match="RoPE scaling 'longrope'"):
        inspect_base(str(tmp_path / "scaled.gguf"))
    write_gguf(tiny, tmp_path / "loud.gguf", llama__rope__scaling__attn_factor=1.5)
    with pytest.raises(UnsupportedModel, match=r"RoPE attention factor 1\.5"):
        inspect_base(str(tmp_path / "loud.gguf"))
    write_gguf(tiny, tmp_path / "short.gguf", np.ones(3, np.float32))
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight is not 4 float32 factors"):
        inspect_base(str(tmp_path / "short.gguf"))
    write_gguf(tiny, tmp_path / "bloom.gguf", general__architecture="bloom")
    with pytest.raises(UnsupportedModel, match="architecture 'bloom' is not supported as GGUF"):
        inspect_base(str(tmp_path / "bloom.gguf"))
    write_gguf(tiny, tmp_path / "part.gguf", split__no=0, split__count=3)
    with pytest.raises(UnsupportedModel, match=r"part\.gguf is one of 3 parts .*`llama-gguf-split --merge`"):
        inspect_base(str(tmp_path / "part.gguf"))
    for length in (1000, -1000):  # within the metadata, within the tensors
        (tmp_path / "torn.gguf").write_bytes((tmp_path / "scaled.gguf").read_bytes()[:length])
        with pytest.raises(UnreadableCheckpoint, match=r"torn\.gguf .*; copy or download it again"):
            inspect_base(str(tmp_path / "torn.gguf"))


def test_gguf_options_may_be_given_for_each_layer(tiny, tmp_path):
    write_gguf(tiny, tmp_path / "tiny.gguf", llama__expert_count=[0, 0], llama__rope__scale_linear=[2.0, 2.0])
    assert inspect_base(str(tmp_path / "tiny.gguf")).attention[0].rope == Rope(theta=10000.0, kind="linear", factor=2.0)
    for name, value, message in (
        ("llama__expert_count", [0, 4], r"another llama\.expert_count in each layer"),
        ("llama__rope__dimension_count", [8, 4], r"another llama\.rope\.dimension_count in each layer"),
        ("llama__attention__key_length", "long", "lack a usable value"),
    ):
        write_gguf(tiny, tmp_path / "odd.gguf", **{name: value})
        with pytest.raises((UnsupportedModel, UnreadableCheckpoint), match=message):
            inspect_base(str(tmp_path / "odd.gguf"))


def test_damaged_directories_are_refused(editable):
    weights = editable / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableCheckpoint, match=r"model\.safetensors"):
        load_checkpoint(str(editable))
    weights.write_bytes(whole)
    edit_config(editable, num_hidden_layers=3)
    with pytest.raises(UnreadableCheckpoint, match=r"lacks 9 tensors"):
        load_checkpoint(str(editable))
    edit_config(editable, num_hidden_layers=2, intermediate_size=64)
    with pytest.raises(UnreadableCheckpoint, match="gate_proj has shape"):
        load_checkpoint(str(editable))


def test_bad_shards_are_refused_before_anything_is_stored(tiny, tmp_path):
    source, out = tmp_path / "base", tmp_path / "program"
    tiny.model.save_pretrained(source, max_shard_size="16KB")
    shutil.copy(tiny.directory / "tokenizer.json", source)
    first, *_ = shards = sorted(source.glob("*.safetensors"))
    whole, tensors = first.read_bytes(), load_file(first)
    assert_same_weights(load_checkpoint(str(source)), load_checkpoint(str(tiny.directory)))
    name = next(iter(tensors))

    def assert_refused(message):
        recipe = tiny.recipe()  # its base is checked after the files
        with pytest.raises(UnreadableCheckpoint, match=message):
            compile_program(recipe, str(source), out)
        assert not out.exists()

    first.unlink()
    assert_refused(
        rf"{first.name}, which .*index\.json names, is missing \(1 of {len(shards)} files\); copy or download"
    )
    first.write_bytes(whole[:-10])
    assert_refused(rf"{first.name} is not a complete safetensors file .*; copy or download it again")
    save_file({**tensors, name: tensors[name].to(torch.int8)}, first)
    assert_refused(rf"{name} in {first.name} is stored as I8; convert the weights to BF16, F16 or F32")
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, first)
    assert_refused("has shape .* the configuration requires .* use the weights and the configuration of one model")


def test_json_files_may_begin_with_a_byte_order_mark(tiny, tmp_path):
    source = tmp_path / "base"
    tiny.model.save_pretrained(source, max_shard_size="16KB")
    shutil.copy(tiny.directory / "tokenizer.json", source)
    for name in ("config.json", "model.safetensors.index.json"):
        (source / name).write_text((source / name).read_text(), encoding="utf-8-sig")
    assert_same_weights(load_checkpoint(str(source)), load_checkpoint(str(tiny.directory)))


def assert_logits_of_transformers(directory):
    tokens = torch.tensor([[3, 14, 15, 92, 65]])
    stock = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = stock(tokens).logits[0]
    torch.testing.assert_close(eager_logits(load_checkpoint(str(directory)), tokens)[0], expected, atol=1e-4, rtol=1e-4)


def test_files_that_the_index_does_not_name_are_not_read(tiny, tiny_tied, tmp_path):
    source = tmp_path / "base"
    tiny.model.save_pretrained(source, max_shard_size="16KB")
    shutil.copy(tiny.directory / "tokenizer.json", source)
    before = inspect_base(str(source))
    other = {name: tensor + 1 for name, tensor in load_file(tiny.directory / "model.safetensors").items()}
    save_file(other, source / "model-00009-of-00009.safetensors")  # as an earlier, longer save leaves behind
    assert inspect_base(str(source)) == before
    assert_logits_of_transformers(source)
    save_file(other, source / "model.safetensors")  # which transformers would read, and the index would not
    with pytest.raises(UnreadableCheckpoint, match=r"does not name model\.safetensors; remove"):
        inspect_base(str(source))


def test_without_an_index_one_file_is_read(editable):
    own = load_file(editable / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in own.items()}, editable / "consolidated.safetensors")
    assert_logits_of_transformers(editable)
    (editable / "adapter_config.json").write_text("{}")  # which transformers would apply
    with pytest.raises(UnreadableCheckpoint, match=r"has an adapter beside the model; merge it"):
        inspect_base(str(editable))
    (editable / "adapter_config.json").unlink()
    (editable / "model.safetensors").rename(editable / "model-00001-of-00002.safetensors")
    with pytest.raises(UnreadableCheckpoint, match=r"2 \.safetensors files but no model\.safetensors\.index\.json"):
        inspect_base(str(editable))


def test_the_index_names_the_file_of_each_tensor(tiny, tmp_path):
    source = tmp_path / "base"
    tiny.model.save_pretrained(source, max_shard_size="16KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    name, file = next(iter(index["weight_map"].items()))
    other = next(each for each in index["weight_map"].values() if each != file)
    tensor = load_file(source / file)[name]
    save_file({**load_file(source / other), name: tensor + 1}, source / other)
    assert_same_weights(load_checkpoint(str(source)), load_checkpoint(str(tiny.directory)))
    index["weight_map"]["model.layers.0.absent.weight"] = file
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnreadableCheckpoint, match=rf"{file} lacks model\.layers\.0\.absent\.weight"):
        inspect_base(str(source))


def test_two_different_tables_are_not_tied(tiny, tiny_tied, tmp_path):
    """As transformers 5 reads a checkpoint whose configuration ties tables that it has both."""
    source = Path(shutil.copytree(tiny.directory, tmp_path / "base"))
    edit_config(source, tie_word_embeddings=True)
    facts = inspect_base(str(source))
    assert not facts.tied
    assert facts.parameters == sum(parameter.numel() for parameter in tiny.model.parameters())
    assert_logits_of_transformers(source)
    for table, kept in (("copy", None), ("moved", "model.embed_tokens.weight")):
        tied = Path(shutil.copytree(tiny_tied.directory, tmp_path / table))
        tensors = load_file(tied / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if kept is not None:
            del tensors[kept]
        save_file(tensors, tied / "model.safetensors", {"format": "pt"})
        assert inspect_base(str(tied)).tied
        assert_logits_of_transformers(tied)


def test_an_unknown_source_is_named():
    with pytest.raises(UnknownBase, match="no such//model"):
        inspect_base("no such//model")


def test_a_tokenizer_of_two_files_is_pinned_and_converted(architectures, tmp_path):
    """OPT comes with vocab.json and merges.txt alone."""
    directory = Path(shutil.copytree(architectures.base("opt").directory, tmp_path / "opt"))
    own = inspect_base(str(directory)).sha256
    words = ["<s>", "<pad>", "</s>", "<unk>", "t", "h", "e", "th", "the"]
    (directory / "vocab.json").write_text(json.dumps({word: at for at, word in enumerate(words)}))
    (directory / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    assert inspect_base(str(directory)).sha256 == own  # beside a tokenizer.json they decide nothing
    (directory / "tokenizer.json").unlink()
    assert inspect_base(str(directory)).sha256 != own
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    write_tokenizer(locate_base(str(directory)), tmp_path / "tokenizer.json")
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("thet", add_special_tokens=False).ids == [8, 4]
