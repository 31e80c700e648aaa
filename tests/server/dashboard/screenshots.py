"""`python -m tests.server.dashboard.screenshots`: makes the images of docs/images/dashboard-*.png anew."""

import io
from pathlib import Path

from PIL import Image

from shared.access import Role
from tests.server.dashboard.browsing import NARROW, WIDE, Tab, addresses, chromium
from tests.server.dashboard.seed import populate, standing_server

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
COLOURS, MAX_BYTES, MAX_BYTES_IN_ALL = 64, 60_000, 1_350_000
SMALL = ("overview", "jobs", "job")  # also shown on a narrow screen
# What the end of an image's name says: (colour scheme, size)
VARIANTS = {"": ("light", WIDE), "-dark": ("dark", WIDE), "-small": ("light", NARROW)}


def main():
    """Takes a picture of every page, light and dark."""
    for path in IMAGES.glob("dashboard-*.png"):
        path.unlink()
    with standing_server() as fleet, chromium() as browser:
        device, _ = populate(fleet)
        pages = addresses(fleet, device)
        pages["join"] = "/ui/devices/join"
        token = fleet.home.token(Role.OPERATOR, name="operator")
        for ending, (scheme, size) in VARIANTS.items():
            tab = Tab(browser, fleet.url, scheme, size)
            if ending != "-small":
                tab.go("/ui/login")
                save(tab, f"login{ending}")
            tab.sign_in(token)
            for name in SMALL if ending == "-small" else pages:
                tab.go(pages[name])
                tab.drawn()
                save(tab, f"{name}{ending}")
            tab.close()
    assert sum(path.stat().st_size for path in IMAGES.glob("dashboard-*.png")) <= MAX_BYTES_IN_ALL


def save(tab, name):
    """Writes a picture of the page that a tab shows."""
    picture = Image.open(io.BytesIO(tab.page.screenshot())).convert("RGB").quantize(COLOURS)
    path = IMAGES / f"dashboard-{name}.png"
    picture.save(path, optimize=True)
    assert path.stat().st_size <= MAX_BYTES, path


if __name__ == "__main__":
    main()
