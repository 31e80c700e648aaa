import pytest
from pydantic import ValidationError

from shared.strict_model import StrictModel


class Document(StrictModel):
    name: str


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="extra_forbidden"):
        Document.model_validate({"name": "a", "nmae": "b"})


def test_fields_are_not_assigned_again() -> None:
    document = Document(name="a")
    with pytest.raises(ValidationError, match="frozen"):
        setattr(document, "name", "b")  # noqa: B010  # mypy would refuse the assignment
