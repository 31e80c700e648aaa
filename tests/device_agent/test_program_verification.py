"""Versions of programs only rise."""

import pytest

from device_agent.program_verification import RollbackProtection
from shared.errors import Untrusted
from tests.device_agent.conftest import enroll


def version(program, number, recipe_id=None):
    changes = {"version": number} | ({"recipe_id": recipe_id} if recipe_id else {})
    return program.manifest.model_copy(update=changes)


def test_an_older_version_is_refused_for_good(home, rademacher):
    seen = RollbackProtection(home.program_versions)
    for number in (1, 3, 3):
        seen.check(version(rademacher, number))
    for again in (seen, RollbackProtection(home.program_versions)):
        with pytest.raises(Untrusted, match=r"version 2 of recipe .* seen version 3.*enroll this device again"):
            again.check(version(rademacher, 2))
    seen.check(version(rademacher, 4))


def test_recipes_have_versions_of_their_own(home, rademacher):
    seen = RollbackProtection(home.program_versions)
    seen.check(version(rademacher, 5))
    seen.check(version(rademacher, 1, recipe_id="a" * 64))


def test_enrolling_again_trusts_anew(home, rademacher, server_key):
    seen = RollbackProtection(home.program_versions)
    seen.check(version(rademacher, 5))
    enroll(home, "http://server", server_key)
    seen.check(version(rademacher, 1))


def test_a_damaged_file_lets_nothing_old_in(home, rademacher):
    home.program_versions.write_text("{")
    with pytest.raises(Untrusted, match=r"seen\.json cannot be read; enroll"):
        RollbackProtection(home.program_versions).check(version(rademacher, 1))
