"""The report's pages as a browser or a reader of Markdown would take them apart."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """What a page holds: tables as rows of cell texts, ids, links, pictures' alternative texts, loaded addresses."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.ids, self.links, self.alts, self.loaded = [], [], [], [], []
        self.tags, self.open, self.text = set(), [], ""
        self._cell = False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.add(tag)
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a":
            self.links.append(values["href"])
        if "src" in values:
            self.loaded.append(values["src"])
        if tag == "img":
            self.alts.append(values["alt"])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        self.text += data
        if self._cell:
            self.tables[-1][-1][-1] += data


def markdown_tables(text):
    """Tables of a Markdown page as rows of cell texts, their rules left out."""
    tables = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                tables.append([])
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            if not all(re.fullmatch(r" -{3}:? ", cell) for cell in cells):
                tables[-1].append([re.sub(r"\\(.)", r"\1", cell.strip()) for cell in cells])
        before = line
    return tables
