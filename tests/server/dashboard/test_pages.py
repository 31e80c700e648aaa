"""Every page: its headers, scopes, tenants, paging, and that it reads without JavaScript."""

import re
from html.parser import HTMLParser

import pytest
from pydantic import SecretStr

from server.dashboard.assets import asset_url
from server.dashboard.operations import shown_settings
from server.dashboard.pages import size
from server.identity.quotas import Quota, QuotaService
from shared.access import Scope

PAGES = {
    "/": None,
    "/ui/jobs": Scope.JOBS_READ,
    "/ui/jobs/new": Scope.JOBS_WRITE,
    "/ui/jobs/{job}": Scope.JOBS_READ,
    "/ui/compare?job={job}&job={other_job}": Scope.JOBS_READ,
    "/ui/devices": Scope.DEVICES_READ,
    "/ui/devices/join": Scope.DEVICES_WRITE,
    "/ui/devices/{device}": Scope.DEVICES_READ,
    "/ui/adapters": Scope.ADAPTERS_READ,
    "/ui/adapters/alice-movies": Scope.ADAPTERS_READ,
    "/ui/adapters/alice-movies/versions/2": Scope.ADAPTERS_READ,
    "/ui/adapters/alice-movies/compare?left=v1&right=v2": Scope.ADAPTERS_READ,
    "/ui/cohorts": Scope.COHORTS_READ,
    "/ui/cohorts/readers": Scope.COHORTS_READ,
    "/ui/cohorts/readers/rounds/1": Scope.COHORTS_READ,
    "/ui/programs": Scope.JOBS_READ,
    "/ui/programs/{recipe}": Scope.JOBS_READ,
    "/ui/operations": None,
    "/ui/operations/tokens": Scope.TOKENS_WRITE,
    "/ui/operations/webhooks": Scope.WEBHOOKS_WRITE,
    "/ui/operations/audit": Scope.ADAPTERS_READ,
}


class Outline(HTMLParser):
    """What must hold of every page's markup."""

    def __init__(self):
        super().__init__()
        self.inline, self.scripts, self.headings, self.forms, self.labels, self.inputs = [], [], [], [], set(), []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if "style" in values or tag == "style" or any(name.startswith("on") for name in values):
            self.inline.append((tag, attributes))
        if tag == "script":
            self.scripts.append(values.get("src"))
        if tag in ("h1", "h2"):
            self.headings.append(tag)
        if tag == "form":
            self.forms.append(values)
        if tag == "label":
            self.labels.add(values.get("for"))
        if tag in ("input", "select", "textarea") and values.get("type") not in ("hidden", "checkbox"):
            self.inputs.append(values.get("id"))


def paths(fleet, device):
    items = fleet.app().get("/v1/jobs").json()["items"]
    succeeded_jobs = [job for job in items if job["state"] == "succeeded"]
    names = {"job": succeeded_jobs[0]["id"], "other_job": succeeded_jobs[1]["id"], "device": device.device_id}
    names["recipe"] = succeeded_jobs[0]["recipe_id"]
    return {path.format_map(names): scope for path, scope in PAGES.items()}


@pytest.mark.timeout(300)
def test_every_page_is_whole_safe_and_shown_to_its_scope_alone(stocked, person):
    fleet, device, _ = stocked
    every = paths(fleet, device)
    operator = person()
    for path in every:
        page = operator.get(path)
        assert page.status_code == 200, (path, page.text[:500])
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["cache-control"] == "no-store"
        outline = Outline()
        outline.feed(page.text)
        assert outline.inline == [], path
        assert all(source and source.startswith("/ui/static/") for source in outline.scripts), path
        assert outline.headings.count("h1") == 1, path
        assert set(outline.inputs) <= outline.labels, path
        posts = sum(form.get("method") == "post" for form in outline.forms)
        assert len(re.findall(r'name="csrf" value="[0-9a-f]{80}"', page.text)) == posts, path
    lone = {scope: person(scopes=[scope]) for scope in (Scope.METRICS_READ, *{s for s in every.values() if s})}
    for path, scope in every.items():
        for have, someone in lone.items():
            page = someone.get(path)
            if scope is None or scope is have:
                assert page.status_code == 200, (path, have, page.text[:500])
            else:
                assert page.status_code == 403, (path, have)
                assert f"<code>{scope}</code>" in page.text
                assert "token create --scope" in page.text
    # What a page shows beside its own scope follows the scopes as well.
    assert "alices-phone" in operator.get("/ui/adapters/alice-movies").text  # in the audit trail
    trail = lone[Scope.ADAPTERS_READ].get("/ui/adapters/alice-movies").text
    assert "alices-phone" not in trail
    assert device.device_id in trail
    front = lone[Scope.METRICS_READ].get("/").text
    assert "alice" not in front
    assert "/ui/jobs" not in front


def test_no_tenant_sees_another_s(stocked, person):
    fleet, device, lease = stocked
    stranger, owner = person(tenant="other"), person()
    fleet.app("other").submit(user="zoe", adapter="zoe-notes", recipe={"rank": 3})
    for path in paths(fleet, device):
        page = stranger.get(path)
        specific = re.search(r"/(job_|device_|alice|readers|[0-9a-f]{64})|compare\?", path)
        assert page.status_code == (404 if specific else 200), path
        for secret in ("alices-phone", "bob-reviews", lease["job"]["id"], device.device_id, "carol"):
            assert specific or secret not in page.text, (path, secret)
    assert "zoe" not in owner.get("/ui/jobs").text
    events = stranger.get(f"/ui/jobs/{lease['job']['id']}/events", headers={"Accept": "text/event-stream"})
    assert events.status_code == 404
    for path, page in {
        f"/ui/jobs/{lease['job']['id']}/cancel": "/",
        f"/ui/devices/{device.device_id}/revoke": "/",
        "/ui/adapters/alice-movies/versions/3/approve": "/",
        "/ui/cohorts/readers/rounds/1/close": "/",
    }.items():
        assert stranger.act(path, page).status_code == 404, path
    assert "MOBIZO_" not in stranger.get("/ui/operations").text


