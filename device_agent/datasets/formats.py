"""Reads records from the owner's files: CSV, TSV, JSON Lines, JSON, plain text, mbox and Parquet.

Every reader streams: it holds one record (of Parquet: one batch of rows; of mbox: one message and the offsets of all).
A malformed file is an error that names the file and line, because skipping the rest would silently train on part of the
data.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TextIO

from shared.errors import BadRequest, InvalidDataset

if TYPE_CHECKING:
    from email.message import Message

Located = tuple[str, dict[str, Any]]  # "FILE:LINE" (of mbox, JSON and Parquet: the record's number), and the record
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
DEFAULT_ENCODING = "utf-8-sig"  # UTF-8 with or without a byte order mark
MAX_LINE = 1 << 24  # characters of one line, field or object that a reader holds
_CHUNK = 1 << 16  # characters
_SNIFFED_ROWS = 20
_PARQUET_ROWS = 1000  # of one batch
_QUOTED_FROM = re.compile(r"^>(>*From )", re.MULTILINE)  # a line of a body that would look like the next message


class Format(StrEnum):
    """A file's format; the default follows from the file's suffix."""

    CSV = "csv"
    TSV = "tsv"
    JSONL = "jsonl"
    JSON = "json"
    TXT = "txt"
    MBOX = "mbox"
    PARQUET = "parquet"


_SUFFIXES = {f".{value}": value for value in Format} | {".ndjson": Format.JSONL, ".pq": Format.PARQUET}


@dataclass(frozen=True)
class Source:
    """A file and how it is read. delimiter: of CSV and TSV, else None. encoding: None for mbox and Parquet."""

    path: Path
    format: Format
    delimiter: str | None
    encoding: str | None

    def records(self, raw: BinaryIO) -> Iterator[Located]:
        """Yields the records of the file, which `raw` has open at its beginning.

        Raises InvalidDataset for a file that is not what its format says, and BadRequest for Parquet without pyarrow.
        """
        if self.encoding is None:
            yield from (_mbox if self.format is Format.MBOX else _parquet)(self.path)
            return
        newline = "" if self.format in (Format.CSV, Format.TSV) else None
        text = io.TextIOWrapper(raw, self.encoding, newline=newline)
        try:
            yield from _TEXT_READERS[self.format](text, self)
        except UnicodeError as error:
            raise _undecodable(self.path, self.encoding, error) from error
        finally:
            text.detach()


def open_source(path: Path, form: Format | None, delimiter: str | None, encoding: str | None) -> Source:
    """Returns how a file is read; a CSV file's delimiter is found from its first rows unless given.

    Raises BadRequest for an unknown suffix without a format, an unknown encoding, or a path that is not a file.
    """
    if not path.is_file():
        raise BadRequest(f"{path} is not a file")
    file_format = form or _SUFFIXES.get(path.suffix.lower())
    if file_format is None:
        raise BadRequest(f"{path}: the suffix names no known format; name it with --format {'|'.join(Format)}")
    if file_format in (Format.MBOX, Format.PARQUET):
        return Source(path, file_format, None, None)
    encoding = encoding or DEFAULT_ENCODING
    try:
        codecs.lookup(encoding)
    except LookupError as error:
        raise BadRequest(f"--encoding {encoding!r} is unknown; try utf-8, cp1252, latin-1 or utf-16") from error
    if file_format is Format.CSV:
        return Source(path, file_format, _delimiter(delimiter) if delimiter else _sniff(path, encoding), encoding)
    return Source(path, file_format, "\t" if file_format is Format.TSV else None, encoding)


def _delimiter(option: str) -> str:
    delimiter = DELIMITERS.get(option, option)
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise BadRequest(f"--delimiter {option!r} must be one character, or one of {', '.join(DELIMITERS)}")
    return delimiter


def _sniff(path: Path, encoding: str) -> str:
    """Returns the delimiter that cuts the first rows into the most columns, the same number in each."""
    with path.open(encoding=encoding, newline="", errors="replace") as file:
        sample = file.read(_CHUNK)
    is_complete = len(sample) < _CHUNK

    def columns(delimiter: str) -> int:
        rows = [row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter) if row]
        widths = {len(row) for row in (rows if is_complete else rows[:-1] or rows)[:_SNIFFED_ROWS]}
        return widths.pop() if len(widths) == 1 else 0

    return max(DELIMITERS.values(), key=columns)


def _table(text: TextIO, source: Source) -> Iterator[Located]:
    """Rows by the names of the first row. TSV has no quotation marks; in CSV they are those of RFC 4180."""
    path = source.path
    quoting: Literal[0, 3] = csv.QUOTE_NONE if source.format is Format.TSV else csv.QUOTE_MINIMAL
    previous_limit = csv.field_size_limit(MAX_LINE)
    rows = csv.reader(text, delimiter=source.delimiter or ",", quoting=quoting, strict=True)
    try:
        header = next(rows, [])
        if "" in header or len(set(header)) != len(header):
            raise InvalidDataset(f"{path}:1: the first row must name each column once, but is {', '.join(header)!r}")
        for row in rows:
            if not row:
                continue
            location = f"{path}:{rows.line_num}"
            if len(row) != len(header):
                raise InvalidDataset(
                    f"{location}: the row has {len(row)} columns and the first row {len(header)}; correct the row, or "
                    "name the delimiter with --delimiter"
                )
            yield location, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise InvalidDataset(f"{path}:{rows.line_num}: {error}; a quotation mark may be missing") from error
    finally:
        csv.field_size_limit(previous_limit)


def _numbered_lines(text: TextIO, source: Source) -> Iterator[tuple[str, str]]:
    """Yields (location, line) of the lines that are not blank."""
    number = 0
    while line := text.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise InvalidDataset(f"{source.path}:{number}: the line has more than {MAX_LINE} characters")
        if line.strip():
            yield f"{source.path}:{number}", line


def _json_lines(text: TextIO, source: Source) -> Iterator[Located]:
    for location, line in _numbered_lines(text, source):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidDataset(f"{location}: the line is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise InvalidDataset(f"{location}: the line is {type(record).__name__}; it must be a JSON object")
        yield location, record


def _plain_text(text: TextIO, source: Source) -> Iterator[Located]:
    """One record a line, with the only field `text`."""
    for location, line in _numbered_lines(text, source):
        yield location, {"text": line.strip()}


def _json_array(text: TextIO, source: Source) -> Iterator[Located]:
    """The objects of one array, of which at most one is held."""
    objects, decoder, number = _Buffer(text), json.JSONDecoder(), 0
    not_an_array = InvalidDataset(
        f"{source.path}: the file must be a JSON array of objects; JSON Lines need --format jsonl"
    )
    if objects.take() != "[":
        raise not_an_array
    following = objects.peek()
    while following != "]":
        number += 1
        location = f"{source.path}: record {number}"
        if following != "{":
            raise not_an_array
        yield location, objects.decode(decoder, location)
        following = objects.take()
        if following == ",":
            following = "{" if objects.peek() == "{" else ""
        elif following != "]":
            raise InvalidDataset(f"{location}: no comma or closing bracket follows; the file may be cut off")


class _Buffer:
    """The part of a JSON text that is not decoded yet."""

    def __init__(self, text: TextIO) -> None:
        self._text, self._pending, self._at = text, "", 0

    def peek(self) -> str:
        """Returns the next character that is not white space, or the empty text at the end."""
        while True:
            while self._at < len(self._pending) and self._pending[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._pending):
                return self._pending[self._at]
            self._pending, self._at = self._text.read(_CHUNK), 0
            if not self._pending:
                return ""

    def take(self) -> str:
        """Consumes the next character that is not white space, and returns it."""
        character = self.peek()
        self._at += len(character)
        return character

    def decode(self, decoder: json.JSONDecoder, location: str) -> dict[str, Any]:
        """Returns the object that begins here. Reads pieces of doubling size until the object is complete."""
        while True:
            try:
                record, end = decoder.raw_decode(self._pending, self._at)
            except (ValueError, RecursionError) as error:
                piece = self._text.read(max(_CHUNK, len(self._pending) - self._at))
                if not piece or len(self._pending) - self._at > MAX_LINE:
                    raise InvalidDataset(f"{location}: the record is not JSON ({error})") from error
                self._pending, self._at = self._pending[self._at :] + piece, 0
            else:
                self._at = end
                result: dict[str, Any] = record
                return result


_TEXT_READERS: dict[Format, Callable[[TextIO, Source], Iterator[Located]]] = {
    Format.CSV: _table,
    Format.TSV: _table,
    Format.JSONL: _json_lines,
    Format.JSON: _json_array,
    Format.TXT: _plain_text,
}


def _mbox(path: Path) -> Iterator[Located]:
    """Fields `subject`, `from` and `text`: the plain-text parts of a message, without attachments."""
    # Imported here to keep the daemon's memory small, as below.
    import mailbox

    box = mailbox.mbox(path, create=False)
    try:
        for number, message in enumerate(box, 1):
            text = "\n".join(filter(None, map(_plain_part, message.walk()))).strip()
            record = {
                "subject": _header(message, "subject"),
                "from": _header(message, "from"),
                "text": _QUOTED_FROM.sub(r"\1", text),
            }
            yield f"{path}: message {number}", record
    finally:
        box.close()


def _plain_part(part: Message) -> str:
    if part.get_content_type() != "text/plain" or part.get_content_disposition() == "attachment":
        return ""
    payload = part.get_payload(decode=True)
    if not isinstance(payload, bytes):
        return ""
    try:
        return payload.decode(part.get_content_charset("utf-8"), "replace")
    except LookupError:  # a charset that Python does not know
        return payload.decode("utf-8", "replace")


def _header(message: Message, name: str) -> str:
    from email.errors import HeaderParseError
    from email.header import decode_header, make_header

    value = message.get(name, "")
    try:
        return str(make_header(decode_header(value)))
    except (HeaderParseError, LookupError, ValueError):  # ValueError: also text that its charset cannot decode
        return str(value)


def _parquet(path: Path) -> Iterator[Located]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise BadRequest(f"{path}: Parquet files are read with pyarrow: pip install pyarrow") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    location = f"{path}: row {number}"
                    yield location, {name: _as_json(value, name, location) for name, value in record.items()}
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise InvalidDataset(f"{path}: the file is not Parquet, or damaged ({error})") from error


def _as_json(value: Any, column: str, location: str) -> Any:
    if isinstance(value, (datetime, date, time, Decimal)):
        return str(value)
    if isinstance(value, bytes):
        raise InvalidDataset(f"{location}: column {column!r} has bytes; choose other columns with --map FIELD=COLUMN")
    return value


def _undecodable(path: Path, encoding: str, error: UnicodeError) -> InvalidDataset:
    """Returns the error that names the first byte that is not of the encoding; reads the file again to find it."""
    name = "UTF-8" if encoding == DEFAULT_ENCODING else encoding
    alternative = "cp1252" if name == "UTF-8" else "utf-8"
    decoder, line, read = codecs.getincrementaldecoder(encoding)(), 1, 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            pending = len(decoder.getstate()[0])
            try:
                line += decoder.decode(piece).count("\n")
            except UnicodeDecodeError as cause:
                line += cause.object[: cause.start].count(b"\n")
                at = read - pending + cause.start
                return InvalidDataset(
                    f"{path}:{line}: byte {at} of the file (0x{cause.object[cause.start]:02x}) is not {name}; name the "
                    f"file's encoding, for example --encoding {alternative}"
                )
            read += len(piece)
    return InvalidDataset(f"{path}: the end of the file is not {name} ({error}); name it with --encoding")
