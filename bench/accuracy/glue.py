"""The paper's public data sets, read from their authors' files into records of our templates.

GLUE's .tsv (SST-2, RTE, MRPC, QQP, QNLI, WNLI), SuperGLUE's .jsonl (BoolQ, WSC, WiC, MultiRC, COPA, RTE), WinoGrande's
and ARC's .jsonl. GLUE and SuperGLUE do not publish test labels, so MeZO tests on their validation file;
the paper has MeZO's sizes and presumably does the same. So do we.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import InvalidDataset
from shared.zo.encoding import read_jsonl

Record = dict[str, Any]
Located = tuple[str, Record]  # "file:line" for errors, and the record
MOST_BROKEN = 0.01  # share of rows; QQP's own file has a few


@dataclass(frozen=True)
class Format:
    """The files of a task and how to read them. columns: of a .tsv, by the template's field."""

    task: str  # the template, of shared.task_templates
    folders: tuple[str, ...]  # in the authors' archives
    train: tuple[str, ...]  # file names; the first that exists is read
    test: tuple[str, ...]  # the same, with labels
    columns: Mapping[str, str] | None = None
    read: Callable[[Record, str], Iterator[Record]] | None = None  # of a .jsonl line: none, one or more records


@dataclass(frozen=True)
class Files:
    """One task's records. left_out: damaged .tsv rows, and questions that do not fit the template."""

    task: str
    train: list[Located]
    test: list[Located]
    left_out: int


def read_task(name: str, directory: Path) -> Files:
    """Reads one of FORMATS from `directory`, which contains the files or their folder.

    Raises InvalidDataset for an unknown name, absent files, absent columns or fields, or too many damaged rows.
    """
    if name not in FORMATS:
        raise InvalidDataset(f"no public data set is named {name!r}; known are {', '.join(FORMATS)}")
    form = FORMATS[name]
    train, left_out = _read(form, _find(name, form.folders, form.train, directory))
    test, more = _read(form, _find(name, form.folders, form.test, directory))
    return Files(form.task, train, test, left_out + more)


def _find(name: str, folders: tuple[str, ...], files: tuple[str, ...], directory: Path) -> Path:
    tried = [place / file for place in (directory, *(directory / folder for folder in folders)) for file in files]
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise InvalidDataset(
            f"{directory} has no data of {name!r}: looked for {', '.join(files)} there and in {', '.join(folders)}"
        )
    return found


def _read(form: Format, path: Path) -> tuple[list[Located], int]:
    if path.suffix == ".tsv":
        assert form.columns is not None
        return read_tsv(path, form.columns)
    assert form.read is not None
    found, left_out = [], 0
    for where, line in read_jsonl(path):
        try:
            records = list(form.read(line, where))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidDataset(f"{where}: not in the data set's format ({error!r})") from error
        found += [(where, record) for record in records]
        left_out += not records
    return found, left_out


def read_tsv(path: Path, columns: Mapping[str, str]) -> tuple[list[Located], int]:
    """Reads a .tsv with a header. Returns its records, and how many rows had another number of cells than the header.

    columns: the header's name of each field. Quotation marks have no meaning in these files.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")  # MRPC's begin with a BOM
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDataset(f"{path}: cannot be read ({error})") from error
    header = lines[0].rstrip("\r").split("\t")
    if absent := [name for name in columns.values() if name not in header]:
        raise InvalidDataset(f"{path}: has no column {absent[0]!r}; its columns are {', '.join(header)}")
    places = {field: header.index(name) for field, name in columns.items()}
    found, broken = [], 0
    for number, line in enumerate(lines[1:], 2):
        cells = line.rstrip("\r").split("\t")
        if len(cells) == len(header):
            found.append((f"{path}:{number}", {field: cells[place] for field, place in places.items()}))
        else:
            broken += 1
    if broken > MOST_BROKEN * (len(lines) - 1):
        raise InvalidDataset(f"{path}: {broken} of {len(lines) - 1} rows do not have the header's {len(header)} cells")
    return found, broken


def _fields(*names: str) -> Callable[[Record, str], Iterator[Record]]:
    """Returns a reader of lines that have the template's field names."""

    def read(line: Record, _where: str) -> Iterator[Record]:
        yield {name: line[name] for name in names}

    return read


