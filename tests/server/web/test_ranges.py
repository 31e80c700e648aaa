"""Range, If-Range, If-None-Match and ETag on stored files, as RFC 9110 has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from server.web.downloads import requested_range
from server.web.middleware import RangeNotSatisfiable

DATABASES = ("sqlite",)  # files lie in none
ETAG = '"abc"'


def ask(**headers):
    return requested_range(Headers({name.replace("_", "-"): value for name, value in headers.items()}), ETAG, 100)


@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-99", (0, 100)),
        ("bytes=10-", (10, 100)),
        ("bytes=10-1000", (10, 100)),
        ("bytes=-1", (99, 100)),
        ("bytes=-1000", (0, 100)),
        ("BYTES=5-6", (5, 7)),
    ],
)
def test_one_range(header, span):
    assert ask(range=header) == span


@pytest.mark.parametrize(
    "header",
    ["", "bytes", "bytes=", "bytes=-", "bytes=a-b", "bytes=5-4", "bytes=0-1,5-6", "lines=1-2", "bytes=1-2-3", "=0-1"],
)
def test_what_is_no_range_of_ours_means_the_whole_file(header):
    assert ask(range=header) is None


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0", "bytes=999999999999999999-"])
def test_beyond_the_end(header):
    with pytest.raises(RangeNotSatisfiable):
        ask(range=header)


def test_if_range_must_name_this_very_file():
    assert ask(range="bytes=1-2", if_range=ETAG) == (1, 3)
    assert ask(range="bytes=1-2", if_range='"other"') is None
    assert ask(range="bytes=1-2", if_range=f"W/{ETAG}") is None
    assert ask(range="bytes=1-2", if_range="Sat, 21 Nov 2026 00:00:00 GMT") is None


@given(st.text(alphabet="bytes=-,0123456789 ", max_size=30), st.integers(0, 50))
def test_every_header_gives_a_span_inside_the_file_or_none(text, size):
    try:
        span = requested_range(Headers({"range": text}), ETAG, size)
    except RangeNotSatisfiable:
        return
    assert span is None or 0 <= span[0] < span[1] <= size


@pytest.fixture
def weights(lease):
    return next(file for file in lease["manifest"]["manifest"]["files"] if file["role"] == "weights")


@pytest.fixture
def url(weights):
    return f"/v1/files/{weights['sha256']}"


CONTENT = bytes(range(256)) * 1000  # what the tests' compiler gives as weights


def test_a_file_whole_in_parts_and_unchanged(device, url, weights, problem):
    whole, tag = device.get(url), f'"{weights["sha256"]}"'
    assert (whole.status_code, whole.content, whole.headers["etag"]) == (200, CONTENT, tag)
    assert whole.headers["accept-ranges"] == "bytes"
    assert whole.headers["content-length"] == str(len(CONTENT))
    assert {"immutable", "private"} <= set(whole.headers["cache-control"].split(", "))
    rest = device.get(url, headers={"Range": "bytes=100000-", "If-Range": tag})
    assert (rest.status_code, rest.content) == (206, CONTENT[100_000:])
    unchanged = device.get(url, headers={"If-None-Match": tag})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    beyond = device.get(url, headers={"Range": f"bytes={len(CONTENT)}-"})
    problem(beyond, 416, "range-not-satisfiable")
    assert beyond.headers["content-range"] == f"bytes */{len(CONTENT)}"


def test_head(device, url):
    for headers, status, length in (({}, 200, len(CONTENT)), ({"Range": "bytes=0-9"}, 206, 10)):
        response = device.head(url, headers=headers)
        assert (response.status_code, response.content) == (status, b"")
        assert response.headers["content-length"] == str(length)
