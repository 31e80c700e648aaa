"""The benchmarks for real, as far as seconds go: two of the cheapest through `bench report`, and their pages."""

import json
import re
import warnings

import pytest
import typer
from typer.testing import CliRunner

from bench import report
from bench.figures import ROOT, results_in
from bench.result import cell_text
from bench.sections import Section
from tests.bench.pages import Page, markdown_tables

QUICK = 20 * 60  # seconds
# Of each what takes seconds; the limit is no measure, only an end.
CHEAP = {
    "registry": report.Budget(800, 800, ("--only", "replay")),
    "federation": report.Budget(800, 800, ("--only", "bytes", "--only", "aggregate")),
}

pytestmark = pytest.mark.timeout(2000)


@pytest.fixture(scope="module")
def app():
    with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
        warnings.simplefilter("ignore")
        from bench.__main__ import app

        return app


@pytest.fixture(scope="module")
def directory(app, tmp_path_factory):
    """What `bench report --quick` left of the cheap ones."""
    found = tmp_path_factory.mktemp("results")
    only = [word for name in CHEAP for word in ("--only", name)]
    with pytest.MonkeyPatch.context() as patch:
        for name, budget in CHEAP.items():
            patch.setitem(report.BUDGETS, name, budget)
        done = CliRunner().invoke(app, ["report", "--quick", *only, "--keep", str(found)])
    assert done.exit_code == 0, report.read_runs(found, "quick")
    return found


def test_benchmarks_ran_and_measured(directory):
    claims = {name: result.claims for name, result in results_in(directory).items()}
    assert set(claims) == set(CHEAP)
    assert claims["registry"]["replay_seconds"] > 0
    # 4 bytes a parameter against 4 q = 16 bytes a step, and what frames them.
    assert claims["federation"]["weights_vs_trajectory_bytes"] > 100


def test_every_figure_is_on_both_pages(directory):
    expected = [
        [list(table.columns), *([cell_text(cell) for cell in row] for row in table.rows)]
        for name in ("registry", "federation")  # the pages' order
        for table in Section(name, results_in(directory)[name]).tables
    ]
    assert sum(map(len, expected)) > 10
    assert Page((directory / "report.html").read_text()).tables == expected
    assert markdown_tables((directory / "report.md").read_text()) == expected
    for name in CHEAP:
        written = json.loads((directory / f"{name}.json").read_text())
        flat = [cell for table in expected for row in table for cell in row]
        assert {cell_text(value) for value in written["claims"].values()} <= set(flat)


def test_links_lead_somewhere(directory):
    page = Page((directory / "report.html").read_text())
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (directory / link).is_file()


def test_every_benchmark_has_the_options_that_a_report_passes(app):
    commands = report.benchmarks(typer.main.get_command(app).commands)
    assert {"step", "precision", "agent", "server", "registry", "federation"} <= set(commands)
    for name, command in commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, name
        words = report.arguments(command, "quick", None, report.BUDGETS.get(name, report.OTHER), None)
        assert {word for word in words if word.startswith("--")} <= options, name


def test_the_page_on_benchmarks_has_every_command(app):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in typer.main.get_command(app).commands:
        assert f"\n| `{name}` |" in page
    for link in re.findall(r"\]\(([^)#:]+)", page):
        assert (ROOT / "docs" / link).exists(), link


def test_all_quick_runs_fit_into_twenty_minutes(app):
    names = {*report.benchmarks(typer.main.get_command(app).commands), *report.BUDGETS}
    assert sum(report.BUDGETS.get(name, report.OTHER).quick for name in names) <= QUICK
