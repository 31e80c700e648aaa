"""Messages as mail programs write them, with what RFC 4155, 5322 and 2045 to 2047 allow, and with common faults."""

import base64

import pytest

from device_agent.datasets.mail import read_mbox
from shared.errors import InvalidDataset

SEPARATOR = "From ann@example.org Mon Jan  5 10:00:01 2026\n"
HEAD = "From: Ann <ann@example.org>\nSubject: {subject}\nMIME-Version: 1.0\n"


def read(tmp_path, *messages, line_end="\n"):
    path = tmp_path / "a.mbox"
    content = "".join(message if message.startswith("From ") else SEPARATOR + message + "\n" for message in messages)
    path.write_bytes(content.replace("\n", line_end).encode("utf-8", "surrogateescape"))
    return list(read_mbox(path))


def message(body, content_type="text/plain; charset=utf-8", subject="s", encoding="8bit"):
    head = HEAD.format(subject=subject)
    return f"{head}Content-Type: {content_type}\nContent-Transfer-Encoding: {encoding}\n\n{body}\n"


def part(body, *headers):
    return "\n".join(headers) + f"\n\n{body}\n"


def multipart(*parts, kind="mixed"):
    return "".join(f"--X\n{each}" for each in parts) + "--X--\n", f"multipart/{kind}; boundary=X"


def texts(*arguments, **options):
    return [record["text"] for record in read(*arguments, **options)]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_line_of_the_body_that_begins_with_from_is_no_message(tmp_path, line_end):
    bodies = [
        "The offer is below.\nFrom what we saw, the roof is fine.",
        "A note.\n\nFrom here on all is well.\nEnd.",
        "Hours:\n\nFrom 10:00 on Monday 5 January 2026:\nnote: closed",
        "Quoted:\n\nFrom bob@example.org Mon Jan  5 10:00:01 2026\n\nand no header after it",
    ]
    assert texts(tmp_path, *map(message, bodies), line_end=line_end) == bodies


@pytest.mark.parametrize(
    "line",
    [
        "From - Mon Jan 05 10:00:01 2026",
        "From 177@xxx Mon Jan 05 10:00:01 +0000 2026",
        "From ann@example.org  Mon, 5 Jan 2026 10:00 CET",
        'From "a b"@example.org Mon Jan  5 10:00:01 2026',
        "From ann@example.org",
        "From MAILER-DAEMON",
    ],
)
def test_separators_of_other_programs(tmp_path, line):
    assert texts(tmp_path, message("one"), f"{line}\nFrom: x\n\ntwo\n") == ["one", "two"]


def test_quoted_separators_lose_one_mark(tmp_path):
    assert texts(tmp_path, message("a\n\n>From here\n>>From there")) == ["a\n\nFrom here\n>From there"]
    encoded = base64.b64encode(b"a\n>From here").decode()
    assert texts(tmp_path, message(encoded, encoding="base64")) == ["a\n>From here"]


def test_attachments_and_attached_messages_are_left_out(tmp_path):
    plain = part("The body.", "Content-Type: text/plain; charset=utf-8")
    attached = (
        part("secret", "Content-Type: message/rfc822", "", "From: c@example.org", "Content-Type: text/plain"),
        part("secret", 'Content-Type: text/plain; name="notes.txt"'),
        part("secret", "Content-Type: text/plain", "Content-Disposition: inline; filename*=utf-8''n%C3%B6.txt"),
        part("secret", "Content-Type: text/plain", "Content-Disposition: attachment"),
        part("secret", "Content-Type: text/calendar"),
        part("--Y\n\nFrom: d@example.org\n\nsecret\n--Y--", "Content-Type: multipart/digest; boundary=Y"),
    )
    for each in attached:
        assert texts(tmp_path, message(*multipart(plain, each))) == ["The body."], each


