"""Records to classify, as a task takes them."""

import pytest

from shared.errors import BadRequest, InvalidDataset, InvalidRequest
from shared.scoring import ClassifyRequest
from shared.task import Task
from shared.task_templates import named_task


def test_all_missing_fields_are_named_at_once():
    with pytest.raises(InvalidRequest, match="fields: premise, hypothesis missing; the adapter's task 'rte' needs"):
        ClassifyRequest(fields={"premise": None, "text": "x"}).record(named_task("rte"))


def test_a_field_within_an_object_is_found():
    answers = [{"text": " yes", "labels": ["1"]}, {"text": " no", "labels": ["0"]}]
    task = Task(name="mail", prompt="{mail.subject}:", answers=answers)
    fields = {"mail": {"subject": "hi"}}
    assert ClassifyRequest(fields=fields).record(task) == fields
    with pytest.raises(InvalidRequest, match=r"mail\.subject missing"):
        ClassifyRequest(fields={"mail": "hi"}).record(task)


def test_blank_texts_and_tasks_without_labels_are_refused():
    with pytest.raises(InvalidDataset, match="fields: the text is blank"):
        ClassifyRequest(fields={"text": " "}).record(named_task("sst2"))
    with pytest.raises(BadRequest, match="has no labels; use /v1/completions"):
        ClassifyRequest(fields={"text": "x"}).record(named_task("squad"))
