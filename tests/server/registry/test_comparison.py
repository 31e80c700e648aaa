"""Two versions side by side."""

import numpy as np
import pytest

from tests.server.registry.conftest import URL

SIZE = 2 * 2 * (8 + 4)  # D: two layers, rank 2, q_proj 8 out and v_proj 4 out


@pytest.fixture
def train_version(publish):
    """Trains a version of a random flat B."""

    def train(seed, job=None, **changes):
        flat = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
        publish(flat, job=job, **changes)

    return train


def test_two_versions_over_the_same_a(decide, train_version):
    train_version(1, tuned_accuracy=0.6)
    train_version(2, {"training": {"lr": 0.5, "steps": 7}, "recipe": {"loss": "candidates"}}, tuned_accuracy=0.7)
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


def test_versions_over_another_a_are_compared_too(app, decide, train_version, problem):
    train_version(1)
    train_version(1, {"adapter": "alice-books", "recipe": {"a_seed": 1}})
    comparison = decide("GET", "/compare?left=v1&right=v1&other=alice-books")
    assert (comparison["same_base"], comparison["same_a"]) == (True, False)
    assert comparison["right"]["adapter"] == "alice-books"
    problem(app.get(f"{URL}/compare?left=v1&right=v1&other=nothing"), 404, "adapter-not-found")
    problem(app.get(f"{URL}/compare?left=v1&right=v9"), 404, "revision-not-found")
    problem(app.get(f"{URL}/compare?left=v1"), 422, "invalid-request")
