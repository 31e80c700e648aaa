"""Answers of a kept adapter: against the training program's own scores, and as a person asks for them."""

import numpy as np
import pytest

from device_agent.executors.python import open_program
from device_agent.inference.personal_model import open_personal
from device_agent.inference.predict import predict, records_of
from shared.errors import InvalidDataset, NotFound
from shared.task_records import read_question
from shared.task_templates import named_task
from shared.zo.encoding import encode_question
from shared.zo.packing import pack_score
from tests.device_agent.tiny import TASK
from tests.device_agent.use import keep_adapter

RECORDS = [
    {"text": "the warm funny plot", "label": "positive"},
    {"text": "dull", "label": "negative"},
    {"text": "a " * 60 + "weak cast", "label": "negative"},  # longer than the recipe's S
]


def trained_scores(program, flat, task, records):
    """log P of every candidate by the program that trains."""
    runtime = open_program(program.manifest, *program.files)
    runtime.load(flat)
    recipe = program.manifest.recipe
    examples = [
        encode_question(program.tokenizer, read_question(task, record, "here"), recipe, "here") for record in records
    ]
    scores = [row for batch in pack_score(examples, recipe) for row in batch.read(runtime.score(batch.inputs))]
    runtime.close()
    return scores


@pytest.fixture
def flat(home, rademacher, server_key):
    return keep_adapter(home, rademacher, server_key)


def test_predictions_are_what_the_training_program_scores(home, rademacher, flat):
    expected = trained_scores(rademacher, flat, TASK, RECORDS)
    model = open_personal(home, "alice-movies")
    for record, scores in zip(RECORDS, expected, strict=True):
        prediction = predict(model, {"text": record["text"]}, "here")
        np.testing.assert_allclose([c.log_probability for c in prediction.candidates], scores, rtol=1e-4)
        weights = [np.e**score for score in scores]
        shares = [weight / sum(weights) for weight in weights]
        np.testing.assert_allclose([c.probability for c in prediction.candidates], shares, rtol=1e-3)
        assert [(c.text, c.label) for c in prediction.candidates] == [(" terrible", "negative"), (" great", "positive")]
        likeliest = max(prediction.candidates, key=lambda each: each.log_probability)
        assert likeliest.text == (" terrible", " great")[int(np.argmax(scores))]
        assert prediction.truncated == (record is RECORDS[2])
    model.close()


def test_candidates_with_prompts_of_their_own_follow_them(home, rademacher, server_key):
    task = named_task("winogrande")
    flat = keep_adapter(home, rademacher, server_key, task=task)
    record = {"context": "so", "option1": "a joy", "option2": "the cast", "object": "sat", "answer": "2"}
    (expected,) = trained_scores(rademacher, flat, task, [record])
    model = open_personal(home, "alice-movies")
    prediction = predict(model, record, "here")
    np.testing.assert_allclose([c.log_probability for c in prediction.candidates], expected, rtol=1e-4)
    assert [c.label for c in prediction.candidates] == ["1", "2"]
    model.close()


def test_a_label_is_not_looked_at(home, flat):
    model = open_personal(home, "alice-movies")
    plain = predict(model, {"text": "dull"}, "here")
    for label in ("positive", "no label of the task", None):
        assert predict(model, {"text": "dull", "label": label}, "here") == plain
    with pytest.raises(InvalidDataset, match=r"there:3.*'text' is missing"):
        predict(model, {"label": "positive"}, "there:3")
    model.close()


def test_a_damaged_file_is_not_run(home, rademacher, flat):
    path = home.cache / rademacher.manifest.file("inference").sha256
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(NotFound, match="adapter pull"):
        open_personal(home, "alice-movies")


def test_lines_are_records_or_for_a_task_of_one_field_texts():
    lines = ["plain text\n", "\n", '{"text": "json"}\n', "  indented", '{"text": NaN}']
    records = list(records_of(TASK, lines, "stdin"))
    assert records == [
        ("stdin:1", {"text": "plain text"}),
        ("stdin:3", {"text": "json"}),
        ("stdin:4", {"text": "  indented"}),
        ("stdin:5", {"text": None}),
    ]
    with pytest.raises(InvalidDataset, match="stdin:1: the line is not JSON"):
        list(records_of(named_task("rte"), ["plain"], "stdin"))
    with pytest.raises(InvalidDataset, match="x:1: the line is not JSON"):
        list(records_of(TASK, ["{torn"], "x"))
    with pytest.raises(InvalidDataset, match="must be a JSON object"):
        list(records_of(named_task("rte"), ["[1]"], "x"))
