"""Two versions side by side, against NumPy's own arithmetic."""

import numpy as np
import pytest

from server.registry.comparison import compare_weights
from tests.server.registry.conftest import URL

SIZE = 2 * 2 * (8 + 4)  # D: two layers, rank 2, q_proj 8 out and v_proj 4 out


@pytest.fixture
def train_version(publish):
    """Trains a version of a random flat B, which it returns."""

    def train(seed, job=None, **changes):
        flat = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
        publish(flat, job=job, **changes)
        return flat.astype(np.float64)

    return train


def test_two_versions_over_the_same_a(decide, train_version):
    left, right = (
        train_version(1, tuned_accuracy=0.6),
        train_version(2, {"training": {"lr": 0.5, "steps": 7}, "recipe": {"loss": "candidates"}}, tuned_accuracy=0.7),
    )
    comparison = decide("GET", "/compare?left=v1&right=main")
    assert (comparison["left"]["version"], comparison["right"]["version"]) == (1, 2)
    assert (comparison["same_base"], comparison["same_a"]) == (True, True)
    assert comparison["recipe"] == [{"field": "loss", "left": "full", "right": "candidates"}]
    assert comparison["task"] == []
    assert {row["field"]: (row["left"], row["right"]) for row in comparison["training"]} == {
        "lr": (0.01, 0.5),
        "steps": (3, 7),
    }
    scores = {row["field"]: row for row in comparison["scores"]}
    assert scores["tuned_accuracy"]["difference"] == pytest.approx(0.1)
    assert scores["start_accuracy"]["difference"] is None
    weights = comparison["weights"]
    cosine = left @ right / (np.linalg.norm(left) * np.linalg.norm(right))
    assert weights["cosine"] == pytest.approx(cosine, abs=1e-12)
    assert weights["left_norm"] == pytest.approx(np.linalg.norm(left), rel=1e-12)
    assert weights["right_norm"] == pytest.approx(np.linalg.norm(right), rel=1e-12)
    assert weights["difference_norm"] == pytest.approx(np.linalg.norm(right - left), rel=1e-12)


def test_versions_over_another_a_are_not_compared_by_their_numbers(app, decide, train_version, problem):
    train_version(1)
    train_version(1, {"adapter": "alice-books", "recipe": {"a_seed": 1}})
    comparison = decide("GET", "/compare?left=v1&right=v1&other=alice-books")
    assert (comparison["same_base"], comparison["same_a"], comparison["weights"]) == (True, False, None)
    assert comparison["right"]["adapter"] == "alice-books"
    problem(app.get(f"{URL}/compare?left=v1&right=v1&other=nothing"), 404, "adapter-not-found")
    problem(app.get(f"{URL}/compare?left=v1&right=v9"), 404, "revision-not-found")
    problem(app.get(f"{URL}/compare?left=v1"), 422, "invalid-request")


def test_weights_of_nothing_have_no_angle():
    zero, one = np.zeros(5, np.float32), np.ones(5, np.float32)
    assert compare_weights(zero, one).cosine is None
    same = compare_weights(one, one)
    assert (same.cosine, same.difference_norm) == (1.0, 0.0)


def test_weights_of_several_pieces():
    rng = np.random.default_rng(3)
    left, right = (rng.standard_normal(600_001).astype(np.float32) for _ in range(2))
    comparison = compare_weights(left, right)
    assert comparison.difference_norm == pytest.approx(
        np.linalg.norm(right.astype(float) - left.astype(float)), rel=1e-12
    )
