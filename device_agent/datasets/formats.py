"""Reads records from the owner's files: CSV, TSV, JSON Lines, JSON, plain text, mbox and Parquet.

Readers stream: they hold one record, of Parquet one batch of rows, and of JSON the whole file. A malformed file is an
error that names the file and line, because skipping the rest would silently train on part of the data. NaN and infinite
numbers are null.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TextIO

from device_agent.datasets.mail import read_mbox
from shared.errors import BadRequest, InvalidDataset
from shared.task import is_field_name
from shared.zo.encoding import JSON, read_object

Located = tuple[str, dict[str, Any]]  # "FILE:LINE" (of mbox, JSON and Parquet: the record's number), and the record
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
DEFAULT_ENCODING = "utf-8"
# By the first bytes of a file: its encoding. The mark of UTF-32 begins with the one of UTF-16.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# The formats of binary files by their first bytes: the name of the format, and the remedy.
_NO_TEXT = {
    b"PK\x03\x04": "a ZIP archive, such as an Excel workbook; save the sheet as CSV UTF-8, or unpack the archive",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook; save the sheet as CSV UTF-8",
    b"\x1f\x8b": "compressed with gzip; unpack it with gunzip",
    b"PAR1": "a Parquet file; read it with --format parquet",
}
_NULS = 0.01  # share of NULs from which a text is UTF-16 without a byte order mark; commas and line ends suffice
MAX_LINE = 1 << 24  # characters of one line or field that a reader holds
MAX_ARRAY = 1 << 26  # characters of a JSON file, which is held in memory with its records
_CHUNK = 1 << 16  # characters
_SNIFFED_ROWS = 20
_TABLE_ROWS = 5  # rows of equally many columns, after which a first row of one column is none of names
_PARQUET_ROWS = 1000  # of one batch
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[,;\t|]*\s*', re.IGNORECASE)  # Excel's first line that names the delimiter
# A field of TSV as CSV quotes it: pandas, R and Excel write TSV so. Without doubled marks they may be the text's own.
_QUOTED_FIELD = re.compile(r'(?:^|\t)"[^"\t\r\n]*(?:""[^"\t\r\n]*)+"(?=[\t\r\n]|$)', re.MULTILINE)


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

    def records(self, columns: Collection[str] = ()) -> Iterator[Located]:
        """Yields the records of the file.

        columns: those that are needed; the others may be without name or value. Empty: all. Raises InvalidDataset for a
        file that is not what its format says, and BadRequest for Parquet without pyarrow.
        """
        if self.format is Format.MBOX:
            for number, message in enumerate(read_mbox(self.path), 1):
                yield f"{self.path}: message {number}", message
            return
        if self.encoding is None:
            yield from _parquet(self.path, columns)
            return
        newline = "" if self.format in (Format.CSV, Format.TSV) else None
        try:
            with self.path.open(encoding=self.encoding, newline=newline) as text:
                yield from _TEXT_READERS[self.format](text, self, columns)
        except UnicodeError as error:
            raise _undecodable(self.path, self.encoding, error) from error


def open_source(
    path: Path, form: Format | None = None, delimiter: str | None = None, encoding: str | None = None
) -> Source:
    """Returns how a file is read; a CSV file's delimiter is found from its first rows unless given.

    Raises BadRequest for an unknown suffix without a format, an unknown encoding, or a path that is not a file.
    """
    if not path.is_file():
        raise BadRequest(f"{path} is not a file")
    file_format = form or _SUFFIXES.get(path.suffix.lower())
    with path.open("rb") as file:
        start = file.read(_CHUNK)
    if file_format is not Format.PARQUET:
        for signature, advice in _NO_TEXT.items():
            if start.startswith(signature):
                raise BadRequest(f"{path} is {advice}")
    if file_format is None:
        raise BadRequest(f"{path}: the suffix names no known format; name it with --format {'|'.join(Format)}")
    if file_format in (Format.MBOX, Format.PARQUET):
        return Source(path, file_format, None, None)
    encoding = _encoding(path, start, encoding)
    with path.open(encoding=encoding, newline="", errors="replace") as text:
        sample = text.read(_CHUNK)
    if sample.count("\0") > _NULS * len(sample):
        order = "be" if start[::2].count(0) > start[1::2].count(0) else "le"
        raise BadRequest(f"{path} is not {encoding}, probably UTF-16; read it with --encoding utf-16-{order}")
    if file_format is Format.CSV:
        return Source(path, file_format, _delimiter(delimiter) if delimiter else _sniff(path, sample), encoding)
    if file_format is Format.TSV and form is None and _QUOTED_FIELD.search(sample):
        return Source(path, Format.CSV, "\t", encoding)
    return Source(path, file_format, "\t" if file_format is Format.TSV else None, encoding)


def _encoding(path: Path, start: bytes, encoding: str | None) -> str:
    """Returns a text file's encoding: that of its byte order mark, or else the one that is named. Raises BadRequest."""
    marked = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
    try:
        if encoding is not None:
            "".encode(encoding)  # raises LookupError for codecs that are not for text, which `codecs.lookup` returns
            family = None if marked is None else marked.removesuffix("-sig")
            if family is not None and not codecs.lookup(encoding).name.startswith(family):
                raise BadRequest(
                    f"{path} has the byte order mark of {family.upper()}, not of {encoding}; leave out --encoding"
                )
    except (LookupError, UnicodeError) as error:
        raise BadRequest(f"--encoding {encoding!r} is unknown; try utf-8, cp1252, latin-1 or utf-16") from error
    return marked or encoding or DEFAULT_ENCODING


