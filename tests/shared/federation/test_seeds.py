"""The seeds of members' runs in rounds."""

import hashlib

import pytest

from shared.federation.seeds import member_seed
from shared.recipe import MAX_SEED


@pytest.mark.parametrize("seed", [0, 1, MAX_SEED])
def test_a_seed_is_one_of_a_job_s(seed):
    for number in range(1, 200):
        drawn = member_seed(seed, "readers", number, "alice")
        assert 0 <= drawn <= MAX_SEED
        assert drawn == member_seed(seed, "readers", number, "alice")


def test_each_member_and_each_round_has_its_own():
    drawn = {
        member_seed(seed, cohort, number, user)
        for seed in (0, 1)
        for cohort in ("readers", "writers")
        for number in (1, 2, 12)
        for user in ("alice", "bob", "2alice")
    }
    assert len(drawn) == 2 * 2 * 3 * 3


def test_it_is_the_digest_of_what_it_is_of():
    digest = hashlib.sha256(b'mobizo round\n[7,"readers",3,"alice"]').digest()
    assert member_seed(7, "readers", 3, "alice") == int.from_bytes(digest[:8], "little") % 2**53
