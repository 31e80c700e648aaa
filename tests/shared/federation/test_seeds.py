"""The seeds of members' runs in rounds."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from shared.federation.seeds import member_seed
from shared.recipe import MAX_SEED


@given(st.integers(0, MAX_SEED), st.integers(1, 10**6), st.sampled_from(["alice", "bob"]))
def test_a_seed_is_one_of_a_job_s(seed, number, user):
    drawn = member_seed(seed, "readers", number, user)
    assert 0 <= drawn <= MAX_SEED
    assert drawn == member_seed(seed, "readers", number, user)


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
