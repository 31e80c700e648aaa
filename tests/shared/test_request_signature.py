"""Request signatures: the RFCs' examples, interoperability with another implementation of RFC 9421, and rejections."""

import base64
import hashlib
import itertools
import re
from datetime import datetime
from types import SimpleNamespace

import http_message_signatures
import pytest
from cryptography.hazmat.primitives.serialization import load_der_private_key
from http_message_signatures import HTTPMessageSigner, HTTPMessageVerifier, MappingKeyResolver, algorithms
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadSignature
from shared.request_signature import (
    RequestSigner,
    content_digest,
    is_signed,
    parse_digest,
    parse_signature,
    signature_base,
)
from shared.signing import key_id, new_private_key

KEY = new_private_key()
NOW = 1_700_000_000
BODY = b'{"phase":"training"}'
REQUEST = ("POST", "/v1/leases/lease_1/heartbeat", "")


def signed(method="POST", path="/v1/leases/lease_1/heartbeat", query="", body=BODY, key=KEY):
    """Returns the headers by lower-case name, as servers pass them."""
    headers = RequestSigner(key, lambda: NOW + 0.9).headers(method, path, query, body)
    return {name.lower(): value for name, value in headers.items()}


def test_the_example_of_rfc_9421_appendix_b_2_6():
    key = load_der_private_key(
        base64.b64decode("MC4CAQAwBQYDK2VwBCIEIJ+DYvh6SEqVTm50DFtMDoQikTmiCqirVv9mWG9qfSnF"), None
    )
    components = [
        ("date", "Tue, 20 Apr 2021 02:07:55 GMT"),
        ("@method", "POST"),
        ("@path", "/foo"),
        ("@authority", "example.com"),
        ("content-type", "application/json"),
        ("content-length", "18"),
    ]
    names = " ".join(f'"{name}"' for name, _ in components)
    base = signature_base(components, f'({names});created=1618884473;keyid="test-key-ed25519"')
    expected = "wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw=="
    assert base64.b64encode(key.sign(base)).decode() == expected


def test_the_example_of_rfc_9530():
    digest = hashlib.sha256(b'{"hello": "world"}').digest()
    assert content_digest(digest) == "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:"
    assert parse_digest(content_digest(digest)) == digest


REFERENCE_SETTINGS = {
    "signature_algorithm": algorithms.ED25519,
    "key_resolver": MappingKeyResolver(
        public_keys={key_id(KEY.public_key()): KEY.public_key()}, private_keys={key_id(KEY.public_key()): KEY}
    ),
}
PATH = REQUEST[1]
COVERED = list(itertools.permutations(("@method", "@path", "@query", "content-digest")))


def request_of(path, query, headers):
    """Returns the request in the form of the other implementation of RFC 9421."""
    url = f"https://mobizo.example{path}" + (f"?{query}" if query else "")
    return SimpleNamespace(method="POST", url=url, headers=headers)


@pytest.mark.parametrize("query", ["", "a=1&b=%20"])
def test_another_implementation_verifies_what_we_sign(query):
    request, verifier = request_of(PATH, query, signed(query=query)), HTTPMessageVerifier(**REFERENCE_SETTINGS)
    (signature,) = verifier.verify(request, max_age=None, require_components=COVERED[0], body=BODY)
    assert signature.parameters["created"] == NOW
    for other in (request_of(PATH + "x", query, request.headers), request_of(PATH, query + "&c", request.headers)):
        with pytest.raises(http_message_signatures.InvalidSignature):
            verifier.verify(other, max_age=None, body=BODY)
    with pytest.raises(http_message_signatures.InvalidSignature):
        verifier.verify(request, max_age=None, body=BODY + b" ")


@pytest.mark.parametrize("covered", COVERED)
def test_we_verify_what_another_implementation_signs_in_any_order(covered):
    headers, created = {"content-digest": content_digest(hashlib.sha256(BODY).digest())}, datetime.fromtimestamp(NOW)
    HTTPMessageSigner(**REFERENCE_SETTINGS).sign(
        request_of("/x", "y", headers),
        key_id=key_id(KEY.public_key()),
        created=created,
        nonce="abcdefghijklmnop",
        label="sig-b26",
        covered_component_ids=covered,
        body=BODY,
        use_existing_digest=True,
    )
    signature = parse_signature({name.lower(): value for name, value in headers.items()})
    signature.verify(KEY.public_key(), "POST", "/x", "y")
    assert (signature.created, signature.digest) == (NOW, hashlib.sha256(BODY).digest())
    with pytest.raises(BadSignature, match="does not match this request"):
        signature.verify(KEY.public_key(), "PUT", "/x", "y")


