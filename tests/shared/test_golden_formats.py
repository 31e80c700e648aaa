"""Golden files: today's code reads the bytes in `golden/`, and writes exactly the same bytes.

The files were made by commit 6254662, and nothing updates them automatically. A file may only change together with a
deliberate change of its format. The signing key is a fixed test key.
"""

import base64
import hashlib
import secrets
import struct
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shared.canonical import canonical_json, sha256_hex
from shared.chat_template import ChatTemplate
from shared.errors import Untrusted
from shared.program import ProgramManifest, SignedManifest
from shared.recipe import BaseRef, Recipe
from shared.registry import SignedAdapter
from shared.request_signature import COMPONENTS, RequestSigner, parse_signature, signature_base
from shared.signing import key_id, sign_adapter, sign_manifest, verify_adapter, verify_manifest
from shared.zo.calibration import CalibrationMetadata, dump_calibration, load_calibration
from shared.zo.lora import BaseShape, a_fingerprint, adapter_file, flat_size, load_adapter, named_fingerprint
from shared.zo.proximal import proximal_factor
from shared.zo.trajectory import MAGIC, Evaluation, Ledger, TrajectoryFile, TrajectoryHeader, parse_trajectory
from shared.zo.trajectory_reader import read_ledger

GOLDEN = Path(__file__).parent / "golden"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))

SHAPE = BaseShape(
    architecture="llama",
    layers=2,
    hidden=8,
    intermediate=16,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocabulary=50,
    context_length=64,
)
BASE = BaseRef(name="tiny-\u00e9", sha256="ab" * 32)
SMALL_RECIPE = Recipe(base=BASE, rank=2, alpha=4, layers="last:1", queries=2, answer_length=1, choices=2, a_seed=11)

B_SHA256 = {
    "trajectory": "9c54cfd94336aea80bc2b24bf736f01e43ada3fb4dc517230ede10e5feb9cc6d",
    "trajectory-proximal": "2d40a2f38e1338d69acb40b0d9bb8dba137fb115082b15b2136eb90e17feeedf",
}


def golden(name):
    """Returns the bytes of a golden file."""
    return (GOLDEN / name).read_bytes()


def flat_b(size):
    """Returns a B (size,) of numbers that are exact in float32."""
    return (np.arange(size, dtype=np.float32) - 7) / np.float32(64)


def header(proximal=None):
    return TrajectoryHeader(
        job_id="job_golden",
        job_seed=123456789,
        recipe_id=SMALL_RECIPE.id,
        noise="rademacher",
        queries=2,
        size=24,
        start_sha256=None if proximal is None else "ef" * 32,
        proximal=proximal,
    )


def write_trajectory(ledger, proximal=None):
    """Header, four steps, and evaluations before and after them."""
    ledger.append_evaluation(Evaluation(step=0, split="validation", correct=1, total=3, loss=0.75))
    for step in range(4):
        coefficients = np.array([0.1 * (step + 1), -1 / (3 + step)], dtype=np.float32)
        ledger.append_step(coefficients, None if proximal is None else proximal_factor(0.01, proximal))
    ledger.append_evaluation(Evaluation(step=4, split="validation", correct=2, total=3, loss=0.1))
    ledger.append_evaluation(Evaluation(step=4, split="test", correct=3, total=3, loss=1e-9, adapter="best"))
    ledger.close()


def without_limits(data):
    """Returns a trajectory's bytes without the frames of limits, which earlier agents wrote."""
    frames, at = [data[: len(MAGIC)]], len(MAGIC)
    while at < len(data):
        kind, _, length = struct.unpack_from("<cII", data, at)
        end = at + struct.calcsize("<cII") + length + 4  # with the CRC-32
        frames += [] if kind == b"L" else [data[at:end]]
        at = end
    return b"".join(frames)


@pytest.mark.parametrize(("name", "proximal"), [("trajectory", None), ("trajectory-proximal", 0.25)])
def test_trajectory(name, proximal, tmp_path):
    expected = golden(f"{name}.bin")
    ledger = Ledger(header(proximal))
    write_trajectory(ledger, proximal)
    assert bytes(ledger.data) == without_limits(expected)
    path = tmp_path / "trajectory.bin"
    write_trajectory(TrajectoryFile(path, header(proximal)), proximal)
    assert path.read_bytes() == without_limits(expected)

    read = read_ledger(expected)
    assert read.header == header(proximal)
    assert (read.steps, len(read.evaluations), len(read.limits)) == (4, 3, 2)
    assert read.evaluations == ledger.trajectory.evaluations
    assert [limit.step for limit in read.limits] == [0, 2]
    assert read.proximal_factors == ([] if proximal is None else [proximal_factor(0.01, proximal)] * 4)
    parsed, length = parse_trajectory(expected)
    assert length == len(expected)
    assert parsed.header == read.header
    start = np.zeros(24, np.float32) if proximal is None else flat_b(24)
    for trajectory in (read, parsed):
        assert sha256_hex(trajectory.replay(start).astype("<f4").tobytes()) == B_SHA256[name]


