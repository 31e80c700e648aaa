"""Reads the messages of an mbox file: subject, sender and the text of the body, without attachments.

RFC 4155 (mbox), 5322 and 2045 to 2047 (messages). Mail breaks these rules often, so that nothing in one message is an
error: text in an unknown or a wrong charset is read as UTF-8, or else as cp1252.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from email import message_from_bytes
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from shared.errors import InvalidDataset

# A line "From SENDER DATE" begins a message if a header follows it; a sentence of a body may begin with "From ", too.
_DATE = rb"(Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b(?=.*\d:\d\d)(?=.*\b(19|20)\d\d\b)"
_SEPARATOR = re.compile(rb"From (.*\s)?" + _DATE + rb"|From (\S+@\S+|-|MAILER-DAEMON)\s*$")
_HEADER = re.compile(rb">?From |[!-9;-~]+[ \t]*:")
_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)  # a line of a body that would look like a separator
_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|U(000[0-9a-f]|0010)[0-9a-f]{4})")  # of a character beyond Latin-1
_INLINE = frozenset(("a", "b", "code", "em", "font", "i", "img", "small", "span", "strong", "sub", "sup", "u"))
_HIDDEN = frozenset(("script", "style", "template", "title"))


def read_mbox(path: Path) -> Iterator[dict[str, Any]]:
    """Yields `subject`, `from` and `text` of each message. Raises InvalidDataset for a file that is not an mbox."""
    for content in _messages(path):
        message = message_from_bytes(_QUOTED_FROM.sub(rb"\1", content))
        text = "\n".join(part.strip("\n") for part in _texts(message)).strip()
        yield {"subject": _header(message, "subject"), "from": _header(message, "from"), "text": text}


def _messages(path: Path) -> Iterator[bytes]:
    """Yields each message without its separator line."""
    with path.open("rb") as file:
        lines: list[bytes] = []
        separator = next((line for line in file if line.strip()), b"").removeprefix(b"\xef\xbb\xbf")
        if separator and not separator.startswith(b"From "):
            raise InvalidDataset(f"{path}:1: an mbox file begins with a line `From SENDER DATE`, and this one does not")
        pending = b""  # a line that is a separator if a header follows it
        for line in file:
            if pending:
                if _HEADER.match(line):
                    yield b"".join(lines)
                    lines = []
                else:
                    lines.append(pending)
                pending = b""
            if _SEPARATOR.match(line):
                pending = line
            else:
                lines.append(line)
        if separator:
            yield b"".join([*lines, pending])


def _texts(part: Message) -> list[str]:
    """Returns the texts of a message's body. Attachments, named parts and attached messages are none."""
    if part.get_content_disposition() == "attachment" or part.get_filename() is not None:
        return []
    kind = part.get_content_type()
    content: Any = part.get_payload()
    if isinstance(content, list):
        if part.get_content_maintype() != "multipart":  # an attached message, or a delivery report
            return []
        if kind == "multipart/alternative":
            versions = [(_first_kind(each), texts) for each in content if (texts := _texts(each))]
            plain = next((texts for kind, texts in versions if kind == "text/plain"), None)
            return plain or (versions[-1][1] if versions else [])
        return [text for each in content for text in _texts(each)]
    if kind not in ("text/plain", "text/html") and part.get_content_maintype() != "multipart":  # without its boundary
        return []
    payload = part.get_payload(decode=True)
    if not isinstance(payload, bytes):
        return []
    text = _decoded(payload, str(part.get_content_charset("utf-8"))).replace("\r\n", "\n")
    text = _html_text(text) if kind == "text/html" else text
    return [text] if text.strip() else []


def _first_kind(part: Message) -> str:
    """Returns the content type of a part, of a multipart the one of its first leaf."""
    return next((leaf.get_content_type() for leaf in part.walk() if not leaf.is_multipart()), "")


def _decoded(content: bytes, charset: str) -> str:
    """Returns bytes as text: by the charset, or else as UTF-8, or else as cp1252."""
    # Windows writes its own charset under the name of ISO 8859-1.
    named = "cp1252" if charset.lower() in ("iso-8859-1", "latin-1", "latin1") else charset
    for name in (named, "utf-8"):
        try:
            return content.decode(name)
        except (LookupError, ValueError):  # UnicodeDecodeError is a ValueError, and so is a charset with a NUL
            continue
    return content.decode("cp1252", "replace")


def _header(message: Message, name: str) -> str:
    """Returns a header as text, with the encoded words of RFC 2047."""
    raw = next((str(value) for key, value in message.raw_items() if key.lower() == name), "")
    text = _decoded(re.sub(r"\r?\n(?=[ \t])", "", raw).encode("utf-8", "surrogateescape"), "utf-8").strip()
    try:
        pieces = decode_header(text)
    except (HeaderParseError, ValueError):
        return text
    return "".join(_piece(*each) for each in pieces).strip()


def _piece(content: str | bytes, charset: str | None) -> str:
    """Returns a piece of a header as `decode_header` gives it: characters between encoded words are escaped."""
    if isinstance(content, str):
        return content
    if charset is not None:
        return _decoded(content, charset.partition("*")[0])
    return _ESCAPE.sub(lambda escape: chr(int(escape[0][2:], 16)), content.decode("latin-1"))


class _HtmlText(HTMLParser):
    """Collects the text that a browser shows."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in _HIDDEN
        if tag not in _INLINE:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(self._hidden - (tag in _HIDDEN), 0)
        if tag not in _INLINE:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(re.sub(r"\s+", " ", data))


def _html_text(html: str) -> str:
    """Returns the text of an HTML document, a line for each block."""
    parser = _HtmlText()
    parser.feed(html)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.pieces).split("\n"))
    return "\n".join(line for line in lines if line)