def test_operations_show_every_quota_of_the_session_s_tenant_alone(home, fleet, person, app):
    for number in range(3):
        app.submit(adapter=f"a-{number}", repeat={"every": "7d"})
    with home.database.writing() as session:
        QuotaService(session).set_limit("default", Quota.SERIES, 1234)
        limits = QuotaService(session).limits("default")
    row = re.compile(r'<th scope="row">([a-z ]+)</th><td class="r">([^<]+)</td><td class="r">([^<]+)</td>')
    shown = {name.replace(" ", "_"): values for name, *values in row.findall(person().get("/ui/operations").text)}
    assert set(shown) == set(Quota)
    assert shown["series"] == ["3", "1,234"]
    assert shown["waiting_jobs"] == ["3", "10,000"]
    assert shown["jobs_per_day"] == ["3", "100,000"]
    assert shown["stored_bytes"][1] == size(limits[Quota.STORED_BYTES])
    fleet.app("other")
    others = {name: used for name, used, _ in row.findall(person(tenant="other").get("/ui/operations").text)}
    assert (others["series"], others["waiting jobs"]) == ("0", "0")


def test_settings_hide_secrets(home):
    url = "postgresql+psycopg://me:hunter2@db/x"
    settings = home.settings.model_copy(update={"storage_secret_access_key": SecretStr("hunter2"), "database_url": url})
    rows = shown_settings(settings)
    assert "hunter2" not in str(rows)
    assert len(rows) == len(type(settings).model_fields)


def test_scores_say_on_which_examples_and_settings_are_no_python(fleet, person, app, device):
    first = fleet.ready_job(app)
    device.finish(device.lease(), accuracy_split="validation")
    second = fleet.ready_job(app, recipe={"targets": ["q_proj", "k_proj"]}, rules={"charging": True})
    device.finish(device.lease(), accuracy_split="test")
    someone = person()
    assert "75.0% (validation)" in someone.get("/ui/adapters/alice-movies/versions/1").text
    assert "75.0% (test)" in someone.get("/ui/adapters/alice-movies").text
    compared = someone.get("/ui/adapters/alice-movies/compare?left=v1&right=v2").text
    assert "v1 (validation)" in compared
    assert "v2 (test)" in compared
    for path in (
        f"/ui/compare?job={first['id']}&job={second['id']}",
        "/ui/adapters/alice-movies/compare?left=v1&right=v2",
    ):
        text = someone.get(path).text
        assert "q_proj, k_proj" in text
        for python in ("[&#39;", "{&#39;", ">True<", ">None<"):
            assert python not in text


def test_lists_are_paged(fleet, person, app):
    for number in range(5):
        app.submit(adapter=f"a-{number}")
    someone = person()
    first = someone.get("/ui/jobs?limit=3&user=alice")
    assert "a-4" in first.text
    assert "a-1" not in first.text
    (older,) = re.findall(r'rel="next" href="([^"]+)"', first.text)
    second = someone.get(older.replace("&amp;", "&"))
    assert "a-1" in second.text
    assert "a-4" not in second.text
    assert 'rel="next"' not in second.text
    assert someone.get("/ui/jobs?cursor=nonsense").status_code == 400


def test_what_is_gone_or_wrong_gets_a_page_that_says_what_to_do(person):
    someone = person()
    page = someone.get("/ui/jobs/job_gone")
    assert page.status_code == 404
    assert 'href="/ui/jobs">All jobs' in page.text
    assert someone.get("/ui/nothing").status_code == 404
    assert someone.get("/ui/adapters/a/versions/none").status_code == 422
    assert someone.get("/ui/jobs?state=odd").status_code == 422
    assert someone.get("/ui/jobs?user=%3Cscript%3E").status_code == 422
    assert "<script>alert" not in someone.get("/ui/devices/<script>alert").text


def test_names_are_escaped(fleet, person, app):
    answer = fleet.operator().post("/v1/tokens", json={"name": "<img src=x onerror=alert(1)>", "scopes": []})
    assert answer.status_code == 201
    text = person().get("/ui/operations/tokens").text
    assert "<img" not in text
    assert "&lt;img src=x" in text


def test_an_empty_server_says_how_to_begin(person):
    someone = person()
    for path, words in {
        "/": "/ui/devices/join",
        "/ui/jobs": "mobizo job submit",
        "/ui/devices": "Make a one-time token",
        "/ui/adapters": "A job that succeeds",
        "/ui/cohorts": "mobizo cohort create",
        "/ui/programs": "No job has asked",
    }.items():
        assert words in someone.get(path).text, path


def test_files_are_compressed_cached_and_public(fleet):
    stranger = fleet.actor()
    for name in (
        "app.css",
        "app.js",
        "htmx.min.js",
        "uplot.min.js",
        "uplot.min.css",
        "htmx.LICENSE.txt",
        "icon.svg",
        "swagger-ui-bundle.js",
    ):
        answer = stranger.get(asset_url(name))
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-encoding"] == "gzip"
        again = stranger.get(asset_url(name), headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304
        plain = stranger.get(asset_url(name), headers={"Accept-Encoding": "identity"})
        assert plain.content == answer.content
    assert stranger.get("/ui/static/app.css").status_code == 404
    assert stranger.get("/ui/static/..%2fapp.css").status_code == 404
