"""`Curve` of a job's events: its points. Frames and plots are in tests/examples."""

import sys

import pytest

from mobizo import Curve, CurvePoint
from shared.job import JobView, Progress

EVALUATION = {"split": "validation", "correct": 6, "total": 8, "loss": 0.5}
RESULT = {
    "steps": 4,
    "best_step": 4,
    "train_seconds": 1,
    "seconds": 2,
    "peak_rss_bytes": 1,
    "evaluations": [{"step": 0, **EVALUATION, "correct": 4}, {"step": 4, **EVALUATION}],
}


@pytest.fixture
def curve(app):
    job = app.submit()
    body = {**RESULT, "evaluations": [*RESULT["evaluations"], {"step": 4, **EVALUATION, "adapter": "best"}]}
    view = JobView.model_validate(app.get(f"/v1/jobs/{job['id']}").json() | {"result": body})
    progress = [Progress(phase="training", step=step, steps=4, loss=1 / step) for step in (1, 2, 4)]
    return Curve.of([*progress, Progress(phase="evaluating", step=4, steps=4), view])


def test_points_are_losses_and_validations_by_step(curve):
    assert curve.points == (
        CurvePoint(0, None, 0.5, 0.5),
        CurvePoint(1, 1.0),
        CurvePoint(2, 0.5),
        CurvePoint(4, 0.25, 0.5, 0.75),
    )


@pytest.mark.parametrize(("method", "package"), [("to_frame", "pandas"), ("plot", "matplotlib")])
def test_a_missing_package_names_the_extra(method, package, curve, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=r"mobizo\[notebook\]"):
        getattr(curve, method)()
