"""A real browser at the pages: Debian's Chromium without a window, and what axe-core finds on a page."""

import contextlib
import shutil

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

CHROMIUM = shutil.which("chromium")
MISSING = "there is no Chromium on the PATH; `apt install chromium` installs it"
SCHEMES = ("light", "dark")
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 360, "height": 740}


@contextlib.contextmanager
def chromium():
    """A browser."""
    with sync_playwright() as tools:
        # A container's root has no user namespaces to build the sandbox from.
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of a browser, and the errors of its console."""

    def __init__(self, browser, url, scheme="light", size=WIDE, **options):
        self.url, self.errors = url, []
        self.context = browser.new_context(viewport=size, color_scheme=scheme, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _note(self, message):
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def sign_in(self, token, target="/"):
        self.go(f"/ui/login?next={target}")
        self.page.fill("#token", token)
        self.page.get_by_role("button", name="Sign in", exact=True).click()
        self.page.wait_for_url(f"{self.url}{target}")

    def go(self, path):
        """The status of a page."""
        return self.page.goto(self.url + path).status

    def drawn(self):
        """Waits until every chart that has figures is drawn."""
        self.page.wait_for_timeout(600)

    def overflow(self):
        """Pixels by which the page is wider than the screen."""
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")

    def violations(self, *rules):
        """What axe-core finds, by all rules unless some are named: the rule and the elements."""
        violations = Axe().run(self.page, options={"runOnly": rules} if rules else None).response["violations"]
        return [(each["id"], [node["html"][:160] for node in each["nodes"][:3]]) for each in violations]

    def close(self):
        self.context.close()


def addresses(fleet, device):
    """The pages of a server that `populate` filled, by name."""
    items = fleet.app().get("/v1/jobs").json()["items"]
    succeeded_jobs = [job for job in items if job["state"] == "succeeded" and job["adapter"] != "readers"]
    training, failed = (next(job for job in items if job["state"] == state) for state in ("training", "failed"))
    series = next(job for job in items if job["adapter"] == "dora-mail")
    return {
        "overview": "/",
        "jobs": "/ui/jobs",
        "submit": "/ui/jobs/new",
        "job": f"/ui/jobs/{training['id']}",
        "finished": f"/ui/jobs/{succeeded_jobs[-1]['id']}",
        "failed": f"/ui/jobs/{failed['id']}",
        "series": f"/ui/jobs/{series['id']}",
        "compare": f"/ui/compare?job={succeeded_jobs[-1]['id']}&job={succeeded_jobs[-2]['id']}",
        "devices": "/ui/devices",
        "join": "/ui/devices/join",
        "device": f"/ui/devices/{device.device_id}",
        "adapters": "/ui/adapters",
        "adapter": "/ui/adapters/alice-movies",
        "version": "/ui/adapters/alice-movies/versions/2",
        "held": "/ui/adapters/alice-movies/versions/3",
        "versions": "/ui/adapters/alice-movies/compare?left=v1&right=v2",
        "cohorts": "/ui/cohorts",
        "cohort": "/ui/cohorts/readers",
        "round": "/ui/cohorts/readers/rounds/1",
        "programs": "/ui/programs",
        "program": f"/ui/programs/{succeeded_jobs[0]['recipe_id']}",
        "operations": "/ui/operations",
        "tokens": "/ui/operations/tokens",
        "webhooks": "/ui/operations/webhooks",
        "audit": "/ui/operations/audit",
    }
