"""The pages in a real browser: what people do, live figures, restarts, accessibility, small screens, no JavaScript."""

import re
import socket

import pytest

from server.app import create_app
from shared.access import Role
from tests.server.actors import serving
from tests.server.dashboard.browsing import CHROMIUM, MISSING, NARROW, WIDE, Tab, addresses, chromium
from tests.server.dashboard.seed import populate, progress, report

# Opens what people open, and shows what appears later: axe-core skips hidden elements.
SHOW_ALL = """for (const each of document.querySelectorAll("details")) each.open = true;
for (const each of document.querySelectorAll("[hidden]")) each.hidden = false"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)


@pytest.fixture(scope="module")
def browser():
    # Not for the whole session: Playwright keeps an event loop running in this thread, where no other may run then.
    with chromium() as chromium_browser:
        yield chromium_browser


@pytest.fixture
def tab(browser, fleet):
    """Makes tabs with a session; no tab may have an error on its console."""
    tabs = []

    def make(url=None, **options):
        new_tab = Tab(browser, url or fleet.url, **options)
        tabs.append(new_tab)
        new_tab.sign_in(fleet.home.token(Role.OPERATOR, name="browser"))
        return new_tab

    yield make
    for new_tab in tabs:
        new_tab.close()
    assert [error for each in tabs for error in each.errors] == []


def test_the_api_s_reference_loads_nothing_from_elsewhere(browser, fleet):
    reference = Tab(browser, fleet.url)
    requested = []
    reference.page.on("request", lambda request: requested.append(request.url))
    assert reference.go("/docs#/jobs/create_job") == 200
    reference.page.get_by_text('"alice-movies"').first.wait_for(timeout=120_000)
    outside = [url for url in requested if not url.startswith((fleet.url, "data:", "blob:"))]
    reference.close()
    assert outside == []
    # Swagger UI complains of every deep link with an underscore.
    assert [error for error in reference.errors if not error.startswith("Deprecated: escaping deep link")] == []


@pytest.mark.slow
def test_a_person_s_day(tab, fleet):
    """Lets a device in, submits a job, watches it, compares runs, approves and rolls back versions."""
    browser_tab = tab()
    page = browser_tab.page
    browser_tab.go("/ui/devices/join")
    page.get_by_label("Users whose data is on the device").fill("bob")
    page.get_by_role("button", name="Make a token").click()
    page.get_by_text("The token enrolls one device").wait_for()
    device = fleet.device(users=("alice",))
    assert device.lease("movies") is None  # it says what data it has
    browser_tab.go("/ui/devices")
    page.get_by_role("link", name="phone").click()
    page.get_by_role("heading", name="phone").wait_for()

    ids = []
    for adapter, top in (("first", 0.8), ("first", 0.4)):
        browser_tab.go("/ui/jobs/new")
        page.get_by_label("User", exact=True).select_option("alice")
        page.get_by_label("Adapter").fill(adapter)
        page.get_by_label("Task").select_option("sst2")
        page.get_by_label("Data set").select_option("movies")
        page.get_by_label("LoRA rank").fill("2")
        page.get_by_label("Estimator").select_option("replay")
        page.get_by_text("Or paste the whole request").click()
        page.get_by_role("button", name="Submit", exact=True).click()
        page.get_by_text("The job is submitted.").wait_for()
        ids.append(page.url.split("/")[-1].partition("?")[0])
        page.get_by_text("appear here once a device trains this job").wait_for()
        fleet.home.compile()
        lease = device.lease()
        page.locator('[data-live="state"]').get_by_text("training").wait_for()
        evaluating = {"phase": "evaluating", "steps": 150}
        device.post(f"/v1/leases/{lease['id']}/heartbeat", json=evaluating).raise_for_status()
        page.locator('[data-live="phase"]').get_by_text("phase: evaluating").wait_for()
        report(device, lease, 60, top, every=10)
        page.locator('[data-live="step"]').get_by_text("51 / 150").wait_for()
        page.locator('[data-chart="loss"] canvas').wait_for()
        page.locator('[data-chart="accuracy"] canvas').wait_for()
        device.finish(lease, value=top, zero_shot_accuracy=0.5, tuned_accuracy=top)
        page.get_by_role("heading", name="Result").wait_for()  # without a click

    browser_tab.go("/ui/jobs")
    for job_id in ids:
        page.get_by_label(f"Compare {job_id}").check()
    page.get_by_role("button", name="Compare selected").click()
    page.locator('[data-chart="loss"] canvas').wait_for()
    assert page.locator('[data-chart="loss"] .u-series').count() == 3
    assert "--" not in page.locator('[data-chart="loss"] .u-legend').inner_text()  # the last step's values

    browser_tab.go("/")
    page.get_by_role("link", name="first v2").click()
    page.get_by_text("Approve…").click()
    page.get_by_label("Reason").last.wait_for(state="attached")
    page.locator("#reason-approve").fill("looks good")
    page.get_by_role("button", name="Approve version 2").click()
    page.get_by_text("The version is approved.").wait_for()
    browser_tab.go("/ui/adapters/first/versions/1")
    page.get_by_text("Make it main…").click()
    page.get_by_role("button", name="Make version 1 main", exact=True).click()
    page.get_by_text("The version is main now.").wait_for()
    assert fleet.app().get("/v1/adapters/first").json()["main"] == 1
    page.get_by_role("button", name="Sign out").click()
    page.get_by_text("You are signed out.").wait_for()


@pytest.mark.slow
def test_a_restart_of_the_server_loses_no_figure(tab, fleet, app, device, lease):
    application = create_app(fleet.home.settings)
    plain = socket.create_server(("127.0.0.1", 0))
    port = plain.getsockname()[1]
    requests = []
    with serving(application, plain=plain) as url:
        browser_tab = tab(url)
        browser_tab.page.on("request", lambda request: "/events" in request.url and requests.append(request))
        report(device, lease, 4, every=1)
        browser_tab.go(f"/ui/jobs/{lease['job']['id']}")
        browser_tab.page.locator('[data-live="step"]').get_by_text("4 / 150").wait_for()
    browser_tab.page.get_by_text("The connection to the server is lost.").wait_for()
    device.post(f"/v1/leases/{lease['id']}/heartbeat", json=progress(5)).raise_for_status()
    application = create_app(fleet.home.settings)
    with serving(application, plain=socket.create_server(("127.0.0.1", port))):
        browser_tab.page.locator('[data-live="step"]').get_by_text("5 / 150").wait_for()
        browser_tab.page.get_by_text("The connection to the server is lost.").wait_for(state="hidden")
        browser_tab.go("/ui/operations")
    events = app.get(f"/v1/jobs/{lease['job']['id']}").json()
    assert events["progress"]["step"] == 5
    # The browser says which event was its last: 4 of progress, and at least 2 of the job before them.
    browser_tab.errors[:] = [
        error for error in browser_tab.errors if "net::ERR_" not in error
    ]  # of the time without a server
    last = requests[-1]
    after = int(last.all_headers().get("last-event-id") or re.search(r"after=(\d+)", last.url)[1])
    assert after >= 6


@pytest.mark.slow
def test_every_page_is_accessible_and_fits_every_screen(tab, fleet):
    device, _ = populate(fleet, every=25)
    problems, browser_tab = {}, tab()
    for name, path in addresses(fleet, device).items():
        assert browser_tab.go(path) == 200, path
        browser_tab.page.evaluate(SHOW_ALL)
        if name in ("job", "compare"):
            browser_tab.drawn()
        for scheme, rules in (("light", ()), ("dark", ("color-contrast",))):  # the dark pages differ in colours alone
            browser_tab.page.emulate_media(color_scheme=scheme)
            if bad := browser_tab.violations(*rules):
                problems[name, scheme] = bad
        browser_tab.page.set_viewport_size(NARROW)
        if (pixels := browser_tab.overflow()) > 0:
            problems[name, "narrow"] = pixels
        browser_tab.page.set_viewport_size(WIDE)
    assert problems == {}
    other = Tab(browser_tab.context.browser, fleet.url, "dark", NARROW)
    other.go("/ui/login")
    assert other.violations() == []
    other.sign_in(fleet.home.token(Role.OPERATOR))
    assert other.go("/ui/jobs/unknown") == 404
    assert other.violations() == []
    other.close()


@pytest.mark.slow
def test_pages_read_and_forms_work_without_javascript_and_with_the_keyboard(tab, fleet, app):
    job = app.submit()
    browser_tab = tab(java_script_enabled=False)
    page = browser_tab.page
    browser_tab.go(f"/ui/jobs/{job['id']}")
    assert page.get_by_text("Its program is waiting to be compiled").is_visible()
    page.get_by_text("Cancel the job…").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("The job is cancelled.").wait_for()
    browser_tab.go("/")
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to content"


@pytest.mark.slow
def test_lists_refresh_themselves(tab, fleet, app):
    browser_tab = tab()
    browser_tab.page.clock.install()
    browser_tab.go("/")
    app.submit()
    browser_tab.page.clock.fast_forward(11_000)
    browser_tab.page.locator('#live a[href="/ui/jobs?state=queued"]').get_by_text("1", exact=True).wait_for()
