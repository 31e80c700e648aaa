"""`bench dashboard`: the time of the first page of many jobs, and problems that a browser and axe-core report.

- load: the first page of `/ui/jobs` of a tenant with 10,000 jobs and 1,000 devices, on both databases. `page_ms` is the
  median of whole requests by one client, `bytes` what Chromium receives for the first visit with all files of the page.
- pages: every page of a small server in Chromium, light and dark: axe-core's violations, and errors of the console.
"""

import statistics
import tempfile
import time
from pathlib import Path

from sqlalchemy import text

from bench.result import Measurement, Row
from bench.runner import Parts, command_of
from bench.server import home
from server.app import create_app
from server.database.database import Database
from server.identity.signing_keys import service as keys
from server.identity.tokens import TokenService
from server.schema import upgrade
from server.settings import Settings
from shared.access import DEFAULT_TENANT, Role
from tests.server.actors import serving
from tests.server.dashboard.browsing import SCHEMES, Tab, addresses, chromium
from tests.server.dashboard.people import Person
from tests.server.dashboard.seed import populate, standing_server
from tests.server.database import population

JOBS, DEVICES, QUICK_JOBS = 10_000, 1_000, 300
TURNS, QUICK_TURNS = 40, 5
LISTS = ("/ui/jobs", "/", "/ui/devices")


def load(quick: bool) -> Measurement:
    """Returns a row for each database and list, and the claims about the list of jobs."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, home.both_databases("dashboard") as databases:
        for kind, url in databases:
            rows += [{"database": kind, **row} for row in _lists(_settings(Path(name) / kind, url), quick)]
    job_rows = [row for row in rows if row["page"] == LISTS[0]]
    return rows, {f"first_{name}": max(row[name] for row in job_rows) for name in ("page_ms", "page_bytes")}


def _settings(directory: Path, url: str | None) -> Settings:
    settings = Settings(home=directory, database_url=url, migrate_at_start=True, token_rate=1e6, address_rate=1e6)
    directory.mkdir(parents=True)
    keys.create_key(settings.key_path)
    return settings


def _lists(settings: Settings, quick: bool) -> list[Row]:
    database = Database(settings.url, settings.tuning)
    upgrade(database.engine)
    jobs = QUICK_JOBS if quick else JOBS
    population.populate(database, jobs)
    with database.writing() as session:
        session.execute(text("UPDATE jobs SET tenant = :tenant"), {"tenant": DEFAULT_TENANT})
        session.execute(
            text("UPDATE devices SET tenant = :tenant WHERE number <= :most"),
            {"tenant": DEFAULT_TENANT, "most": DEVICES},
        )
        token = TokenService(session).issue(Role.OPERATOR, DEFAULT_TENANT, "bench")[1]
    database.close()
    with serving(create_app(settings)) as url, Person(url) as person, chromium() as browser:
        person.sign_in(token)
        rows = []
        for path in LISTS:
            tab = Tab(browser, url)
            tab.sign_in(token, "/ui/operations/tokens")
            seconds = [_request_seconds(person, path) for _ in range(QUICK_TURNS if quick else TURNS)]
            row = {"page": path, "jobs": jobs, "page_ms": 1000 * statistics.median(seconds)}
            rows.append(row | {"slowest_ms": 1000 * max(seconds), "page_bytes": _received_bytes(tab, path)})
            tab.close()
        return rows


def _request_seconds(person: Person, path: str) -> float:
    start = time.perf_counter()
    person.get(path).raise_for_status()
    return time.perf_counter() - start


def _received_bytes(tab: Tab, path: str) -> int:
    """Returns the bytes that a browser with an empty cache receives for a page and its files, with all headers."""
    session = tab.context.new_cdp_session(tab.page)
    sizes: list[int] = []
    session.on("Network.loadingFinished", lambda event: sizes.append(int(event["encodedDataLength"])))
    session.send("Network.enable")
    session.send("Network.clearBrowserCache")
    tab.go(path)
    tab.page.wait_for_load_state("networkidle")
    return sum(sizes)


def pages(quick: bool) -> Measurement:
    """Returns a row for each page, and the sums over all pages."""
    rows: list[Row] = []
    with standing_server() as fleet, chromium() as browser:
        device, _ = populate(fleet, every=25)
        tab = Tab(browser, fleet.url)
        page_paths = {"login": "/ui/login"} | addresses(fleet, device)
        page_paths["join"] = "/ui/devices/join"
        tab.sign_in(fleet.home.token(Role.OPERATOR))
        for name in ("login", "overview", "jobs") if quick else page_paths:
            tab.go(page_paths[name])
            tab.drawn()
            violations = 0
            for scheme in SCHEMES:
                tab.page.emulate_media(color_scheme=scheme)
                violations += len(tab.violations())
            rows.append({"page": name, "axe_violations": violations, "console_errors": len(tab.errors)})
            tab.errors.clear()
        tab.close()
    return rows, {name: sum(row[name] for row in rows) for name in ("axe_violations", "console_errors")}


PARTS: Parts = {"load": load, "pages": pages}
dashboard = command_of(PARTS, "Time the first pages among 10,000 jobs, and check every page with axe-core.")