def _delimiter(option: str) -> str:
    delimiter = DELIMITERS.get(option, option)
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise BadRequest(f"--delimiter {option!r} must be one character, or one of {', '.join(DELIMITERS)}")
    return delimiter


def _sniff(path: Path, sample: str) -> str:
    """Returns the delimiter that cuts the most of the first rows into the columns of the first one.

    One that finds two columns or more in the first row has precedence: rows that do not fit it are errors. Raises
    BadRequest for a line above the names of the columns.
    """
    first_line = next(iter(sample.splitlines()), "")
    if separator := _SEPARATOR_LINE.fullmatch(first_line):
        return separator[1]
    is_complete = len(sample) < _CHUNK

    def widths(delimiter: str) -> list[int]:
        rows = [row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter) if any(row)]
        return [len(row) for row in (rows if is_complete else rows[:-1] or rows)[: _SNIFFED_ROWS + 1]] or [0]

    by_delimiter = {delimiter: widths(delimiter) for delimiter in DELIMITERS.values()}
    best = max(
        by_delimiter, key=lambda each: (by_delimiter[each][0] > 1, by_delimiter[each].count(by_delimiter[each][0]))
    )
    for delimiter, (first, *others) in by_delimiter.items():
        if by_delimiter[best][0] == first == 1 and len(others) >= _TABLE_ROWS and len({1, *others}) == 2:
            raise BadRequest(
                f"{path}:1: the first row has one column, and each of the next {len(others)} rows has {others[0]} with "
                f"the delimiter {delimiter!r}; remove what is above the columns' names (lines of text: --format txt)"
            )
    return best


