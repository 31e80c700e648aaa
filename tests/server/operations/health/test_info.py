"""What the server says of itself."""

from shared.signing import key_id, parse_public


def test_who_it_is(app):
    info = app.get("/v1/server").json()
    assert info["name"] == "mobizo"
    assert key_id(parse_public(info["public_key"])) == info["key_id"]


def test_usage_before_any_worker(operator):
    usage = operator.get("/v1/server/usage").json()
    assert usage["peak_rss_bytes"] == usage["server_peak_rss_bytes"] > 1 << 20
    assert usage["worker_peak_rss_bytes"] == usage["compiler_peak_rss_bytes"] == 0
