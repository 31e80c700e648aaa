"""Calibration files: round trip, and rejection of invalid files."""

import contextlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from shared.canonical import sha256_hex
from shared.errors import InvalidRecipe, InvalidUpload
from shared.recipe import BaseRef
from shared.zo.calibration import Calibration, CalibrationMetadata, dump_calibration, load_calibration, read_calibration
from shared.zo.lora import a_fingerprint, frozen_a, init_a, lora_modules


def orthonormal(size, width, seed=0):
    """Random orthonormal columns, float32 (size, width)."""
    random = np.random.default_rng(seed).normal(size=(size, width))
    return np.linalg.qr(random)[0].astype(np.float32)


def metadata(base, **changes):
    return CalibrationMetadata(base=base, kind="gradients", task="sst2", examples=200, **changes)


@pytest.fixture
def file(recipe, shape):
    """A calibration of every adapted layer of `recipe`, five directions each."""
    modules = lora_modules(recipe, shape)
    directions = {module.name: orthonormal(module.in_features, 5, module.index) for module in modules}
    return dump_calibration(metadata(recipe.base), directions)


def altered(file, change):
    """The file with its header's JSON changed."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    change(header)
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data + file[8 + length :]


def test_what_was_written_is_read(file, recipe, shape, tmp_path):
    path = tmp_path / "calibration"
    path.write_bytes(file)
    calibration = read_calibration(path)
    assert calibration.metadata == metadata(recipe.base)
    assert (calibration.sha256, calibration.width) == (sha256_hex(file), 5)
    for module in lora_modules(recipe, shape):
        np.testing.assert_array_equal(
            calibration.directions[module.name], orthonormal(module.in_features, 5, module.index)
        )
    assert dump_calibration(calibration.metadata, dict(reversed(calibration.directions.items()))) == file


def test_a_recipe_takes_the_first_directions(file, recipe, shape):
    calibration = load_calibration(file)
    named = recipe.model_copy(update={"calibration": calibration.sha256})
    random_energies, energies = [], []
    for module in lora_modules(named, shape):
        a = frozen_a(named, module, calibration)
        expected = orthonormal(module.in_features, 5, module.index)[:, : recipe.rank] / np.sqrt(3)
        np.testing.assert_allclose(a, expected, rtol=1e-6)
        energies.append(np.square(a).sum())
        seeds = [recipe.model_copy(update={"a_seed": seed}) for seed in range(50)]
        random_energies.append(np.mean([np.square(init_a(other, module)).sum() for other in seeds]))
    np.testing.assert_allclose(energies, random_energies, rtol=0.05)  # as much energy as a random A has on average
    assert a_fingerprint(named, shape, calibration) != a_fingerprint(recipe, shape)
    assert a_fingerprint(recipe, shape, calibration) == a_fingerprint(recipe, shape)  # the recipe names no calibration


def test_calibrations_that_do_not_fit_a_recipe_are_rejected(file, recipe, shape):
    calibration = load_calibration(file)
    named = recipe.model_copy(update={"calibration": calibration.sha256})
    module = lora_modules(named, shape)[0]

    def refused(message, recipe=named, module=module, calibration=calibration):
        with pytest.raises(InvalidRecipe, match=message):
            frozen_a(recipe, module, calibration)

    refused("is not available", calibration=None)
    refused("is not available", recipe=recipe.model_copy(update={"calibration": "c" * 64}))
    refused("created for base", recipe=named.model_copy(update={"base": BaseRef(name="other", sha256="d" * 64)}))
    refused("has 5 directions", recipe=named.model_copy(update={"rank": 6}))
    fewer = {name: value for name, value in calibration.directions.items() if name != module.name}
    refused(
        f"no directions for {module.name}", calibration=Calibration(calibration.metadata, fewer, calibration.sha256)
    )
    smaller = calibration.directions | {module.name: orthonormal(module.in_features - 1, 5)}
    refused("inputs", calibration=Calibration(calibration.metadata, smaller, calibration.sha256))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (2 * orthonormal(8, 2), "not orthonormal"),
        (np.full((8, 2), 1e38, np.float32), "not orthonormal"),  # their squares are infinite
        (np.ones((8, 2), np.float32) / np.sqrt(8).astype(np.float32), "not orthonormal"),
        (np.full((8, 2), np.nan, np.float32), "not finite"),
        (np.full((8, 2), np.inf, np.float32), "not finite"),
        (orthonormal(8, 2).astype(np.float64), "F64"),
        (orthonormal(8, 2).astype(np.float16), "F16"),
        (orthonormal(8, 2)[:, 0], r"\[8\]"),
        (np.ascontiguousarray(orthonormal(8, 2).T), r"\[2, 8\]"),
        (np.zeros((8, 0), np.float32), r"\[8, 0\]"),
    ],
)
def test_invalid_directions_are_rejected(recipe, tensor, message):
    text = metadata(recipe.base).model_dump_json()
    with pytest.raises(InvalidUpload, match=message):
        load_calibration(save({"layer": tensor}, {"mobizo": text}))


def test_incomplete_calibrations_are_rejected(file, recipe):
    for message, data in (
        ("not a complete", b""),
        ("not a complete", file[:-1]),
        ("not a complete", file + b"\0"),
        ("no description", altered(file, lambda header: header.pop("__metadata__"))),
        ("no description", altered(file, lambda header: header["__metadata__"].pop("mobizo"))),
        ("no description", altered(file, lambda header: header["__metadata__"].update(mobizo="{}"))),
        ("no description", altered(file, lambda header: header["__metadata__"].update(mobizo="["))),
        ("no directions", save({}, {"mobizo": metadata(recipe.base).model_dump_json()})),
    ):
        with pytest.raises(InvalidUpload, match=message):
            load_calibration(data)


def test_scales_multiply_a_and_name_every_module(recipe):
    directions = {"first": orthonormal(6, 2), "second": orthonormal(4, 2)}
    scales = {"first": 0.5, "second": 3.0}
    plain = load_calibration(dump_calibration(metadata(recipe.base), directions))
    scaled = load_calibration(dump_calibration(metadata(recipe.base, scales=scales), directions))
    for name, scale in scales.items():
        np.testing.assert_allclose(scaled.a(name, 2), scale * plain.a(name, 2), rtol=1e-6)
    with pytest.raises(InvalidUpload, match="scales name other modules"):
        load_calibration(dump_calibration(metadata(recipe.base, scales={"first": 1.0}), directions))
    for wrong in (0.0, -1.0, 1e9, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="scales"):
            metadata(recipe.base, scales=scales | {"first": wrong})


@given(data=st.data())
def test_damage_is_rejected_or_changes_the_sha256(data):
    file = dump_calibration(metadata(BaseRef(name="b", sha256="a" * 64)), {"layer": orthonormal(6, 2)})
    index = data.draw(st.integers(0, len(file) - 1))
    damaged = bytearray(file)
    damaged[index] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(InvalidUpload):
        assert load_calibration(bytes(damaged)).sha256 != sha256_hex(file)