def _table(text: TextIO, source: Source, columns: Collection[str]) -> Iterator[Located]:
    """Rows by the names of the first row. Quotation marks of CSV are those of RFC 4180; in TSV they are text."""
    path, delimiter = source.path, source.delimiter or ","
    quoting: Literal[0, 3] = csv.QUOTE_NONE if source.format is Format.TSV else csv.QUOTE_MINIMAL
    previous_limit = csv.field_size_limit(MAX_LINE)
    first_line, lines_before = text.readline(MAX_LINE), 0
    while first_line and (not first_line.strip(delimiter + "\r\n ") or _SEPARATOR_LINE.fullmatch(first_line)):
        first_line, lines_before = text.readline(MAX_LINE), lines_before + 1
    # A space after the delimiters of the header is after those of the rows, too, where it precedes quotation marks.
    spaced = f"{delimiter} " in first_line
    rows = csv.reader(
        chain([first_line], text), delimiter=delimiter, quoting=quoting, strict=True, skipinitialspace=spaced
    )
    try:
        header = [name.strip() for name in next(rows, [])]
        first_row = next((row for row in rows if any(row)), [])
        if len(first_row) == len(header) + 1 and first_row[0] == "1" and first_row[-1]:
            header = ["", *header]  # R's row names have no column name
        if len(header) == 1 and any(each in header[0] for each in DELIMITERS.values()):
            raise InvalidDataset(
                f"{path}:{lines_before + 1}: the first row is one column, {header[0]!r}; remove the quotation marks "
                "around it, or name the delimiter with --format csv --delimiter"
            )
        _check_header(path, header, columns)
        advice = f" (a text with the delimiter {delimiter!r} needs quotation marks), or name another with --delimiter"
        if source.format is Format.TSV:
            advice = ", or read a table with quotation marks or another delimiter with --format csv"
        for row in chain([first_row], rows):
            if not any(row):
                continue
            location = f"{path}:{lines_before + rows.line_num}"
            if len(row) > len(header) and not any(row[len(header) :]):  # delimiters at the end of the line
                row = row[: len(header)]
            if len(row) != len(header):
                raise InvalidDataset(
                    f"{location}: the row has {len(row)} columns and the first row {len(header)}; correct the row"
                    f"{advice}"
                )
            yield location, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise InvalidDataset(
            f"{path}:{lines_before + rows.line_num}: {error}; a quotation mark may be missing, or must be written twice"
        ) from error
    finally:
        csv.field_size_limit(previous_limit)


def _check_header(path: Path, header: Sequence[str], columns: Collection[str]) -> None:
    """Raises InvalidDataset for a needed column without a name, or with the name of another one."""
    for number, name in enumerate(header, 1):
        if _is_needed(name, columns) and (not name or header.count(name) > 1):
            others = _map_options(each for each in header if each and header.count(each) == 1)
            fault = f"has the name {name!r} of another one" if name else "has no name"
            raise InvalidDataset(
                f"{path}:1: column {number} {fault}, but the first row must name each column once; name it there, or "
                f"choose other columns with {others}"
            )


def _is_needed(column: str, columns: Collection[str]) -> bool:
    """Returns whether a column is one of `columns`, or has the object with one of them; empty: all are needed."""
    return not columns or any(each == column or (column and each.startswith(f"{column}.")) for each in columns)


def no_column(path: Path, column: str, columns: Collection[str]) -> str:
    """Returns the sentence for a file without a column that is needed. columns: those of the file."""
    return f"{path}: there is no column {column!r}; the columns are {', '.join(columns)}"


def _map_options(columns: Iterator[str]) -> str:
    """Returns the options that name these columns."""
    pairs = ((column if is_field_name(column) else re.sub(r"\W", "_", f"_{column}"), column) for column in columns)
    return " ".join(shlex.join(["--map", f"{field}={column}"]) for field, column in pairs) or "--map FIELD=COLUMN"


def _numbered_lines(text: TextIO, source: Source) -> Iterator[tuple[str, str]]:
    """Yields (location, line) of the lines that are not blank."""
    number = 0
    while line := text.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise InvalidDataset(f"{source.path}:{number}: the line has more than {MAX_LINE} characters")
        if line.strip():
            yield f"{source.path}:{number}", line


def _json_lines(text: TextIO, source: Source, _: Collection[str]) -> Iterator[Located]:
    for location, line in _numbered_lines(text, source):
        if line.lstrip().startswith("["):
            raise InvalidDataset(f"{location}: the line must be a JSON object; a JSON array needs --format json")
        yield location, read_object(line, location)


