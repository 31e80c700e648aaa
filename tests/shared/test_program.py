"""The manifest: what it insists on, and what documents of earlier versions it still reads."""

import json

import pytest
from pydantic import ValidationError

from shared.program import METHODS, ProgramFile, ProgramManifest

ROLES = {"program": "program.pte", "weights": "weights.ptd", "tokenizer": "tokenizer.json"}


def file(role, name, size=1):
    return ProgramFile(role=role, name=name, size=size, sha256="0" * 64)


@pytest.fixture
def build(recipe, shape):
    def build(*extra, roles=ROLES):
        return ProgramManifest(
            recipe=recipe,
            recipe_id=recipe.id,
            shape=shape,
            size=10,
            a_sha256="1" * 64,
            score_rows=recipe.score_rows,
            files=(*(file(role, name) for role, name in roles.items()), *extra),
            planned_bytes=1,
            flops_per_step=1,
            delegates=1,
            nodes=1,
            executorch="1",
        )

    return build


def test_files_by_role(build):
    manifest = build(file("inference", "inference.pte"))
    assert manifest.file("weights").name == "weights.ptd"
    assert manifest.file("inference").name == "inference.pte"
    assert build().methods == METHODS


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("program", "second.pte"), "exactly one"),
        (("inference", "program.pte"), "share a name"),
        (("inference", "../up.pte"), "name"),
    ],
)
def test_files_that_cannot_be_a_program(build, extra, says):
    with pytest.raises(ValidationError, match=says):
        build(file(*extra))


def test_every_role_is_there_and_one_inference_file_at_most(build):
    for role in ROLES:
        with pytest.raises(ValidationError, match="exactly one"):
            build(roles={name: path for name, path in ROLES.items() if name != role})
    with pytest.raises(ValidationError, match="at most one inference"):
        build(file("inference", "a.pte"), file("inference", "b.pte"))


def test_it_survives_json_to_the_byte(build):
    manifest = build(file("inference", "inference.pte"))
    again = ProgramManifest.model_validate_json(manifest.model_dump_json())
    assert again == manifest
    assert again.canonical() == manifest.canonical()


def test_documents_from_before_a_field_existed_are_read(build):
    manifest = build()
    old = json.loads(manifest.model_dump_json())
    for name in ("methods", "dynamic_length"):
        del old[name]
    del old["shape"]["gated"]
    assert ProgramManifest.model_validate(old) == manifest
