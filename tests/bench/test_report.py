"""`bench report`: pages from result files alone, and runs that fail without stopping the others."""

import contextlib
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from bench import report as home
from bench.figures import RESULTS, results_in
from bench.result import Plot, Result, Table
from bench.sections import Run, Runs
from tests.bench.pages import Page, markdown_tables

MACHINE = {"cpu": "An <odd> & | CPU", "cores": 2, "memory_bytes": 8 << 30, "system": "Linux", "python": "3.11.7"}
TABLE = Table(
    name="main one",
    title="Time & <memory>",
    columns=("what | where", "seconds", "bytes"),
    rows=(("MeZO (Full) | *sequential*", 0.12345, 1234567), ("<b>MobiZO</b>\nq=4", 12345.6, None)),
    notes="Not <measured> | much",
)
LINES = Plot(name="a/b", title="A", x="q", y="s", series={"one": ((1, 2.0), (4, 1.5))}, log_x=True, log_y=True)
BARS = Plot(
    name="bars",
    title="B",
    x="task",
    y="%",
    series={"ours": ((0, 70.0), (1, 75.5)), "theirs": ((0, 69.0), (1, 71.0))},
    kind="bars",
    groups=("movies", "products"),
)


def write(directory: Path, name: str, **parts):
    result = Result(**({"machine": MACHINE, "commit": "abc1234", "rows": [], "claims": {}} | parts))
    (directory / f"{name}.json").write_text(json.dumps(result.model_dump(mode="json", exclude_defaults=True)))


@pytest.fixture
def made(tmp_path):
    """Pages of one result with tables and plots, an old one with rows and claims only, and a run that failed."""
    write(tmp_path, "step", tables=[TABLE], plots=[LINES, BARS], claims={"speedup": 1.375})
    write(
        tmp_path,
        "agent",
        rows=[{"part": "a", "n": 1}, {"part": "a", "n": 2}, {"part": "b", "list": [1, 2]}],
        claims={"kills": 200},
    )
    failed = Run(seconds=3.0, core_seconds=1.0, limit_seconds=60, failure="Exit status 1.\n<boom> it_went")
    (tmp_path / "report.json").write_text(Runs(kind="quick", runs={"server": failed}).model_dump_json())
    home.write_pages(tmp_path)
    return tmp_path


EXPECTED = [  # in the order of the budgets: step, agent, then the failed server without tables
    [
        ["what | where", "seconds", "bytes"],
        ["MeZO (Full) | *sequential*", "0.123", "1,234,567"],
        ["<b>MobiZO</b>\nq=4", "12,346", "\N{EN DASH}"],
    ],
    [["claim", "value"], ["speedup", "1.38"]],
    [["part", "n"], ["a", "1"], ["a", "2"]],
    [["part", "list"], ["b", "[1, 2]"]],
    [["claim", "value"], ["kills", "200"]],
]


def test_both_pages_hold_every_figure(made):
    page = Page((made / "report.html").read_text())
    assert page.tables == EXPECTED
    flat = [[[cell.replace("\n", " ") for cell in row] for row in table] for table in EXPECTED]
    assert markdown_tables((made / "report.md").read_text()) == flat