def _plain_text(text: TextIO, source: Source, _: Collection[str]) -> Iterator[Located]:
    """One record a line, with the only field `text`."""
    for location, line in _numbered_lines(text, source):
        yield location, {"text": line.strip()}


def _json_array(text: TextIO, source: Source, _: Collection[str]) -> Iterator[Located]:
    """The objects of one array, which is read whole."""
    content = text.read(MAX_ARRAY + 1)
    if len(content) > MAX_ARRAY:
        raise InvalidDataset(
            f"{source.path}: a JSON file has at most {MAX_ARRAY} characters; write it as JSON Lines, for example by "
            "`jq -c '.[]'`"
        )
    try:
        records = JSON.decode(content)
    except (ValueError, RecursionError) as error:
        raise InvalidDataset(
            f"{source.path}: the file is not JSON ({error}); JSON Lines need --format jsonl"
        ) from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InvalidDataset(f"{source.path}: the file must be a JSON array of objects")
    for number, record in enumerate(records, 1):
        yield f"{source.path}: record {number}", record


_TEXT_READERS: dict[Format, Callable[[TextIO, Source, Collection[str]], Iterator[Located]]] = {
    Format.CSV: _table,
    Format.TSV: _table,
    Format.JSONL: _json_lines,
    Format.JSON: _json_array,
    Format.TXT: _plain_text,
}


def _parquet(path: Path, columns: Collection[str]) -> Iterator[Located]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise BadRequest(f"{path}: Parquet files are read with pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if _is_needed(name, columns)]
            for column in columns:
                if not any(_is_needed(name, (column,)) for name in names):
                    raise InvalidDataset(no_column(path, column, file.schema_arrow.names))
            batches = file.iter_batches(batch_size=_PARQUET_ROWS, columns=names)
            for number, record in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
                location = f"{path}: row {number}"
                fields = {}
                for name, value in record.items():
                    try:
                        fields[name] = _as_json(value, is_text=bool(columns))
                    except ValueError:
                        others = (each.name for each in file.schema_arrow if "binary" not in str(each.type))
                        raise InvalidDataset(
                            f"{location}: column {name!r} has bytes; choose others with {_map_options(others)}"
                        ) from None
                yield location, fields
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise InvalidDataset(f"{path}: the file is not Parquet, or damaged ({error})") from error


def _as_json(value: Any, *, is_text: bool) -> Any:
    """Returns a value of a Parquet file as JSON has it. is_text: bytes are UTF-8. Raises ValueError for other bytes."""
    match value:
        case bytes() if is_text:
            return value.decode()
        case bytes():
            raise ValueError("bytes")
        case dict():
            return {str(name): _as_json(each, is_text=is_text) for name, each in value.items()}
        case list() | tuple():
            return [_as_json(each, is_text=is_text) for each in value]
        case float() if not math.isfinite(value):
            return None
        case None | str() | int() | float():
            return value
        case _:  # a date, a time, a decimal
            return str(value)


def _undecodable(path: Path, encoding: str, error: UnicodeError) -> InvalidDataset:
    """Returns the error that names the first byte that is not of the encoding; reads the file again to find it."""
    name = "UTF-8" if encoding.startswith(DEFAULT_ENCODING) else encoding
    alternative = "cp1252" if name == "UTF-8" else "utf-8"
    remedy = f"name the file's encoding, for example --encoding {alternative}"
    with path.open(encoding=encoding, errors="surrogateescape") as text, suppress(UnicodeError):
        for number, line in enumerate(text, 1):
            if byte := re.search("[\udc80-\udcff]", line):
                return InvalidDataset(f"{path}:{number}: byte 0x{ord(byte[0]) - 0xDC00:02x} is not {name}; {remedy}")
    return InvalidDataset(f"{path}: the file is not {name} ({error}); {remedy}")
