"""The documentation site: Zensical builds it strictly, every link of its pages resolves, and it needs no other host."""

import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCES = {"a": "href", "link": "href", "img": "src", "script": "src", "iframe": "src", "source": "src"}
LOADED = ("link", "img", "script", "iframe", "source")  # a browser fetches them without being asked


class Page(HTMLParser):
    """The references of a page, as pairs of tag and address, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.references, self.anchors = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        address = values.get(REFERENCES.get(tag, ""))
        if address and not (tag == "link" and values.get("rel") == "canonical"):
            self.references.append((tag, address))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site, built from a copy, since Zensical writes its cache beside docs/."""
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, root / "docs")
    (root / "zensical.toml").write_text((ROOT / "zensical.toml").read_text())
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "build" / "site"


@pytest.fixture(scope="module")
def pages(site):
    """Every built page by its path, without the page for unknown addresses, whose links start at the root."""
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_is_in_the_navigation():
    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for each in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(each)]

    listed = leaves(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_every_link_resolves(site, pages):
    broken = []
    for path, page in pages.items():
        for _, address in page.references:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else {unquote(parts.fragment)}
            there = target.is_relative_to(site) and target.is_file()
            if not there or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append((str(path.relative_to(site)), address))
    assert len(pages) > 40
    assert broken == []


def test_nothing_is_loaded_from_another_host(site, pages):
    loaded = [address for page in pages.values() for tag, address in page.references if tag in LOADED]
    assert [address for address in loaded if urlsplit(address).netloc] == []
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style
    # Zensical's script loads Mermaid from a CDN on pages that have such a diagram.
    assert [path for path in pages if 'class="mermaid"' in path.read_text()] == []