def test_parts_without_their_boundary_are_text(tmp_path):
    for kind in ("multipart/mixed", "multipart/mixed; boundary=other"):
        assert texts(tmp_path, message("hello", kind)) == ["hello"]


def test_of_alternatives_the_plain_text_is_read(tmp_path):
    plain = part("Hello", "Content-Type: text/plain")
    html = part("<b>Hello</b> you", "Content-Type: text/html")
    related = part("--Y\n" + html + "--Y--", "Content-Type: multipart/related; boundary=Y")
    for first, second in ((plain, html), (html, plain), (plain, related)):
        assert texts(tmp_path, message(*multipart(first, second, kind="alternative"))) == ["Hello"]
    assert texts(tmp_path, message(*multipart(related, kind="alternative"))) == ["Hello you"]
    assert texts(tmp_path, message(*multipart(plain, plain))) == ["Hello\nHello"]


def test_html_alone_is_read_as_text(tmp_path):
    html = "<html><head><title>t</title><style>p {}</style></head><p>Hello <b>there</b>,\n you</p><p>5 &lt; 6<br>x</p>"
    assert texts(tmp_path, message(html, "text/html")) == ["Hello there, you\n5 < 6\nx"]


@pytest.mark.parametrize(
    ("content", "charset", "text"),
    [
        ("Grüße".encode(), "x-user-defined", "Grüße"),
        ("Grüße".encode(), "us-ascii", "Grüße"),
        ("Grüße".encode("cp1252"), "utf-8", "Grüße"),
        ("“5 €”".encode("cp1252"), "iso-8859-1", "“5 €”"),
        ("雪".encode("iso2022_jp"), "iso-2022-jp", "雪"),
        ("Привет".encode("koi8-r"), "koi8-r", "Привет"),
    ],
)
def test_charsets(tmp_path, content, charset, text):
    encoded = base64.b64encode(content).decode()
    assert texts(tmp_path, message(encoded, f"text/plain; charset={charset}", encoding="base64")) == [text]
    raw = content.decode("ascii", "surrogateescape")
    if not content.startswith(b"\x1b"):
        assert texts(tmp_path, message(raw, f"text/plain; charset={charset}")) == [text]


def test_transfer_encodings(tmp_path):
    assert texts(tmp_path, message("caf=C3=A9 =\nau lait", encoding="quoted-printable")) == ["café au lait"]
    assert texts(tmp_path, message("Y2Fmw6k", encoding="BASE64")) == ["café"]  # without padding


@pytest.mark.parametrize(
    ("raw", "subject"),
    [
        ("plain", "plain"),
        ("=?utf-8?q?caf=C3=A9?=", "café"),
        ("Re: =?utf-8?b?Y2Fmw6k=?= =?utf-8?q?_au?=\n =?utf-8?q?_lait?= now", "Re: café au lait now"),
        ("=?utf-8?q?=C3?= =?utf-8?q?=A9?=", "é"),  # a character in two words, which RFC 2047 forbids
        ("=?x-unknown?q?odd?=", "odd"),
        ("=?windows-1252?q?caf=E9?=", "café"),
        ("=?utf-8*fr?q?caf=C3=A9?=", "café"),
        ("Grüße", "Grüße"),
        ("=?utf-8?q?caf=C3=A9?= → Grüße 😀 C:\\users", "café → Grüße 😀 C:\\users"),
        ("folded\n line", "folded line"),
    ],
)
def test_subjects(tmp_path, raw, subject):
    (record,) = read(tmp_path, message("x", subject=raw))
    assert record == {"subject": subject, "from": "Ann <ann@example.org>", "text": "x"}


def test_what_is_no_mbox(tmp_path):
    path = tmp_path / "a.mbox"
    path.write_text("Subject: x\n\ny\n")
    with pytest.raises(InvalidDataset, match=r"a\.mbox:1: an mbox file begins with a line `From SENDER DATE`"):
        list(read_mbox(path))
    path.write_text("")
    assert list(read_mbox(path)) == []
