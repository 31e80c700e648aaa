"""Real files of each format, written by the standard library or by hand, read back as records."""

import csv
import json
import math
import sys
import tracemalloc
from datetime import date
from decimal import Decimal

import pyarrow
import pytest
from pyarrow.parquet import write_table

from device_agent.datasets import formats
from device_agent.datasets.formats import MAX_LINE, Format, open_source
from shared.errors import BadRequest, InvalidDataset

RECORDS = [
    {"text": 'It says "no"; twice,\nover two lines', "label": "a"},
    {"text": "  café | 雪\t", "label": "b"},
]


def read(path, form=None, delimiter=None, encoding=None, columns=()):
    return list(open_source(path, form, delimiter, encoding).records(columns))


def fields(path, **options):
    return [record for _, record in read(path, **options)]


def write_csv(path, delimiter, encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(RECORDS)
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_with_any_delimiter_is_read_as_it_was_written(tmp_path, delimiter):
    path = write_csv(tmp_path / "a.csv", delimiter, "utf-8-sig")  # as Excel writes it
    assert open_source(path, None, None, None).delimiter == delimiter
    assert fields(path) == fields(path, delimiter=delimiter) == RECORDS


def test_csv_of_one_column_and_rows_that_do_not_fit(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\nwarm\n\ndull\n")
    assert read(path) == [(f"{path}:2", {"text": "warm"}), (f"{path}:4", {"text": "dull"})]
    for text, words in (
        ("text,label\nwarm,1\ndull, flat,0\n", r"a\.csv:3: the row has 3 columns and the first row 2"),
        ('text,label\n"warm,1\n', "a quotation mark may be missing"),
        ("text,text\nwarm,1\n", "each column once"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidDataset, match=words):
            read(path, delimiter="comma")


@pytest.mark.parametrize(
    "text",
    [
        "text,label\nwarm,1\ndull,0\n",
        "text, label\nwarm, 1\ndull, 0\n",  # spaces after the delimiters
        'text, label\n"warm", "1"\n"dull", "0"\n',
        "sep=;\r\ntext;label\r\nwarm;1\r\ndull;0\r\n",  # as Excel writes it
        '"sep=\t"\ntext\tlabel\nwarm\t1\ndull\t0\n',
        "SEP=;\ntext;label\nwarm;1\ndull;0\n",
        ",text,label\n0,warm,1\n1,dull,0\n",  # the index of pandas
        '"text","label"\n"1","warm","1"\n"2","dull","0"\n',  # the row names of R
        "text,label,\nwarm,1,\ndull,0,\n",  # a delimiter at the end of each line
        "text,label\nwarm,1,\ndull,0,\n",
        "label,text\n1,warm,\n0,dull,\n",
        "text,label,,\nwarm,1,,\ndull,0,,\n,,,\n",
        "\n ,\n\ntext,label\n\nwarm,1\n,,\ndull,0\n\n",  # lines without a value
        "text;label\rwarm;1\rdull;0\r",  # line ends of an old Macintosh
        "id,note,note,text,label\n1,a,b,warm,1\n2,c,d,dull,0\n",  # a name twice
    ],
)
def test_tables_as_other_programs_write_them(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    rows = [(record["text"], record["label"]) for record in fields(path, columns=("text", "label"))]
    assert rows == [("warm", "1"), ("dull", "0")]


def test_columns_that_cannot_be_named_are_refused_with_a_remedy_that_works(tmp_path):
    path = tmp_path / "a.csv"
    for text, fault in (
        (",my text,label\n0,warm,1\n", "column 1 has no name"),
        ("my text,label,\nwarm,1,2\n", "column 3 has no name"),
        ("my text,x,x,label\nwarm,1,2,3\n", "column 2 has the name 'x' of another one"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidDataset, match=rf"a\.csv:1: {fault}.*--map '_my_text=my text' --map label=label$"):
            read(path)
        assert fields(path, columns=("my text", "label"))[0]["my text"] == "warm"


@pytest.mark.parametrize(
    ("rows", "delimiter", "where"),
    [
        (["text,label", "warm,1", "dull, flat,0", "grey,1"], ",", 3),
        (["text,label", *["dull; so, flat,0"] * 30], ",", 2),
        (["text;label", "warm, yes;1", "dull, so, flat;0"], ";", None),
        (["text,x;label", "warm;1", "dull, so, flat;0", "grey;1"], ";", None),
        (["text", "warm, dull", "a, b, c"], ";", None),
        (["said, by whom", "warm", "dull"], ",", 2),  # one column whose name has a comma
    ],
)
def test_the_delimiter_is_the_one_that_most_rows_agree_on(tmp_path, rows, delimiter, where):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(rows))
    assert open_source(path).delimiter == delimiter
    if where is None:
        assert len(read(path)) == len(rows) - 1
    else:
        with pytest.raises(InvalidDataset, match=rf"a\.csv:{where}: the row has"):
            read(path)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("text", ['"text,label"\n"warm,1"\n', '"text,label"\nwarm\n'])
def test_a_first_row_that_reads_as_one_column_with_a_delimiter_is_refused(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidDataset, match=rf"{name}:1: the first row is one column"):
        read(path)


def test_a_line_above_the_names_of_the_columns_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("# exported on Monday\ntext,label\n" + "warm,1\ndull,0\n" * 3)
    with pytest.raises(BadRequest, match=r"a\.csv:1: .* each of the next 7 rows has 2 .* remove what is above"):
        open_source(path)
    path.write_text("text\n" + "warm, yes\ndull, so, flat\n" * 9)  # prose
    assert len(read(path)) == 18


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.txt"])
def test_the_byte_order_mark_names_the_encoding(tmp_path, name, encoding):
    path = tmp_path / name
    record = {"text": "café 雪"}
    texts = {"a.csv": "text\ncafé 雪\n", "a.txt": "café 雪\n", "a.json": json.dumps([record])}
    path.write_text(texts.get(name, json.dumps(record)), encoding=encoding)
    assert fields(path) == fields(path, encoding=encoding.removesuffix("-sig")) == [record]
    with pytest.raises(BadRequest, match=r"byte order mark of UTF-.*, not of cp1252; leave out --encoding"):
        read(path, encoding="cp1252")


@pytest.mark.parametrize("text", ["warm", "тепло сегодня", "今天天气很好我们去公园散步吧" * 3])
@pytest.mark.parametrize("order", ["le", "be"])
def test_utf_16_without_a_mark_is_recognized(tmp_path, order, text):
    path = tmp_path / "a.csv"
    header = "text,label" if text == "warm" else "текст,оценка"
    path.write_text(f"{header}\n{text},1\n", encoding=f"utf-16-{order}")
    for encoding in (None, "cp1252"):
        with pytest.raises(BadRequest, match=f"probably UTF-16; read it with --encoding utf-16-{order}"):
            read(path, encoding=encoding)
    assert fields(path, encoding=f"utf-16-{order}") == [dict(zip(header.split(","), [text, "1"], strict=True))]


@pytest.mark.parametrize(
    ("name", "start", "words"),
    [
        ("a.csv", b"PK\x03\x04", "Excel workbook; save the sheet as CSV"),
        ("a.xlsx", b"PK\x03\x04", "Excel workbook; save the sheet as CSV"),
        ("a.csv", b"\xd0\xcf\x11\xe0", "old Excel workbook"),
        ("a.csv.gz", b"\x1f\x8b", "gunzip"),
        ("a.jsonl", b"PAR1", "--format parquet"),
    ],
)
def test_files_that_are_no_text_are_named(tmp_path, name, start, words):
    (tmp_path / name).write_bytes(start + b"\0\xff" * 20)
    with pytest.raises(BadRequest, match=words):
        open_source(tmp_path / name)


def test_tsv_has_no_quotation_marks(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('sentence\tlabel\n"warm\t1\n')
    assert read(path) == [(f"{path}:2", {"sentence": '"warm', "label": "1"})]


def test_tsv_that_another_program_quoted_like_csv(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('text\tlabel\n"It says ""no"""\ta\n')
    assert fields(path) == [{"text": 'It says "no"', "label": "a"}]
    assert fields(path, form=Format.TSV) == [{"text": '"It says ""no"""', "label": "a"}]
    path.write_text('text\tlabel\n"two\nlines"\ta\n')
    with pytest.raises(InvalidDataset, match=r"a table with quotation marks .* with --format csv"):
        read(path)
    assert fields(path, form=Format.CSV) == [{"text": "two\nlines", "label": "a"}]


def test_json_lines(tmp_path):
    path = tmp_path / "a.ndjson"
    path.write_text("\n\n".join(json.dumps(record) for record in RECORDS))
    assert read(path) == [(f"{path}:1", RECORDS[0]), (f"{path}:3", RECORDS[1])]
    lines = [('{"a": 1', "is not JSON"), ("1", "must be a JSON object"), ("[1]", "needs --format json")]
    for line, words in (*lines, ('{"a":' * 100_000, "is not JSON")):
        path.write_text(f"{{}}\n{line}\n")
        with pytest.raises(InvalidDataset, match=f"ndjson:2.*{words}"):
            read(path)


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", "%s\n%s"), ("a.json", "[%s, %s]")])
def test_numbers_that_json_does_not_have_are_null(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text % ('{"text": "a", "stars": NaN}', '{"text": "b", "deep": [Infinity, {"x": -Infinity}]}'))
    assert fields(path) == [{"text": "a", "stars": None}, {"text": "b", "deep": [None, {"x": None}]}]


def test_a_json_array(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    records = [{"text": "é{[" * number, "deep": {"list": [number, None]}} for number in range(3)]
    path.write_text(json.dumps(records, indent=4))
    assert read(path) == [(f"{path}: record {number}", record) for number, record in enumerate(records, 1)]
    path.write_text("[]")
    assert read(path) == []
    monkeypatch.setattr(formats, "MAX_ARRAY", 1)
    with pytest.raises(InvalidDataset, match=r"at most 1 characters; write it as JSON Lines"):
        read(path)


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '[{"a": 1}, 2]', '[{"a": 1},]', '[{"a": 1} {"a": 2}]', '[{"a": 1}', "", '[{"a']
)
def test_json_that_is_no_array_of_objects(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InvalidDataset, match=r"a\.json"):
        read(path)


def test_plain_text_is_a_record_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"warm\r\n\r\n dull film \r\nlast")
    assert read(path) == [
        (f"{path}:{line}", {"text": text}) for line, text in ((1, "warm"), (3, "dull film"), (4, "last"))
    ]


def test_parquet(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(BadRequest, match="pip install pyarrow"):
            read(path)
    write_table(pyarrow.Table.from_pylist(RECORDS), path)
    assert read(path) == [(f"{path}: row {number}", record) for number, record in enumerate(RECORDS, 1)]
    day = date(2026, 1, 5)
    odd = {"text": "é", "x": math.nan, "deep": {"days": [day], "x": [math.inf, 1.5]}, "price": Decimal("1.50")}
    write_table(pyarrow.Table.from_pylist([odd]), path)
    deep = {"days": ["2026-01-05"], "x": [None, 1.5]}
    assert fields(path) == [{"text": "é", "x": None, "deep": deep, "price": "1.50"}]


def test_bytes_in_a_column_of_parquet_that_nobody_needs(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"text": b"caf\xc3\xa9", "label": 1, "image": {"bytes": b"\xff\xd8"}}]  # text as Impala writes it
    write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(InvalidDataset, match=r"row 1: column 'text' has bytes; choose others with --map label=label$"):
        read(path)
    assert fields(path, columns=("text", "label")) == [{"text": "café", "label": 1}]
    with pytest.raises(InvalidDataset, match="column 'image' has bytes"):
        read(path, columns=("image",))
    with pytest.raises(InvalidDataset, match="no column 'body'; the columns are text, label, image"):
        read(path, columns=("body",))


def test_text_that_is_not_utf_8_names_line_byte_and_remedy(tmp_path):
    path = write_csv(tmp_path / "a.csv", ",")
    text = "text,label\n" + "warm,1\n" * 20_000 + "café,0\n"
    path.write_text(text, encoding="cp1252")
    with pytest.raises(InvalidDataset, match=r"a\.csv:20002: byte 0xe9 is not UTF-8; .* --encoding cp1252"):
        read(path)
    assert read(path, encoding="cp1252")[-1][1] == {"text": "café", "label": "0"}
    path.write_bytes("text\ncafé".encode()[:-1])
    with pytest.raises(InvalidDataset, match=r"a\.csv:2: byte 0xc3 is not UTF-8"):
        read(path)
    with pytest.raises(InvalidDataset, match=r"a\.csv:1: byte 0xc3 is not utf-16-le; .* --encoding utf-8"):
        read(path, encoding="utf-16-le")
    with pytest.raises(BadRequest, match="--encoding 'klingon' is unknown"):
        read(path, encoding="klingon")


def test_files_that_cannot_be_opened_as_a_source(tmp_path):
    with pytest.raises(BadRequest, match="is not a file"):
        open_source(tmp_path / "none.csv", None, None, None)
    (tmp_path / "data.bin").write_text("a")
    with pytest.raises(BadRequest, match="name it with --format"):
        open_source(tmp_path / "data.bin", None, None, None)
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(BadRequest, match="one character"):
        open_source(tmp_path / "a.csv", None, "::", None)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_a_reader_holds_one_record(tmp_path, name):
    path, count = tmp_path / name, 20_000
    record = '{"text": "%s"}' % ("warm " * 20)
    lines, records = ("warm " * 20 + "\n") * count, [record] * count
    texts = {"a.csv": f"text\n{lines}", "a.txt": lines, "a.jsonl": "\n".join(records)}
    path.write_text(texts[name])
    source = open_source(path, None, None, None)
    tracemalloc.start()
    try:
        assert sum(1 for _ in source.records()) == count
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 2
    finally:
        tracemalloc.stop()


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * (MAX_LINE + 10))
    with pytest.raises(InvalidDataset, match="the line has more than"):
        read(path)