def test_another_body_and_a_forged_key_are_refused():
    headers = signed() | {"content-digest": signed(body=b"other")["content-digest"]}
    with pytest.raises(BadSignature, match="does not match this request"):
        parse_signature(headers).verify(KEY.public_key(), *REQUEST)
    headers_with_forged_id = signed(key=new_private_key())
    keyid = re.search('keyid="([^"]*)"', headers_with_forged_id["signature-input"])[1]
    headers_with_forged_id["signature-input"] = headers_with_forged_id["signature-input"].replace(
        keyid, key_id(KEY.public_key())
    )
    with pytest.raises(BadSignature, match="does not match this request"):
        parse_signature(headers_with_forged_id).verify(KEY.public_key(), *REQUEST)


@pytest.mark.parametrize("name", ["signature", "signature-input", "content-digest"])
def test_a_missing_header_is_named(name):
    headers = signed()
    del headers[name]
    assert is_signed(headers)
    with pytest.raises(BadSignature, match=name):
        parse_signature(headers)
    assert not is_signed({"content-digest": "x"})


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("signature-input", '"@path" ', ""),
        ("signature-input", '"@path" ', '"@path" "@path" '),
        ("signature-input", '"@path" ', '"@path" "host" '),
        ("signature-input", '"@path"', '"@path";req'),
        ("signature-input", ";created", "; created"),
        ("signature-input", ";created=", ";created=-"),
        ("signature-input", f"={NOW}", f'="{NOW}"'),
        ("signature-input", f"={NOW}", f"={NOW}.5"),
        ("signature-input", f"={NOW}", "=" + "9" * 16),
        ("signature-input", f"={NOW}", "=١٢٣"),  # digits of another script
        ("signature-input", "ed25519", "hmac-sha256"),
        ("signature-input", ';alg="ed25519"', ""),
        ("signature-input", ';alg="ed25519"', ';alg="ed25519";alg="ed25519"'),
        ("signature-input", ';alg="ed25519"', ';alg="ed25519";expires=1'),
        ("signature-input", 'nonce="', 'nonce="\\"'),
        ("signature-input", "mobizo=", "a=(), mobizo="),
        ("signature-input", "mobizo=", "Mobizo="),
        ("signature", "mobizo=", "sig=="),
        ("signature", "mobizo=", "sig="),
        ("signature", ":", ""),
        ("signature", "==:", "=:"),
        ("content-digest", "sha-256", "sha-512"),
        ("content-digest", "=:", ":"),
    ],
)
def test_another_form_is_refused(name, old, new):
    headers = signed()
    assert old in headers[name]
    headers[name] = headers[name].replace(old, new, 1)
    with pytest.raises(BadSignature):
        parse_signature(headers)


TEXT = st.text(st.characters(max_codepoint=255), max_size=60) | st.sampled_from(list(signed().values()))


@given(st.fixed_dictionaries(dict.fromkeys(("signature", "signature-input", "content-digest"), TEXT)))
def test_arbitrary_header_text_is_rejected(headers):
    try:
        signature = parse_signature(headers)
    except BadSignature:
        return
    with pytest.raises(BadSignature):
        signature.verify(new_private_key().public_key(), *REQUEST)


@given(st.data())
def test_no_change_of_a_character_passes(data):
    headers = signed()
    name = data.draw(st.sampled_from(sorted(headers)))
    index = data.draw(st.integers(0, len(headers[name]) - 1))
    new = data.draw(st.characters(max_codepoint=255).filter(lambda c: c != headers[name][index]))
    headers[name] = headers[name][:index] + new + headers[name][index + 1 :]
    with pytest.raises(BadSignature):
        parse_signature(headers).verify(KEY.public_key(), *REQUEST)


@given(
    method=st.sampled_from(["POST", "PUT", "DELETE"]),
    path=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40),
    query=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40),
    body=st.binary(max_size=100),
)
def test_signed_requests_verify(method, path, query, body):
    parse_signature(signed(method, path, query, body)).verify(KEY.public_key(), method, path, query)


def test_noncanonical_base64_is_rejected():
    headers = signed()
    last = headers["signature"][-4]  # before "==:": four of its six bits are padding
    assert last in "AQgw"
    headers["signature"] = headers["signature"][:-4] + chr(ord(last) + 1) + "==:"
    with pytest.raises(BadSignature, match="base64"):
        parse_signature(headers)
