"""`python -m tests.server.dashboard.screenshots`: makes the images of docs/images/dashboard-*.png anew."""

import io
from pathlib import Path

from PIL import Image

from shared.access import Role
from tests.server.dashboard.browsing import NARROW, WIDE, Tab, addresses, chromium
from tests.server.dashboard.seed import ask_to_join, populate, standing_server

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
COLOURS, MOST_BYTES = 160, 100_000
# name: (page, colour scheme, size)
SHOTS = {
    "overview": ("overview", "light", WIDE),
    "overview-dark": ("overview", "dark", WIDE),
    "overview-small": ("overview", "light", NARROW),
    "jobs": ("jobs", "light", WIDE),
    "job": ("job", "light", WIDE),
    "job-dark": ("job", "dark", WIDE),
    "compare": ("compare", "light", WIDE),
    "devices": ("devices", "light", WIDE),
    "adapter": ("adapter", "light", WIDE),
    "version": ("version", "light", WIDE),
    "cohort": ("cohort", "dark", WIDE),
}


def main():
    """Takes every picture."""
    with standing_server() as fleet, chromium() as browser:
        device, _ = populate(fleet)
        pages = addresses(fleet, device) | {"join": f"/ui/devices/join?user_code={ask_to_join(fleet)['user_code']}"}
        token = fleet.home.token(Role.OPERATOR, name="operator")
        for name, (page, scheme, size) in SHOTS.items():
            tab = Tab(browser, fleet.url, scheme, size)
            tab.sign_in(token)
            tab.go(pages[page])
            tab.drawn()
            picture = Image.open(io.BytesIO(tab.page.screenshot())).convert("RGB").quantize(COLOURS)
            path = IMAGES / f"dashboard-{name}.png"
            picture.save(path, optimize=True)
            assert path.stat().st_size <= MOST_BYTES, path
            tab.close()


if __name__ == "__main__":
    main()
