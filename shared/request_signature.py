"""Signatures over HTTP requests: a profile of RFC 9421 with the Content-Digest of RFC 9530.

A device signs method, path, query and the body's digest, with the time and a nonce, by Ed25519:

    Content-Digest: sha-256=:...:
    Signature-Input: mobizo=("@method" "@path" "@query" "content-digest")
                     ;created=...;nonce="...";keyid="...";alg="ed25519"   (one line)
    Signature: mobizo=:...:

A request has exactly one signature. Its label and the order of components and parameters are free. The caller checks
nonces and the time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shared.errors import BadSignature
from shared.signing import key_id

COMPONENTS = ("@method", "@path", "@query", "content-digest")
ALGORITHM = "ed25519"
LABEL = "mobizo"
MAX_TEXT = 2000  # maximum characters of a header
NONCE = re.compile(r"[A-Za-z0-9_.~+/=-]{16,64}")

# The subset of structured fields (RFC 9651) that this profile uses: a dictionary with one member, strictly serialized.
_KEY = r"[a-z*][a-z0-9_.*-]*"
_STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_PARAMETER = rf";({_KEY})=([0-9]{{1,15}}|{_STRING})"
_STRINGS, _PARAMETERS = re.compile(_STRING), re.compile(_PARAMETER)
_INPUT = re.compile(rf"({_KEY})=(\(({_STRING}(?: {_STRING})*)\)((?:{_PARAMETER})*))")
_BYTES = re.compile(rf"({_KEY})=:([A-Za-z0-9+/]*={{0,2}}):")
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")


@dataclass(frozen=True)
class RequestSignature:
    """The parsed signature headers. digest: sha256 of the body, 32 bytes. created: Unix seconds."""

    covered: tuple[str, ...]
    parameters: str
    signature: bytes
    digest: bytes
    content_digest: str
    created: int
    nonce: str
    keyid: str

    def verify(self, key: Ed25519PublicKey, method: str, path: str, query: str) -> None:
        """Verifies the signature. path, query: percent-encoded as sent; query without its question mark.

        Raises BadSignature unless `key` signed this request. The caller compares the body with `digest`.
        """
        if self.keyid != key_id(key):
            raise BadSignature("the request is not signed by this device's key; enroll this device again")
        values = _component_values(method, path, query, self.content_digest)
        base = signature_base([(name, values[name]) for name in self.covered], self.parameters)
        try:
            key.verify(self.signature, base)
        except InvalidSignature as error:
            raise BadSignature(
                "the signature does not match this request; a proxy may have changed method, path, query or body"
            ) from error


class RequestSigner:
    """Signs the requests of one device, each with a new nonce. Thread-safe."""

    def __init__(self, key: Ed25519PrivateKey, clock: Callable[[], float]) -> None:
        """clock: Unix seconds by the server's clock."""
        self._key, self._clock, self._keyid = key, clock, key_id(key.public_key())

    def headers(self, method: str, path: str, query: str, body: bytes) -> dict[str, str]:
        """Returns the three headers.

        path, query: percent-encoded as they will be sent; query without its question mark.
        """
        digest = content_digest(hashlib.sha256(body).digest())
        covered = " ".join(f'"{name}"' for name in COMPONENTS)
        parameters = (
            f'({covered});created={int(self._clock())};nonce="{secrets.token_urlsafe(24)}";keyid="{self._keyid}"'
            f';alg="{ALGORITHM}"'
        )
        signature = self._key.sign(signature_base(_component_values(method, path, query, digest).items(), parameters))
        return {
            "Content-Digest": digest,
            "Signature-Input": f"{LABEL}={parameters}",
            "Signature": f"{LABEL}=:{base64.b64encode(signature).decode()}:",
        }


def is_signed(headers: Mapping[str, str]) -> bool:
    """Whether a request has signature headers. headers: case-insensitive."""
    return "signature-input" in headers or "signature" in headers


def parse_signature(headers: Mapping[str, str]) -> RequestSignature:
    """Parses the signature headers (case-insensitive). Raises BadSignature for any other form."""
    signature_input = _header(headers, "signature-input")
    signature, digest = _header(headers, "signature"), _header(headers, "content-digest")
    match = _INPUT.fullmatch(signature_input)
    if match is None:
        raise BadSignature("Signature-Input must be one signature's, as RFC 9421 serializes it")
    label, parameters, names, parameter_text = match.group(1, 2, 3, 4)
    covered = tuple(_unquoted(name) for name in _STRINGS.findall(names))
    if sorted(covered) != sorted(COMPONENTS):
        raise BadSignature(f"the signature must cover {', '.join(COMPONENTS)}, each once, and nothing else")
    pairs = _PARAMETERS.findall(parameter_text)
    values = dict(pairs)
    if len(values) != len(pairs) or set(values) != {"created", "nonce", "keyid", "alg"}:
        raise BadSignature("the signature must have created, nonce, keyid and alg, each once, and nothing else")
    if values["alg"] != f'"{ALGORITHM}"':
        raise BadSignature(f"the signature's algorithm must be {ALGORITHM}")
    nonce = _unquoted(values["nonce"])
    if values["created"].startswith('"') or NONCE.fullmatch(nonce) is None:
        raise BadSignature("created must be Unix seconds; nonce, 16 to 64 letters, digits or -._~+/=")
    return RequestSignature(
        covered=covered,
        parameters=parameters,
        signature=_signature_bytes(signature, label),
        digest=parse_digest(digest),
        content_digest=digest,
        created=int(values["created"]),
        nonce=nonce,
        keyid=_unquoted(values["keyid"]),
    )


def content_digest(digest: bytes) -> str:
    """Returns a sha256 as the value of a Content-Digest field (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(digest).decode()}:"


def parse_digest(text: str) -> bytes:
    """Returns the sha256 of a Content-Digest field. Raises BadSignature for any other form."""
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise BadSignature("Content-Digest must be one sha-256")
    return base64.b64decode(match[1])


def signature_base(components: Iterable[tuple[str, str]], parameters: str) -> bytes:
    """Returns the signed bytes (RFC 9421, 2.5): each component on its line, then the parameters as they were sent."""
    lines = [f'"{name}": {value}' for name, value in components]
    return "\n".join([*lines, f'"@signature-params": {parameters}']).encode("ascii", "backslashreplace")


def _component_values(method: str, path: str, query: str, digest: str) -> dict[str, str]:
    return dict(zip(COMPONENTS, (method, path or "/", f"?{query}", digest), strict=True))


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "")
    if not value or len(value) > MAX_TEXT:
        raise BadSignature(
            f"a device's request must be signed, but {name} is missing; an old agent needs an upgrade"
            if not value
            else f"{name} is over {MAX_TEXT} characters"
        )
    return value


def _signature_bytes(text: str, label: str) -> bytes:
    match = _BYTES.fullmatch(text)
    if match is None or match[1] != label:
        raise BadSignature("Signature must be one byte sequence with the label of Signature-Input")
    try:
        raw = base64.b64decode(match[2], validate=True)
    except binascii.Error as error:
        raise BadSignature("Signature is not base64") from error
    if base64.b64encode(raw).decode() != match[2]:
        raise BadSignature("Signature is not canonical base64")
    return raw


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if "\\" in text else text[1:-1]
