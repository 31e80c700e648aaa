"""The figures in README and docs equal the results in bench/results."""

import re

import pytest

from bench.figures import (
    MARKER,
    MISSING,
    OPENING,
    RESULTS,
    ROOT,
    UnknownFigure,
    documents,
    quoted_rows,
    update_figures,
)
from bench.result import Result, results_in

RESULT = Result(
    machine={},
    commit="c",
    rows=[
        {"database": "sqlite", "what": "job", "ms": 124.89, "note": "text"},
        {"database": "postgresql", "what": "job", "ms": 199.5},
        {"what": "step", "seconds": [9.0, 2.0, 4.0]},
    ],
    claims={"share": 0.9870, "size": 1474912.0, "worse": -0.25},
)


@pytest.fixture(scope="module")
def results():
    return results_in(RESULTS)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_quote_the_results(path, results):
    text = path.read_text()
    errors = [
        f"{marker[0]} should read {expected}"
        for marker in MARKER.finditer(text)
        if (expected := update_figures(marker[0], results).rsplit("-->", 1)[1]) != marker["shown"]
    ]
    assert not errors, "`python -m bench figures` writes them anew:\n" + "\n".join(errors)


def test_results_keep_only_rows_that_documents_quote(results):
    texts = [path.read_text() for path in documents()]
    assert {name: result.rows for name, result in results.items()} == {
        name: quoted_rows(name, result, texts) for name, result in results.items()
    }


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_every_marker_can_be_read(path):
    text = path.read_text()
    assert len(MARKER.findall(text)) == text.count(OPENING)
    # Markdown would take a line that begins with a comment for a block of its own.
    assert not re.findall(rf"^{OPENING}.*", text, re.MULTILINE)


def test_every_row_of_a_result_is_marked():
    lines = [*(ROOT / "docs" / "figures.md").read_text().splitlines(), ""]
    tables = [number for number, line in enumerate(lines) if re.search(r"`bench/results/[a-z-]+\.json`", line)]
    unmarked = []
    for start in tables:
        begin = next(number for number in range(start, len(lines)) if lines[number].startswith("|---")) + 1
        end = next(number for number in range(begin, len(lines)) if not lines[number].startswith("|"))
        assert end > begin
        unmarked += [line for line in lines[begin:end] if OPENING not in line]
    assert len(tables) >= 5
    assert unmarked == []


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs" / "figures.md"], ids=lambda path: path.name)
def test_only_measured_figures_are_quoted(path):
    assert MISSING not in [marker["shown"] for marker in MARKER.finditer(path.read_text())]


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ("<!-- bench: x.share .0f x100 -->", "99"),
        ("<!-- bench: x.size ,.0f -->", "1,474,912"),
        ("<!-- bench: x.size .1f x1e-6 -->", "1.5"),
        ("<!-- bench: x.worse .2f -->", "-0.25"),
        ("<!-- bench: x[database=sqlite,what=job].ms .0f -->", "125"),
        ("<!-- bench: x[what=step].seconds .1f -->", "4.0"),
        ("<!-- bench: x.unknown .0f -->", MISSING),
        ("<!-- bench: x[database=none].ms .0f -->", MISSING),
        ("<!-- bench: x[database=sqlite].hours .0f -->", MISSING),
        ("<!-- bench: end-to-end.share .0f -->", MISSING),
    ],
)
@pytest.mark.parametrize("stale", ["7", "1,234", "-0.5", MISSING])
def test_a_figure_is_written_anew_and_nothing_else(marker, expected, stale):
    assert update_figures(f"| 5 | {marker}{stale}, 6 s |", {"x": RESULT}) == f"| 5 | {marker}{expected}, 6 s |"


@pytest.mark.parametrize("condition", ["what=job].ms", "database=sqlite].note"])
def test_a_row_must_be_one_and_hold_a_number(condition):
    with pytest.raises(UnknownFigure):
        update_figures(f"<!-- bench: x[{condition} .0f -->1", {"x": RESULT})
