"""Golden files: today's code writes exactly the bytes in `golden/`, and reads them.

The files were made by commit 6254662, through the calls in this module, and nothing updates them automatically. A file
may only change together with a deliberate change of its format. The signing key is a fixed test key.
"""

import base64
import hashlib
import secrets
import struct
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from server.registry.models import Adapter, StoredVersion
from server.registry.service import make_manifest, sign
from shared.canonical import canonical_json, sha256_hex
from shared.chat_template import ChatTemplate
from shared.errors import Untrusted
from shared.federation.cohort import AggregatorSettings, AlgorithmSettings, CohortOrigin, OptimizerSettings
from shared.program import ProgramFile, ProgramManifest, SignedManifest
from shared.recipe import BaseRef, Recipe
from shared.registry import AdapterManifest, Parent, SignedAdapter
from shared.request_signature import COMPONENTS, RequestSigner, parse_signature, signature_base
from shared.result import Result
from shared.signing import (
    key_id,
    sign_manifest,
    verify_adapter,
    verify_manifest,
)
from shared.task import Answer, MappedField, Task
from shared.training_settings import TrainingSettings
from shared.zo.calibration import CalibrationMetadata, dump_calibration, load_calibration
from shared.zo.lora import BaseShape, a_fingerprint, adapter_file, flat_size, load_adapter, named_fingerprint
from shared.zo.proximal import proximal_factor
from shared.zo.trajectory import MAGIC, Evaluation, Ledger, TrajectoryFile, TrajectoryHeader, parse_trajectory
from shared.zo.trajectory_reader import read_ledger

GOLDEN = Path(__file__).parent / "golden"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
CREATED = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
CONTEXT = bytes(range(64, 96))

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
DEFAULT_RECIPE = Recipe(base=BASE, answer_length=1, choices=2)
RICH_RECIPE = Recipe(
    base=BASE,
    rank=4,
    alpha=8.5,
    targets=("v_proj", "q_proj", "down_proj"),
    layers=(1, 0),
    a_seed=2**53 - 1,
    calibration="cd" * 32,
    queries=2,
    effective_batch=3,
    sequence_length=12,
    answer_length=2,
    choices=3,
    loss="candidates",
    precision="int8-weight",
    backend="torch",
    privacy="clipped",
)
STORED_RECIPE = Recipe(
    base=BASE, layers="last:1", answer_length=4, choices=1, noise="operator", estimator="stored", backend="portable"
)
SMALL_RECIPE = Recipe(base=BASE, rank=2, alpha=4, layers="last:1", queries=2, answer_length=1, choices=2, a_seed=11)
RECIPES = {"default": DEFAULT_RECIPE, "rich": RICH_RECIPE, "stored": STORED_RECIPE}

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


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name):
    expected = golden(f"recipe-{name}.json")
    recipe = RECIPES[name]
    assert canonical_json(recipe.model_dump(mode="json")) == expected
    assert recipe.id == hashlib.sha256(expected).hexdigest()
    assert Recipe.model_validate_json(expected) == recipe


def program_manifest():
    return ProgramManifest(
        version=3,
        recipe=RICH_RECIPE,
        recipe_id=RICH_RECIPE.id,
        shape=SHAPE,
        size=flat_size(RICH_RECIPE, SHAPE),
        a_sha256="12" * 32,
        score_rows=RICH_RECIPE.score_rows,
        methods=("step", "replay", "score", "adapter", "load", "prefix", "suffix"),
        dynamic_length=True,
        inference_context=64,
        files=(
            ProgramFile(role="program", name="program.pte", size=1000, sha256="01" * 32),
            ProgramFile(role="weights", name="weights.ptd", size=2000, sha256="02" * 32),
            ProgramFile(role="tokenizer", name="tokenizer.json", size=300, sha256="03" * 32),
            ProgramFile(role="inference", name="inference.pte", size=4000, sha256="04" * 32),
        ),
        planned_bytes=123456,
        flops_per_step=9876543210,
        delegates=7,
        nodes=89,
        executorch="1.0.0",
    )


def test_program_manifest():
    signed = sign_manifest(program_manifest(), KEY)
    assert signed.manifest.canonical() == golden("program.json")
    assert signed.model_dump_json().encode() == golden("program.signed.json")

    read = SignedManifest.model_validate_json(golden("program.signed.json"))
    KEY.public_key().verify(base64.b64decode(read.signature), golden("program.json"))
    assert verify_manifest(read, KEY.public_key()) == program_manifest()
    assert ProgramManifest.model_validate_json(golden("program.json")) == program_manifest()


