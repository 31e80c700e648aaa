"""The pages in a real browser: what people do, live figures, restarts, accessibility, small screens, no JavaScript."""

import re
import socket

import pytest

from server.app import create_app
from shared.access import Role
from tests.server.actors import serving
from tests.server.dashboard.browsing import CHROMIUM, MISSING, NARROW, WIDE, Tab, addresses, chromium
from tests.server.dashboard.seed import ask_to_join, ask_to_log_in, populate, progress, report

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


def test_a_browser_signs_in_and_out(tab):
    page = tab().page
    assert page.get_by_role("heading", name="Overview").is_visible()
    page.get_by_role("button", name="Sign out").click()
    assert page.get_by_text("You are signed out.").is_visible()


@pytest.mark.slow
def test_a_person_s_day(tab, fleet):
    """Lets a device in, submits a job, watches it, compares runs, approves and rolls back versions."""
    browser_tab = tab()
    page = browser_tab.page
    authorization = ask_to_join(fleet, "bobs-phone")
    page.get_by_label("Code").fill(authorization["user_code"])
    page.get_by_role("button", name="Look it up").click()
    page.get_by_label("Users whose data is on it").fill("bob")
    page.get_by_role("button", name="Approve").click()
    page.get_by_text("The device is approved.").wait_for()
    device = fleet.device(users=("alice",))
    page.get_by_role("link", name="Devices", exact=True).click()
    page.get_by_role("link", name="phone").click()
    page.get_by_role("heading", name="phone").wait_for()

    ids = []
    for adapter, top in (("first", 0.8), ("first", 0.4)):
        browser_tab.go("/ui/jobs/new")
        page.get_by_label("User", exact=True).fill("alice")
        page.get_by_label("Adapter").fill(adapter)
        page.get_by_label("Task").select_option("sst2")
        page.get_by_label("Data set").fill("movies")
        page.get_by_label("LoRA rank").fill("2")
        page.get_by_label("Estimator").select_option("replay")
        page.get_by_text("Or paste the whole request").click()
        page.get_by_role("button", name="Submit", exact=True).click()
        page.get_by_text("The job is submitted.").wait_for()
        ids.append(page.url.split("/")[-1].partition("?")[0])
        fleet.home.compile()
        lease = device.lease()
        page.locator('[data-live="state"]').get_by_text("training").wait_for()
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

    browser_tab.go("/")
    page.get_by_role("link", name="first v2").click()
    page.get_by_text("Approve…").click()
    page.get_by_label("Reason").last.wait_for(state="attached")
    page.locator("#reason-approve").fill("looks good")
    page.get_by_role("button", name="Approve version 2").click()
    page.get_by_text("The version is approved.").wait_for()
    page.get_by_text("Roll back…").click()
    page.get_by_role("button", name="Roll back", exact=True).click()
    page.get_by_text("Main is an earlier version again.").wait_for()
    assert fleet.app().get("/v1/adapters/first").json()["main"] == 1
    page.get_by_role("button", name="Sign out").click()
    page.get_by_text("You are signed out.").wait_for()


@pytest.mark.slow
def test_a_person_confirms_a_login_of_a_terminal(browser, fleet):
    authorization = ask_to_log_in(fleet)
    visitor = Tab(browser, fleet.url)
    page = visitor.page
    address = authorization["verification_uri_complete"].removeprefix(fleet.url)
    visitor.go(address)
    page.fill("#token", fleet.home.token(Role.OPERATOR, name="alice"))
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.wait_for_url(f"{fleet.url}{address}")  # the page that was asked for
    page.get_by_role("heading", name="mobizo of alice@laptop asks to log in").wait_for()
    page.get_by_label("tokens:write").uncheck()
    page.get_by_role("button", name="Confirm").click()
    page.get_by_text("The login is confirmed.").wait_for()
    grant = {"grant_type": "urn:ietf:params:oauth:grant-type:device_code", "client_id": "mobizo"}
    grant["device_code"] = authorization["device_code"]
    scopes = fleet.actor().post("/v1/oauth/login_token", data=grant).json()["scope"].split()
    assert "jobs:write" in scopes
    assert "tokens:write" not in scopes
    page.get_by_label("Code").fill("0000-0000")
    page.get_by_role("button", name="Look it up").click()
    page.get_by_role("alert").get_by_text("No login waits with this code").wait_for()
    visitor.go("/ui/operations/audit")
    assert page.get_by_role("cell", name="login-approved").is_visible()
    visitor.close()
    visitor.errors[:] = [error for error in visitor.errors if "404" not in error]  # the wrong code's page
    assert visitor.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("scripts", [True, False])
def test_a_person_signs_in_with_a_code(browser, fleet, scripts):
    visitor = Tab(browser, fleet.url, java_script_enabled=scripts)
    page = visitor.page
    visitor.go("/ui/login?next=/ui/jobs")
    page.get_by_role("button", name="Sign in with a code").click()
    page.get_by_role("heading", name="Confirm this code").wait_for()
    if scripts:
        assert visitor.violations() == []
    code = page.locator(".code").inner_text()
    assert fleet.operator().post(f"/v1/login-requests/{code}/approve").status_code == 200
    page.wait_for_url(f"{fleet.url}/ui/jobs")
    assert page.get_by_role("heading", name="Jobs", exact=True).is_visible()
    visitor.close()
    assert visitor.errors == []


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
    problems, browser_tab, every = {}, tab(), addresses(fleet, device)
    every["join"] = f"/ui/devices/join?user_code={ask_to_join(fleet)['user_code']}"
    every["activate"] = f"/ui/activate?user_code={ask_to_log_in(fleet)['user_code']}"
    for name, path in every.items():
        assert browser_tab.go(path) == 200, path
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
    login = Tab(browser_tab.context.browser, fleet.url, "dark", NARROW)
    login.go("/ui/login")
    assert login.violations() == []
    login.close()


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
