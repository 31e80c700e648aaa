"""Validation of manifests, and reading of documents from earlier versions."""

import json

import pytest
from pydantic import ValidationError

from shared.program import ProgramManifest
from tests.shared.conftest import ROLES


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("program", "second.pte"), "exactly one"),
        (("inference", "program.pte"), "share a name"),
        *((("inference", name), "name") for name in ("../up.pte", "/etc/evil", "a/b", "..", "")),
    ],
)
def test_files_that_cannot_be_a_program(build, extra, message):
    with pytest.raises(ValidationError, match=message):
        build(extra)


def test_every_role_is_there_and_one_inference_file_at_most(build):
    for role in ROLES:
        with pytest.raises(ValidationError, match="exactly one"):
            build(roles={name: path for name, path in ROLES.items() if name != role})
    with pytest.raises(ValidationError, match="at most one inference"):
        build(("inference", "a.pte"), ("inference", "b.pte"))


def test_documents_from_before_a_field_existed_are_read(build):
    manifest = build()
    old = json.loads(manifest.model_dump_json())
    for name in ("methods", "dynamic_length"):
        del old[name]
    del old["shape"]["gated"]
    assert ProgramManifest.model_validate(old) == manifest
