"""The seeds of members' runs in rounds."""

import hashlib

from shared.federation.seeds import member_seed


def test_member_seed_is_a_digest_of_its_arguments():
    digest = hashlib.sha256(b'mobizo round\n[7,"readers",3,"alice"]').digest()
    assert member_seed(7, "readers", 3, "alice") == int.from_bytes(digest[:8], "little") % 2**53