@pytest.mark.parametrize("name", ["default", "rich", "stored"])
def test_recipe(name):
    expected = golden(f"recipe-{name}.json")
    recipe = Recipe.model_validate_json(expected)
    assert canonical_json(recipe.model_dump(mode="json")) == expected
    assert recipe.id == hashlib.sha256(expected).hexdigest()
    assert name != "default" or recipe == Recipe(base=BASE, answer_length=1, choices=2)


@pytest.mark.parametrize(
    ("name", "kind", "sign", "verify"),
    [
        ("program", SignedManifest, sign_manifest, verify_manifest),
        ("adapter", SignedAdapter, sign_adapter, verify_adapter),
        ("adapter-round", SignedAdapter, sign_adapter, verify_adapter),
    ],
)
def test_signed_manifest(name, kind, sign, verify):
    canonical, expected = golden(f"{name}.json"), golden(f"{name}.signed.json")
    signed = kind.model_validate_json(expected)
    KEY.public_key().verify(base64.b64decode(signed.signature), canonical)
    manifest = verify(signed, KEY.public_key())
    assert manifest.canonical() == canonical
    assert type(manifest).model_validate_json(canonical) == manifest
    assert sign(manifest, KEY).model_dump_json().encode() == expected
    if kind is SignedAdapter:
        assert manifest.revision == hashlib.sha256(canonical).hexdigest()[:40]


def test_a_manifest_with_a_chat_template_is_signed_with_it():
    plain = ProgramManifest.model_validate_json(golden("program.json"))
    template = ChatTemplate(template="{{ messages[0].content }}", tokens={"eos_token": "</s>"})
    signed = sign_manifest(plain.model_copy(update={"chat_template": template}), KEY)
    read = SignedManifest.model_validate_json(signed.model_dump_json())
    assert verify_manifest(read, KEY.public_key()).chat_template == template
    with pytest.raises(Untrusted):
        verify_manifest(read.model_copy(update={"manifest": plain}), KEY.public_key())


def test_adapter_file():
    expected, fingerprint = golden("adapter.safetensors"), a_fingerprint(SMALL_RECIPE, SHAPE)
    flat = flat_b(flat_size(SMALL_RECIPE, SHAPE))
    facts = {"job_id": "job_golden", "recipe_id": SMALL_RECIPE.id, "a_sha256": fingerprint, "step": 25}
    assert adapter_file(flat, **facts) == expected
    np.testing.assert_array_equal(load_adapter(expected, flat.size), flat)
    assert named_fingerprint(expected) == fingerprint


def test_calibration():
    expected = golden("calibration.safetensors")
    metadata = CalibrationMetadata(base=BASE, kind="gradients", task="sst2", examples=16)
    directions = {
        "model.layers.1.self_attn.v_proj": np.eye(8, 3, dtype=np.float32)[::-1],
        "model.layers.0.self_attn.q_proj": -np.eye(8, 4, dtype=np.float32),
    }
    assert dump_calibration(metadata, directions) == expected
    calibration = load_calibration(expected)
    assert (calibration.metadata, calibration.sha256) == (metadata, hashlib.sha256(expected).hexdigest())
    assert set(calibration.directions) == set(directions)
    for name, matrix in directions.items():
        np.testing.assert_array_equal(calibration.directions[name], matrix)


REQUEST = ("POST", "/v1/leases/lease_1/heartbeat", "wait=5&name=%C3%A9")
BODY = b'{"phase":"training","step":3}'
NOW = 1_700_000_000


def test_request_signature(monkeypatch):
    nonce = base64.urlsafe_b64encode(bytes(range(24))).decode()
    monkeypatch.setattr(secrets, "token_urlsafe", lambda length: nonce)
    headers = RequestSigner(KEY, lambda: NOW + 0.9).headers(*REQUEST, BODY)
    lines = "".join(f"{name}: {value}\n" for name, value in headers.items())
    assert lines.encode() == golden("request-headers.txt")

    parts = [line.split(": ", 1) for line in golden("request-headers.txt").decode().splitlines()]
    read = parse_signature({name.lower(): value for name, value in parts})
    values = dict(zip(COMPONENTS, (REQUEST[0], REQUEST[1], f"?{REQUEST[2]}", read.content_digest), strict=True))
    base = signature_base([(name, values[name]) for name in read.covered], read.parameters)
    assert base == golden("request-base.txt")
    KEY.public_key().verify(read.signature, base)
    read.verify(KEY.public_key(), *REQUEST)
    assert (read.created, read.keyid, read.digest) == (NOW, key_id(KEY.public_key()), hashlib.sha256(BODY).digest())
