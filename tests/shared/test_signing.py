import base64

import pytest

from shared.errors import Untrusted
from shared.signing import (
    new_private_key,
    sign_manifest,
    verify_manifest,
)


@pytest.fixture
def manifest(build):
    return build()


def test_any_change_or_another_key_is_refused(manifest):
    key = new_private_key()
    signed = sign_manifest(manifest, key)
    changed = signed.model_copy(update={"manifest": manifest.model_copy(update={"planned_bytes": 2})})
    forged = signed.model_copy(update={"signature": base64.b64encode(bytes(64)).decode()})
    garbled = signed.model_copy(update={"signature": "not base64!"})
    for bad in (changed, forged, garbled):
        with pytest.raises(Untrusted, match="signature"):
            verify_manifest(bad, key.public_key())
    with pytest.raises(Untrusted, match="signature"):
        verify_manifest(signed, new_private_key().public_key())


def test_a_recipe_id_that_does_not_fit_its_recipe_is_refused(manifest):
    key = new_private_key()
    signed = sign_manifest(manifest.model_copy(update={"recipe_id": "2" * 64}), key)
    with pytest.raises(Untrusted, match="recipe"):
        verify_manifest(signed, key.public_key())