def _wsc(line: Record, _where: str) -> Iterator[Record]:
    target = line["target"]
    yield {"text": line["text"], "label": line["label"]} | {name: target[name] for name in ("span1_text", "span2_text")}


def _multirc(line: Record, _where: str) -> Iterator[Record]:
    """A line has a paragraph, its questions and all their answers; each answer is a record."""
    passage = line["passage"]
    for question in passage["questions"]:
        for answer in question["answers"]:
            yield {
                "paragraph": passage["text"],
                "question": question["question"],
                "answer": answer["text"],
                "label": answer["label"],
            }


def _winogrande(line: Record, where: str) -> Iterator[Record]:
    """Cuts the sentence at its blank; the template adds the spaces."""
    context, blank, rest = line["sentence"].partition("_")
    if not blank or not rest.strip():
        raise InvalidDataset(f"{where}: the sentence must have a blank, _, and something after it")
    fields = {name: line[name] for name in ("option1", "option2", "answer")}
    yield {"context": context.rstrip(), "object": rest.lstrip()} | fields


def _arc(line: Record, _where: str) -> Iterator[Record]:
    """Skips the few questions that do not have the template's four options."""
    choices = line["question"]["choices"]
    labels = [choice["label"] for choice in choices]
    if len(choices) == 4:
        options = {f"op{number}": choice["text"] for number, choice in enumerate(choices, 1)}
        yield {"question": line["question"]["stem"], "label": str(labels.index(line["answerKey"]) + 1)} | options


_TSV: dict[str, Any] = {"train": ("train.tsv",), "test": ("dev.tsv",)}
_SUPERGLUE: dict[str, Any] = {"train": ("train.jsonl",), "test": ("val.jsonl",)}
_LABEL = {"label": "label"}
_PAIR = {"sentence1": "sentence1", "sentence2": "sentence2"} | _LABEL


def _arc_format(kind: str) -> Format:
    return Format("arc", (f"ARC-{kind}",), (f"ARC-{kind}-Train.jsonl",), (f"ARC-{kind}-Test.jsonl",), read=_arc)


FORMATS: dict[str, Format] = {
    "sst2": Format("sst2", ("SST-2",), **_TSV, columns={"text": "sentence"} | _LABEL),
    "rte": Format(
        "rte",
        ("RTE",),
        ("train.tsv", "train.jsonl"),
        ("dev.tsv", "val.jsonl"),
        columns={"premise": "sentence1", "hypothesis": "sentence2"} | _LABEL,
        read=_fields("premise", "hypothesis", "label"),
    ),
    "mrpc": Format(
        "mrpc",
        ("MRPC",),
        **_TSV,
        columns={"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
    ),
    "qqp": Format(
        "qqp",
        ("QQP",),
        **_TSV,
        columns={"question1": "question1", "question2": "question2", "label": "is_duplicate"},
    ),
    "qnli": Format("qnli", ("QNLI",), **_TSV, columns={"question": "question", "sentence": "sentence"} | _LABEL),
    "wnli": Format("wnli", ("WNLI",), **_TSV, columns=_PAIR),
    "boolq": Format("boolq", ("BoolQ",), **_SUPERGLUE, read=_fields("passage", "question", "label")),
    "wsc": Format("wsc", ("WSC",), **_SUPERGLUE, read=_wsc),
    "wic": Format("wic", ("WiC",), **_SUPERGLUE, read=_fields("word", "sentence1", "sentence2", "label")),
    "multirc": Format("multirc", ("MultiRC",), **_SUPERGLUE, read=_multirc),
    "copa": Format("copa", ("COPA",), **_SUPERGLUE, read=_fields("premise", "choice1", "choice2", "question", "label")),
    "winogrande": Format(
        "winogrande",
        ("winogrande_1.1", "winogrande"),
        tuple(f"train_{size}.jsonl" for size in ("xl", "l", "m", "s", "xs")),
        ("dev.jsonl",),
        read=_winogrande,
    ),
    "arc-easy": _arc_format("Easy"),
    "arc-challenge": _arc_format("Challenge"),
}
