"""What a revision stands for."""

import pytest

from server.registry.models import StoredVersion
from server.registry.repository import resolve
from shared.errors import AdapterNotFound, RevisionNotFound

NAME = "alice-movies"


@pytest.fixture
def resolve_revision(home):
    """The number of the version that a revision stands for."""

    def number(revision, tenant="default", name=NAME):
        with home.database.reading() as session:
            return resolve(session, tenant, name, revision)[1].version

    return number


@pytest.fixture
def two(publish):
    return [publish(value) for value in (0.25, 0.5)]


NOTHING = ("", "v0", "0", "v3", "v01", "V1", "9" * 40, "f" * 40, "Main", "../1", "a\0b", "\xe9", "x" * 5000)


@pytest.mark.both_databases
def test_what_stands_for_nothing(two, resolve_revision):
    for revision in NOTHING:
        with pytest.raises(RevisionNotFound):
            resolve_revision(revision)
    for name in ("", "..", "Alice-movies", "a\0b", "x" * 200):
        with pytest.raises(AdapterNotFound):
            resolve_revision("main", name=name)


@pytest.mark.both_databases
def test_prefixes_that_are_too_short_or_of_two(home, two, resolve_revision):
    first, second = (version["revision"] for version in two)
    with pytest.raises(RevisionNotFound):
        resolve_revision(first[:6])
    with pytest.raises(RevisionNotFound):
        resolve_revision(first.upper())
    twin = first[:10] + second[10:]
    home.change(StoredVersion, StoredVersion.version == 2, revision=twin)
    with pytest.raises(RevisionNotFound, match="several"):
        resolve_revision(first[:10])
    assert resolve_revision(first[:11] if first[10] != twin[10] else first) == 1


def test_a_number_of_seven_digits_may_be_a_revision(home, two, resolve_revision):
    home.change(StoredVersion, StoredVersion.version == 1, revision="1234567" + "a" * 33)
    assert resolve_revision("1234567") == 1
