"""`python -m tests.server.dashboard.screenshots`: makes the images of docs/images/dashboard-*.png anew.

With a directory as argument, pictures of every page are written there: light, dark and on a narrow screen.
"""

import io
import sys
from pathlib import Path

from PIL import Image

from shared.access import Role
from tests.server.dashboard.browsing import NARROW, WIDE, Tab, addresses, chromium
from tests.server.dashboard.seed import populate, standing_server

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
SHOWN = ("overview", "job")  # in README and docs/
COLOURS, MAX_BYTES = 64, 60_000
# What the end of an image's name says: (colour scheme, size)
VARIANTS = {"": ("light", WIDE), "-dark": ("dark", WIDE), "-small": ("light", NARROW)}


def main(directory=None):
    """Takes the pictures that docs/ shows, or of every page if there is a directory for them."""
    with standing_server() as fleet, chromium() as browser:
        device, _ = populate(fleet)
        pages = addresses(fleet, device)
        token = fleet.home.token(Role.OPERATOR, name="operator")
        for ending in VARIANTS if directory else ("",):
            tab = Tab(browser, fleet.url, *VARIANTS[ending])
            tab.sign_in(token)
            for name in pages if directory else SHOWN:
                tab.go(pages[name])
                tab.drawn()
                if directory:
                    tab.page.screenshot(path=directory / f"{name}{ending}.png", full_page=True)
                else:
                    save(tab, name)
            tab.close()


def save(tab, name):
    """Writes a small picture of the page that a tab shows."""
    picture = Image.open(io.BytesIO(tab.page.screenshot())).convert("RGB").quantize(COLOURS)
    path = IMAGES / f"dashboard-{name}.png"
    picture.save(path, optimize=True)
    assert path.stat().st_size <= MAX_BYTES, path


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