def test_the_html_stands_alone_and_its_contents_lead_everywhere(made):
    text = (made / "report.html").read_text()
    page = Page(text)
    inner = [link[1:] for link in page.links if link.startswith("#")]
    assert set(inner) == set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not any(" " in name for name in page.ids)
    assert [link for link in page.links if not link.startswith("#")] == ["step.json", "agent.json"]
    assert {"script", "link", "iframe"} & page.tags == set()
    assert all(address.startswith("data:image/png;base64,") for address in page.loaded)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_plots_say_in_words_what_they_show(made):
    page = Page((made / "report.html").read_text())
    assert page.alts == [
        "A. s over q. one: 2 at 1, 1.5 at 4.",
        "B. % over task. ours: 70 at movies, 75.5 at products. theirs: 69 at movies, 71 at products.",
    ]
    pictures = sorted((made / "plots").iterdir())
    assert [path.name for path in pictures] == ["step-a-b.png", "step-bars.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert all(f"(plots/{path.name})" in (made / "report.md").read_text() for path in pictures)


def test_pages_say_what_failed_and_on_what_the_rest_was_measured(made):
    page = Page((made / "report.html").read_text())
    markdown = (made / "report.md").read_text()
    for text in (page.text, markdown.replace("\\", "")):
        assert "It failed. Exit status 1." in text.replace("*", "")
        assert "<boom> it_went" in text
        assert "Commit abc1234, 2 cores of An <odd> & | CPU, 8.0 GiB, Linux, Python 3.11.7." in text
        assert "A quick run" in text


def test_a_plot_that_is_gone_leaves_no_file(made):
    write(made, "step", claims={"speedup": 2})
    home.write_pages(made)
    assert not (made / "plots").exists()


def test_committed_pages_are_those_of_the_committed_results(tmp_path):
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    home.write_pages(tmp_path)
    said = "`python -m bench report --from bench/results` makes them anew"
    assert (tmp_path / "report.md").read_text() == (RESULTS / "report.md").read_text(), said
    # Pictures may differ by a font: the rest may not.
    right, found = (Page((place / "report.html").read_text()) for place in (tmp_path, RESULTS))
    assert (right.tables, right.text, right.alts) == (found.tables, found.text, found.alts), said


def python(code):
    return [sys.executable, "-c", code]


def test_a_run_keeps_its_result(tmp_path):
    code = "import sys, pathlib; assert sys.argv[1] == '--json'; pathlib.Path(sys.argv[2]).write_text('{}')"
    found = home.run("x", python(code), 60, tmp_path)
    assert found.failure == ""
    assert (tmp_path / "x.json").read_text() == "{}"
    assert found.seconds > 0
    assert found.limit_seconds == 60


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; print('why it went wrong', file=sys.stderr); sys.exit(3)", "Exit status 3.\nwhy it went wrong"),
        ("pass", "It wrote no result."),
    ],
)
def test_a_run_that_fails_says_why_and_leaves_the_last_result(tmp_path, code, words):
    (tmp_path / "x.json").write_text("old")
    assert home.run("x", python(code), 60, tmp_path).failure == words
    assert (tmp_path / "x.json").read_text() == "old"


def test_a_run_over_its_limit_is_stopped_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(home, "GRACE_SECONDS", 0.1)
    note = tmp_path / "child"
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    found = home.run("x", python(code), 15, tmp_path)
    assert found.failure.startswith("It was stopped after its 15 seconds.")
    child = int(note.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        for _ in range(100):
            if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the child lives")


@pytest.fixture
def bench(monkeypatch):
    """A program with two benchmarks, one of them broken, and the report; and the words that each was run with."""
    app = typer.Typer()

    @app.command()
    def good(quick: bool = False, device: str = "cpu", json: str = ""): ...

    @app.command()
    def broken(full: bool = False): ...

    app.command()(home.report)
    heard = []

    def run(name, command, limit, directory):
        heard.append((name, command[4:], limit))
        if name == "good":
            write(directory, "good", claims={"speed": 3})
        return Run(seconds=1, core_seconds=1, limit_seconds=limit, failure="" if name == "good" else "Exit status 1.")

    monkeypatch.setattr(home, "run", run)
    return app, heard


def test_the_others_go_on_when_one_fails(bench, tmp_path):
    app, heard = bench
    done = CliRunner().invoke(app, ["report", "--quick", "--device", "cuda", "--keep", str(tmp_path)])
    assert done.exit_code == 1
    assert heard == [
        ("good", ["--quick", "--device", "cuda"], home.OTHER.quick),
        ("broken", [], home.OTHER.quick),
    ]
    page = Page((tmp_path / "report.html").read_text())
    assert "Exit status 1." in page.text
    assert page.tables == [[["claim", "value"], ["speed", "3"]]]


def test_what_is_kept_is_not_measured_again(bench, tmp_path):
    app, heard = bench
    for words in (["--quick"], ["--quick"], ["--full"]):
        CliRunner().invoke(app, ["report", *words, "--keep", str(tmp_path)])
    assert [(name, words) for name, words, _ in heard] == [
        ("good", ["--quick"]),
        ("broken", []),
        ("broken", []),  # it failed: again
        ("good", []),
        ("broken", ["--full"]),
    ]


def test_unknown_benchmarks_are_refused(bench, tmp_path):
    app, heard = bench
    done = CliRunner().invoke(app, ["report", "--only", "nothing", "--keep", str(tmp_path)])
    assert done.exit_code == 2
    assert heard == []


def test_every_result_file_can_be_read():
    assert {"step", "precision", "agent", "server", "registry", "federation"} <= set(results_in(RESULTS))
