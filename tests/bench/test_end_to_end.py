"""`bench end-to-end`: claims of given runs; first order with our settings takes the same steps as our program."""

import json
import warnings
from pathlib import Path

import pytest

from shared.recipe import TARGETS, BaseRef, Recipe
from shared.training_settings import TrainingSettings

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.baselines.pytorch_model import load_model
    from bench.end_to_end import command
    from bench.end_to_end.command import end_to_end
    from bench.end_to_end.contender_runner import ContenderRunner
    from bench.end_to_end.contenders import TABLE
    from bench.programs import CompiledProgram
    from bench.tiny import write_base
    from bench.training.learners import ProgramLearner, torch_learner
    from bench.training.runs import Contender, Evaluation, Run, new_run
    from server.compiler import compile_program, inspect_base

pytestmark = pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")

# Core-seconds between two evaluations, and the accuracies of the evaluations.
COSTS = {"replay": 40.0, "gradient": 2.0, "first-order LoRA-FA, same help": 6.0, "MobiZO q=4": 100.0}
ACCURACIES = (0.74, 0.76, 0.81)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs of the command: three evaluations each, of ACCURACIES; the rates 1e-2, 4e-3 and 3e-3 are the best."""
    new_runs: list[Run] = []

    def run(
        runner: ContenderRunner,
        contender: Contender,
        split: str,
        cap: float | None,
        stop: bool,
        evaluation_steps: object,
    ) -> Run:
        cost = COSTS.get(contender.name, 300.0)
        is_best_rate = contender.name == "replay" or contender.training.lr in (1e-2, 4e-3, 3e-3)
        evaluations = [
            Evaluation(
                step=index,
                core_seconds=index * cost,
                seconds=index * cost / 2,
                accuracy=accuracy - (not is_best_rate) * 0.1,
                loss=1,
            )
            for index, accuracy in enumerate(ACCURACIES, 1)
        ]
        fields = {"core_seconds": 3 * cost, "steps": 3, "examples": 30}
        new_runs.append(new_run(contender, split, cap=cap, evaluations=evaluations, **fields))  # type: ignore[arg-type]
        return new_runs[-1]

    monkeypatch.setattr(ContenderRunner, "_run", run)
    # Trials then run when their results are read.
    monkeypatch.setattr(ContenderRunner, "try_out", lambda runner, trials, cap: None)
    monkeypatch.setattr(ContenderRunner, "calibration_core_seconds", 7.0)
    monkeypatch.setattr(ContenderRunner, "recipe", None)
    monkeypatch.setattr(command, "peak_memory", lambda keep: ([], {"gradient_peak_memory_vs_first_order": 0.1}))
    return new_runs


def test_claims_of_all_contenders(runs: list[Run], tmp_path: Path) -> None:
    end_to_end(tmp_path / "result.json", keep=tmp_path / "keep", seeds=2)
    claims = json.loads((tmp_path / "result.json").read_text())["claims"]
    assert claims["core_seconds_to_target"] == 80
    assert claims["gradient_core_seconds_to_target"] == 4
    assert claims["gradient_core_seconds_to_80"] == 6
    assert "gradient_core_seconds_to_83" not in claims  # no seed came that far
    assert claims["gradient_final_accuracy"] == claims["final_accuracy"] == 0.81
    assert claims["gradient_vs_first_order_same_help"] == 3
    assert claims["core_seconds_vs_paper"] == 2.5
    assert claims["gap_to_first_order_points"] == pytest.approx(-7)
    assert claims["gradient_peak_memory_vs_first_order"] == 0.1
    assert claims["calibration_core_seconds"] == 7
    assert {run.contender for run in runs} == {entry.contender.name for entry in TABLE}


def test_the_rate_is_chosen_on_the_validation_split(runs: list[Run], tmp_path: Path) -> None:
    end_to_end(keep=tmp_path, only=["MobiZO q=4"], seeds=1)
    assert [(run.split, run.lr, run.cap) for run in runs] == [
        *(("validation", lr, 30.0) for lr in (5e-4, 1e-3, 4e-3, 1.6e-2)),
        ("test", 4e-3, 120.0),
    ]


@pytest.mark.slow
def test_first_order_with_the_same_help_takes_the_programs_steps(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    recipe = Recipe(
        base=BaseRef(name="tiny", sha256=inspect_base(str(base)).sha256),
        estimator="gradient",
        layers="last:1",
        loss="candidates",
        targets=TARGETS,
        rank=2,
        alpha=4,
        effective_batch=4,
        sequence_length=40,
        answer_length=6,
        choices=2,
    )
    (tmp_path / "program").mkdir()
    program = CompiledProgram(
        compile_program(recipe, str(base), tmp_path / "program", inference=False), tmp_path / "program"
    )
    ours = ProgramLearner(program)
    theirs = torch_learner("first-order", load_model(str(base)), recipe, program.manifest.shape, ours.train)
    theirs.cache_prefix()
    settings = TrainingSettings(steps=8, lr=1e-2)
    start = theirs.measure(ours.train[:8])
    ours.prepare()  # loads the steps' methods and changes nothing
    for number in range(8):
        indices = list(range(4 * (number % 4), 4 * (number % 4) + 4))  # from the cache in the second round
        assert ours.step(indices, number, settings) == pytest.approx(theirs.step(indices, number, settings), rel=1e-3)
    metrics, expected = (learner.measure(ours.train[:8]) for learner in (ours, theirs))
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-3)
    assert abs(metrics.loss - start.loss) > 1e-3
    ours.close()
    theirs.close()
