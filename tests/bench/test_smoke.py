"""Benchmarks run for real where that takes seconds; every command is documented and writes a result."""

import json
import re
import warnings

import pytest
import typer
from typer.testing import CliRunner

from bench.figures import RESULTS, ROOT
from bench.result import results_in

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def app():
    with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
        warnings.simplefilter("ignore")
        from bench.__main__ import app

        return app


@pytest.fixture(scope="module")
def run(app, tmp_path_factory):
    """Runs the quick form of a command; returns its output and its result."""

    def run(name, *arguments):
        path = tmp_path_factory.mktemp(name) / "result.json"
        result = CliRunner().invoke(app, [name, "--quick", *arguments, "--json", str(path)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output, json.loads(path.read_text())

    return run


def test_aggregating_uploads(run):
    output, result = run("federation", "--only", "bytes", "--only", "aggregate")
    assert {row["part"] for row in result["rows"]} == {"bytes"}
    for name, value in result["claims"].items():
        assert f"{name}: {value:.4g}\n" in output
    # 4 bytes a parameter against 4 q = 16 bytes a step, and their framing.
    assert result["claims"]["weights_vs_trajectory_bytes"] > 100
    assert result["claims"]["aggregate_rss_bytes"] > 1 << 20


@pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")  # of lowering, in this process
def test_a_base_is_compiled_and_trained(run):
    _, result = run("scale", "--only", "tiny")
    (row,) = result["rows"]
    assert (row["precision"], row["estimator"]) == ("fp32", "replay")
    assert row["compile_peak_bytes"] > row["ptd_bytes"] > 0
    assert min(row[name] for name in ("load_seconds", "second_load_seconds", "step_seconds", "peak_rss_bytes")) > 0
    assert result["claims"]["step_seconds_1b_over_floor"] > 0


@pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg", "ignore:::torchao")
def test_a_family_steps_and_decodes_as_transformers_does(run):
    _, result = run("scale", "--only", "families")
    (row,) = result["rows"]
    assert row["family"] == "llama"
    assert min(row[name] for name in ("step_seconds", "step_over_llama", "decode_seconds")) > 0
    assert result["claims"]["families_run"] == 1
    assert result["claims"]["families_worst_loss_error"] < 0.05


def test_every_benchmark_writes_json_and_is_on_the_page(app):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name, command in typer.main.get_command(app).commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options or name == "figures"
        assert f"\n| `{name}` |" in page
    for link in re.findall(r"\]\(([^)#:]+)", page):
        assert (ROOT / "docs" / link).exists(), link


def test_every_committed_result_can_be_read(app):
    """A result is named after its command; `COMMAND-PART` is a part that was measured later than the rest."""
    commands = set(typer.main.get_command(app).commands) - {"figures"}
    results = set(results_in(RESULTS))
    assert commands <= results
    assert all(any(name.startswith(f"{command}-") for command in commands) for name in results - commands)