def test_a_manifest_with_a_chat_template_is_signed_with_it():
    template = ChatTemplate(template="{{ messages[0].content }}", tokens={"eos_token": "</s>"})
    signed = sign_manifest(program_manifest().model_copy(update={"chat_template": template}), KEY)
    read = SignedManifest.model_validate_json(signed.model_dump_json())
    assert verify_manifest(read, KEY.public_key()).chat_template == template
    with pytest.raises(Untrusted):
        verify_manifest(read.model_copy(update={"manifest": program_manifest()}), KEY.public_key())


TASK = Task(
    name="golden-task",
    prompt="{text} It was {{really}} {degree}",
    answers=(Answer(text=" bad", labels=("0", "no")), Answer(text=" good \u2713", labels=("1",))),
    label_field="sentiment",
    mapped={"degree": MappedField(field="stars", values={"1": "very", "2": "quite"})},
)
TRAINING = TrainingSettings(steps=40, lr=0.005, schedule="cosine", warmup_steps=4, seed=5, eps=0.01, proximal=0.5)
RESULT = Result(
    steps=40,
    best_step=25,
    train_seconds=12.5,
    seconds=20.25,
    peak_rss_bytes=300_000_000,
    train_examples=64,
    truncated_examples=2,
    evaluations=(Evaluation(step=25, split="validation", correct=30, total=40, loss=0.4321),),
    zero_shot_accuracy=0.5,
    tuned_accuracy=0.75,
)
PARENT = Parent(adapter="movies", version=1, revision="9f" * 20)


def adapter_bytes():
    size = flat_size(SMALL_RECIPE, SHAPE)
    return adapter_file(
        flat_b(size),
        job_id="job_golden",
        recipe_id=SMALL_RECIPE.id,
        a_sha256=a_fingerprint(SMALL_RECIPE, SHAPE),
        step=25,
    )


def test_adapter_file():
    expected = golden("adapter.safetensors")
    size = flat_size(SMALL_RECIPE, SHAPE)
    assert adapter_bytes() == expected
    np.testing.assert_array_equal(load_adapter(expected, size), flat_b(size))
    assert named_fingerprint(expected) == a_fingerprint(SMALL_RECIPE, SHAPE)


def stored_version(job_id, device_id):
    data = golden("adapter.safetensors")
    return StoredVersion(
        version=2,
        job_id=job_id,
        device_id=device_id,
        recipe=SMALL_RECIPE,
        shape=SHAPE,
        recipe_id=SMALL_RECIPE.id,
        a_sha256=a_fingerprint(SMALL_RECIPE, SHAPE),
        sha256=sha256_hex(data),
        size=len(data),
        size_d=flat_size(SMALL_RECIPE, SHAPE),
        result=RESULT,
        created_at=CREATED,
    )


def device_version():
    """Returns a signed version that one device trained."""
    version = stored_version("job_golden", "device_golden")
    adapter = Adapter(tenant="acme", name="movies", user="alice")
    sign(version, make_manifest(adapter, version, TASK, TRAINING, PARENT), KEY)
    return version


def round_version():
    """Returns a signed version of a cohort's round."""
    version = stored_version(None, None)
    origin = CohortOrigin(
        cohort="readers",
        round=3,
        updates=5,
        algorithm=AlgorithmSettings(name="fedprox", mu=0.1),
        aggregator=AggregatorSettings(clip_norm=1.5),
        optimizer=OptimizerSettings(name="adam", lr=0.5),
        epsilon=2.5,
    )
    adapter = Adapter(tenant="acme", name="readers", user="readers")
    sign(version, make_manifest(adapter, version, TASK, TrainingSettings(), None, origin), KEY)
    return version


@pytest.mark.parametrize(("name", "make"), [("adapter", device_version), ("adapter-round", round_version)])
def test_adapter_manifest(name, make):
    canonical, signed = golden(f"{name}.json"), golden(f"{name}.signed.json")
    version = make()
    assert version.manifest.canonical() == canonical
    assert version.signed.model_dump_json().encode() == signed
    assert version.revision == hashlib.sha256(canonical).hexdigest()[:40]

    parsed = SignedAdapter.model_validate_json(signed)
    KEY.public_key().verify(base64.b64decode(parsed.signature), canonical)
    assert verify_adapter(parsed, KEY.public_key()) == version.manifest
    assert AdapterManifest.model_validate_json(canonical) == version.manifest


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
