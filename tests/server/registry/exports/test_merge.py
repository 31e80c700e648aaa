"""Merged models against PEFT's own `merge_and_unload`, loaded by stock transformers."""

import json
import shutil
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch
from transformers import AutoModelForCausalLM

from server.compiler.calibrate import calibrate
from server.compiler.checkpoints.base import locate_base
from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.registry.exports.converter_process import ConverterProcess, Order
from server.registry.exports.merge import INDEX, ONE_FILE, merge
from shared.canonical import file_sha256
from shared.errors import AMismatch, BaseMismatch, InvalidRecipe, UnreadableCheckpoint
from shared.zo.calibration import CalibrationMetadata, dump_calibration, load_calibration
from shared.zo.encoding import Example, Row
from shared.zo.lora import a_fingerprint, dump_adapter, lora_modules
from tests.server.compiler.conftest import eager_logits
from tests.server.peft_directory import write_peft
from tests.server.registry.exports.stock import ADAPTED, VOCABULARY, adapted, make_base, next_token, prompts, with_peft
from tests.server.registry.exports.stock import write_gguf as write_gguf_base


def write_merged(base, directory, **options):
    return merge(base.recipe, base.shape, base.flat, base.a_sha256, str(base.directory), directory, **options)


def reference(base, directory):
    """PEFT's merge of our PEFT directory into the stock model."""
    write_peft(base.recipe, base.shape, base.flat, base.a_sha256, directory)
    return with_peft(base.model(), directory).merge_and_unload()


