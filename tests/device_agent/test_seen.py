"""Versions of programs only rise."""

import pytest

from device_agent.seen import SeenVersions
from shared.errors import Untrusted
from tests.device_agent.conftest import enrol


def version(program, number, recipe_id=None):
    changes = {"version": number} | ({"recipe_id": recipe_id} if recipe_id else {})
    return program.manifest.model_copy(update=changes)


def test_an_older_version_is_refused_for_good(home, rademacher):
    seen = SeenVersions(home.seen)
    for number in (1, 3, 3):
        seen.admit(version(rademacher, number))
    for again in (seen, SeenVersions(home.seen)):
        with pytest.raises(Untrusted, match=r"version 2 of recipe .* seen version 3.*enrol this device again"):
            again.admit(version(rademacher, 2))
    seen.admit(version(rademacher, 4))


def test_recipes_have_versions_of_their_own(home, rademacher):
    seen = SeenVersions(home.seen)
    seen.admit(version(rademacher, 5))
    seen.admit(version(rademacher, 1, recipe_id="a" * 64))


def test_enrolling_again_trusts_anew(home, rademacher, server_key):
    seen = SeenVersions(home.seen)
    seen.admit(version(rademacher, 5))
    enrol(home, "http://server", server_key)
    seen.admit(version(rademacher, 1))


def test_a_damaged_file_lets_nothing_old_in(home, rademacher):
    home.seen.write_text("{")
    with pytest.raises(Untrusted, match=r"seen\.json cannot be read; enrol"):
        SeenVersions(home.seen).admit(version(rademacher, 1))
