"""What pydantic finds wrong, in words for people."""

import pytest
from pydantic import ValidationError

from shared.invalid_fields import first_invalid, invalid_fields
from shared.recipe import RequestedRecipe
from shared.task import Task


class Twice:
    """The error of a body that two parameters of a route read."""

    def __init__(self, error):
        self.errors = lambda: error.errors() * 2


def wrong(model, **values):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)
    return caught.value


def test_a_field_deep_in_a_document_is_named():
    first = first_invalid(wrong(Task, name="tone", prompt="{text}", answers=[{"text": " calm", "labels": 3}]))
    assert first.location == ("answers", 0, "labels")
    assert str(first) == f"answers.0.labels: {first.message}"


def test_each_problem_is_named_once_and_in_order():
    error = wrong(RequestedRecipe, rank=0, targets=[])
    assert [field.path for field in invalid_fields(Twice(error))] == ["rank", "targets"]
    assert invalid_fields(Twice(error)) == invalid_fields(error)