def load_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def largest_difference(ours, theirs):
    expected = theirs.state_dict()
    tensors = ours.state_dict()
    assert tensors.keys() == expected.keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    return max(float((tensors[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("name", list(ADAPTED))
def test_the_merged_model_is_pefts(tmp_path, name):
    base = make_base(tmp_path / "base", name)
    files = write_merged(base, tmp_path / "merged")
    ours, theirs = load_model(tmp_path / "merged"), reference(base, tmp_path / "peft")
    assert largest_difference(ours, theirs) < 1e-5
    tokens = prompts(20, 8)
    expected = next_token(with_peft(base.model(), tmp_path / "peft"), tokens)
    np.testing.assert_allclose(next_token(ours, tokens), expected, atol=1e-3)
    assert np.abs(expected - next_token(base.model(), tokens)).max() > 0.1  # the adapter does something
    decoded = eager_logits(load_checkpoint(str(tmp_path / "merged")), torch.from_numpy(tokens))[:, -1]
    np.testing.assert_allclose(torch.log_softmax(decoded, -1), expected, atol=1e-3)  # and our own decoder agrees
    assert [(file.path, file.size, file.sha256) for file in files] == [
        (path.name, path.stat().st_size, file_sha256(path)) for path in sorted((tmp_path / "merged").iterdir())
    ]
    assert {"config.json", "tokenizer.json", ONE_FILE} <= {file.path for file in files}


def test_a_base_in_half_precision_is_merged_in_float32(tmp_path):
    base = make_base(tmp_path / "base", "llama", torch.bfloat16)
    write_merged(base, tmp_path / "merged")
    assert largest_difference(load_model(tmp_path / "merged"), reference(base, tmp_path / "peft")) < 1e-5


def test_large_models_are_several_files(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    whole, parts = write_merged(base, tmp_path / "whole"), write_merged(base, tmp_path / "parts", shard_bytes=20_000)
    assert write_merged(base, tmp_path / "again") == whole
    names = [file.path for file in parts if file.path.endswith(".safetensors")]
    assert len(names) > 2
    assert all(name.endswith(f"-of-{len(names):05d}.safetensors") for name in names)
    index = json.loads((tmp_path / "parts" / INDEX).read_text())
    tensors = safetensors.numpy.load_file(tmp_path / "whole" / ONE_FILE)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert largest_difference(load_model(tmp_path / "parts"), load_model(tmp_path / "whole")) == 0
    assert not any("part-" in file.path for file in (*whole, *parts))


def test_a_gguf_base_becomes_a_hugging_face_directory(tmp_path):
    stock = make_base(tmp_path / "stock", "llama-tied")
    source = write_gguf_base(stock, tmp_path / "base.gguf")
    base = adapted(source, str(source), ADAPTED["llama-tied"])
    write_merged(base, tmp_path / "merged")
    same_b = adapted(stock.directory, str(stock.directory), ADAPTED["llama-tied"])
    assert largest_difference(load_model(tmp_path / "merged"), reference(same_b, tmp_path / "peft")) < 1e-5
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"]) == (VOCABULARY, "float32")
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_a_gguf_base_is_calibrated_as_its_hugging_face_form(tmp_path):
    stock = make_base(tmp_path / "stock", "llama-tied")
    source = write_gguf_base(stock, tmp_path / "base.gguf")
    rows = [Row((3 + number, 20 + 2 * number, 60 - number), (70 + number,)) for number in range(12)]
    examples = [Example((row,), 0, False) for row in rows]
    calibrated = []
    for place in (str(stock.directory), str(source)):
        recipe = stock.recipe.model_copy(update={"effective_batch": 4, "base": adapted(None, place, {}).recipe.base})
        calibrated.append(load_calibration(calibrate(place, recipe, "gradients", "own", examples)).directions)
    assert calibrated[0].keys() == calibrated[1].keys()
    for name, directions in calibrated[0].items():
        np.testing.assert_allclose(calibrated[1][name], directions, atol=1e-3)


def test_a_calibrated_a_is_merged_by_the_converter(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    random, directions = np.random.default_rng(0), {}
    for module in lora_modules(base.recipe, base.shape):
        directions[module.name] = np.linalg.qr(random.normal(size=(module.in_features, 4)))[0].astype(np.float32)
    metadata = CalibrationMetadata(base=base.recipe.base, kind="activations", task="sst2", examples=1)
    file = dump_calibration(metadata, directions)
    calibration = load_calibration(file)
    recipe = base.recipe.model_copy(update={"calibration": calibration.sha256})
    a_sha256 = a_fingerprint(recipe, base.shape, calibration)
    order = Order(recipe=recipe, shape=base.shape, a_sha256=a_sha256)
    converter = ConverterProcess(
        [sys.executable, "-W", "ignore", "-m", "server.registry.exports"], 0.2, None, lambda: True
    )
    arguments = order, dump_adapter(base.flat, {}), str(base.directory), tmp_path
    with pytest.raises(InvalidRecipe, match="is not available"):
        converter.run(*arguments)
    converter.run(*arguments, file)
    write_peft(recipe, base.shape, base.flat, a_sha256, tmp_path / "peft", calibration)
    theirs = with_peft(base.model(), tmp_path / "peft").merge_and_unload()
    assert largest_difference(load_model(tmp_path / "merged"), theirs) < 1e-5
    assert largest_difference(load_model(tmp_path / "merged"), reference(base, tmp_path / "random")) > 0.01


def test_what_does_not_belong_together_is_refused(tmp_path):
    base = make_base(tmp_path / "base", "llama-tied")
    recipe, arguments = base.recipe, (base.shape, base.flat, base.a_sha256, str(base.directory), tmp_path / "merged")
    with pytest.raises(AMismatch):
        merge(recipe.model_copy(update={"a_seed": 8}), *arguments)
    other = recipe.base.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(BaseMismatch, match="000000000000"):
        merge(recipe.model_copy(update={"base": other}), *arguments)
    shutil.copy(base.directory / ONE_FILE, tmp_path / "kept")
    (base.directory / ONE_FILE).write_bytes((tmp_path / "kept").read_bytes()[:-100])
    damaged_base = repin(base)
    with pytest.raises(UnreadableCheckpoint):
        merge(damaged_base, *arguments)


def repin(base):
    """The recipe, pinned to the base's files as they are now."""
    pinned = base.recipe.base.model_copy(update={"sha256": locate_base(str(base.directory)).sha256})
    return base.recipe.model_copy(update={"base": pinned})
