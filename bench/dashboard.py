"""`bench dashboard`: the time of the first page of jobs among many.

The tenant has 10,000 jobs and 1,000 devices, on both databases. `page_ms` is the median of whole requests by one
client, `page_bytes` what Chromium receives for the first visit with all files of the page.
"""

import statistics
import tempfile
from pathlib import Path

from sqlalchemy import text

from bench.result import Row, write
from bench.runner import JsonFile, Quick, time_by_turns
from bench.server import home
from server.app import create_app
from server.database.database import Database
from server.identity.signing_keys import service as keys
from server.schema import upgrade
from server.settings import Settings
from shared.access import DEFAULT_TENANT, Role
from tests.server.actors import serving
from tests.server.dashboard.browsing import Tab, chromium
from tests.server.dashboard.people import Person
from tests.server.database import population

JOBS, DEVICES, QUICK_JOBS = 10_000, 1_000, 300
TURNS, QUICK_TURNS = 40, 5
PAGE = "/ui/jobs"


def dashboard(json_file: JsonFile = None, quick: Quick = False) -> None:
    """Time the first page of jobs among 10,000 jobs and 1,000 devices."""
    with tempfile.TemporaryDirectory() as name, home.both_databases("dashboard") as databases:
        rows = [{"database": kind, **_page(_settings(Path(name) / kind, url), quick)} for kind, url in databases]
    write(json_file, rows, {f"first_{name}": max(row[name] for row in rows) for name in ("page_ms", "page_bytes")})


def _settings(directory: Path, url: str | None) -> Settings:
    settings = Settings(home=directory, database_url=url, migrate_at_start=True, token_rate=1e6, address_rate=1e6)
    directory.mkdir(parents=True)
    keys.create_key(settings.key_path)
    return settings


def _page(settings: Settings, quick: bool) -> Row:
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
    database.close()
    token = home.new_token(settings, Role.OPERATOR)
    with serving(create_app(settings)) as url, Person(url) as person, chromium() as browser:
        person.sign_in(token)
        tab = Tab(browser, url)
        tab.sign_in(token, "/ui/operations/tokens")
        turns = time_by_turns(QUICK_TURNS if quick else TURNS, {"page": lambda _: person.get(PAGE).raise_for_status()})
        row = {"jobs": jobs, "page_ms": 1000 * statistics.median(turns["page"]), "page_bytes": _received_bytes(tab)}
        tab.close()
        return row


def _received_bytes(tab: Tab) -> int:
    """Returns the bytes that a browser with an empty cache receives for the page and its files, with all headers."""
    session = tab.context.new_cdp_session(tab.page)
    sizes: list[int] = []
    session.on("Network.loadingFinished", lambda event: sizes.append(int(event["encodedDataLength"])))
    session.send("Network.enable")
    session.send("Network.clearBrowserCache")
    tab.go(PAGE)
    tab.page.wait_for_load_state("networkidle")
    return sum(sizes)
