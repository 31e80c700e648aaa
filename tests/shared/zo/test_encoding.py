import threading
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shared.errors import InvalidDataset, InvalidTask
from shared.program_inputs import MIN_LENGTH
from shared.task import Answer, Task
from shared.task_records import Choice, Question
from shared.task_templates import named_task
from shared.zo.encoding import answer_sizes, check_task, encode_question, load_examples, read_jsonl, token_ids
from shared.zo.packing import pack_score, pack_step
from shared.zo.writing import Encoder

WORDS = ["<s>", "<unk>", "a", "b", "c", "d", "e", "f", "g", "It", "was", "great", "terrible", "very", "x"]


@pytest.fixture
def tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def ids(text):
    return [WORDS.index(word) for word in text.split()]


def question(correct=0):
    choices = (Choice("a b c", " d e"), Choice("a b c", " d f"), Choice("a b c", " g"))
    return Question(choices, correct)


def test_rows_leave_out_the_last_answer_token_and_predict_from_the_prompts_last(tokenizer, recipe):
    row = encode_question(tokenizer, question(), recipe, "f:1").rows[0]
    assert list(row.tokens) == ids("a b c d")
    assert list(row.answer) == ids("d e")
    assert [position for position, _ in row.targets] == [2, 3]


def test_a_special_first_token_belongs_to_the_prompt(tokenizer, recipe):
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    row = encode_question(tokenizer, question(), recipe, "f:1").rows[0]
    assert list(row.prompt) == [0, *ids("a b c")]
    assert list(row.answer) == ids("d e")


def test_pack_step_full(tokenizer, recipe):
    example = encode_question(tokenizer, question(2), recipe, "f:1")
    tokens, positions, answers, mask = pack_step([example], recipe)
    assert tokens.shape == (3, 12)
    assert list(tokens[0, :4]) == [*ids("a b c"), 0]
    assert positions[0].tolist() == [2, 0]
    assert answers[0].tolist() == [ids("g")[0], 0]
    assert mask.tolist() == [[1, 0], [0, 0], [0, 0]]


def test_a_dynamic_batch_is_as_long_as_its_longest_sequence(tokenizer, recipe):
    short = encode_question(tokenizer, Question((Choice("a b", " c"),), 0), recipe, "f:1")
    long = encode_question(tokenizer, question(0), recipe, "f:1")  # a b c d, whose answer is d e
    assert (short.length, long.length) == (2, 4)
    for examples, length in (([short], 2), ([short, long], 4), ([long, short, short], 4)):
        fixed, packed = pack_step(examples, recipe), pack_step(examples, recipe, dynamic=True)
        assert packed[0].shape == (3, length)
        np.testing.assert_array_equal(packed[0], fixed[0][:, :length])
        assert not fixed[0][:, length:].any()
        for ours, theirs in zip(packed[1:], fixed[1:], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_no_batch_is_shorter_than_programs_take(tokenizer, recipe):
    example = encode_question(tokenizer, Question((Choice("a", " b"),), 0), recipe, "f:1")
    assert example.length == 1
    assert pack_step([example], recipe, dynamic=True)[0].shape == (3, MIN_LENGTH)
    (batch,) = pack_score([example], recipe, dynamic=True)
    assert batch.inputs[0].shape == (12, MIN_LENGTH)


def test_dynamic_score_batches_are_as_long_as_their_own(tokenizer, recipe):
    short = encode_question(tokenizer, Question((Choice("a b", " c"),), 0), recipe, "f:1")
    long = encode_question(tokenizer, question(), recipe, "f:1")
    examples = [short] * 12 + [long]
    fixed, packed = list(pack_score(examples, recipe)), list(pack_score(examples, recipe, dynamic=True))
    assert [batch.inputs[0].shape for batch in packed] == [(12, 2), (12, 4)]
    for ours, theirs in zip(packed, fixed, strict=True):
        assert ours.plans == theirs.plans
        np.testing.assert_array_equal(ours.inputs[0], theirs.inputs[0][:, : ours.inputs[0].shape[1]])
        np.testing.assert_array_equal(ours.inputs[1], theirs.inputs[1])


def test_pack_score_shares_a_row_between_single_token_candidates(tokenizer, recipe):
    yes_no = Question((Choice("a b", " great"), Choice("a b", " terrible")), 1)
    example = encode_question(tokenizer, yes_no, recipe, "f:1")
    (batch,) = pack_score([example] * 3, recipe)
    tokens, positions, choices = batch.inputs
    assert tokens.shape == (12, 12)
    assert positions.shape == (12, 2)
    assert choices.shape == (12, 2, 3)
    logprobs = np.arange(12 * 2 * 3, dtype=np.float32).reshape(12, 2, 3)
    assert batch.read(logprobs) == [[0, 1], [6, 7], [12, 13]]


def log_probability(prefix, token):
    """A language model: any number that depends on the tokens alone."""
    return -float(np.random.default_rng([*prefix, 7, token]).uniform(0.1, 5))


def scored(examples, recipe):
    """Returns the candidates' scores with that model, from the packed arrays."""
    scores = []
    for batch in pack_score(examples, recipe):
        tokens, positions, choices = batch.inputs
        log_probabilities = np.zeros(choices.shape, np.float32)
        for r, t, c in np.ndindex(choices.shape):
            log_probabilities[r, t, c] = log_probability(tokens[r, : positions[r, t] + 1].tolist(), choices[r, t, c])
        scores += batch.read(log_probabilities)
    return scores


ANSWERS = ([" d e", " d f", " g"], [" d e f", " d e g", " d f"], [" a b c", " d e f", " g"], [" d", " e"])


@pytest.mark.parametrize("answers", ANSWERS)
def test_with_loss_full_a_score_sums_all_tokens(tokenizer, recipe, answers):
    recipe = recipe.model_copy(update={"answer_length": 3})
    example = encode_question(tokenizer, Question(tuple(Choice("a b c", text) for text in answers), 0), recipe, "f:1")
    prompt = ids("a b c")
    for score, text in zip(scored([example], recipe)[0], answers, strict=True):
        tokens = ids(text)
        expected = sum(log_probability(prompt + tokens[:at], token) for at, token in enumerate(tokens))
        assert score == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("answers", ANSWERS)
def test_with_loss_candidates_a_score_is_decoding_that_is_limited_to_the_candidates(tokenizer, recipe, answers):
    recipe = recipe.model_copy(update={"loss": "candidates", "answer_length": 3})
    prompt, paths = ids("a b c"), [ids(text) for text in answers]

    def decode(prefix, share):
        """Yields the complete answers with their probabilities."""
        if prefix in paths:
            yield prefix, share
            return
        following = sorted({path[len(prefix)] for path in paths if path[: len(prefix)] == prefix})
        weights = np.exp([log_probability(prompt + prefix, token) for token in following])
        for token, weight in zip(following, weights / weights.sum(), strict=True):
            yield from decode([*prefix, token], share * weight)

    shares = {tuple(path): share for path, share in decode([], 1.0)}
    choices = tuple(Choice("a b c", text) for text in answers)
    examples = [
        encode_question(tokenizer, Question(choices, correct), recipe, "f:1") for correct in range(len(answers))
    ]
    for scores in scored(examples, recipe):
        assert np.exp(scores).sum() == pytest.approx(1)
        for score, path in zip(scores, paths, strict=True):
            assert np.exp(score) == pytest.approx(shares[tuple(path)], rel=1e-5)
    # Training weighs the same positions, and no forced token.
    for example, path in zip(examples, paths, strict=True):
        _, positions, options, option_mask, mask = pack_step([example], recipe)
        product = 1.0
        for t in np.flatnonzero(mask[0]):
            assert option_mask[0, t].sum() > 1
            prefix = [*prompt, *path][: positions[0, t] + 1]
            weights = np.exp([log_probability(prefix, int(token)) for token in options[0, t][option_mask[0, t] > 0]])
            product *= weights[0] / weights.sum()
        assert product == pytest.approx(shares[tuple(path)], rel=1e-5)


def test_labels_of_several_tokens_that_begin_differently_take_one_row(tokenizer, recipe):
    recipe = recipe.model_copy(update={"loss": "candidates", "sequence_length": 3, "answer_length": 1})
    choices = (Choice("a b c", " d e f"), Choice("a b c", " g"), Choice("a b c", " e e"))
    example = encode_question(tokenizer, Question(choices, 0), recipe, "f:1")
    assert [row.tokens for row in example.rows] == [tuple(ids("a b c"))] * 3
    (batch,) = pack_score([example] * 12, recipe)
    assert len(batch.texts) == 12


def test_an_answer_that_another_one_begins_with_is_refused_with_loss_candidates(tokenizer, recipe):
    task = Task(name="t", prompt="{text}", answers=({"text": " d e", "labels": ["1"]}, {"text": " d", "labels": ["0"]}))
    check_task(task, tokenizer, recipe)
    recipe = recipe.model_copy(update={"loss": "candidates"})
    with pytest.raises(InvalidTask, match=r"the answer ' d' is the beginning of ' d e'.* full stop"):
        check_task(task, tokenizer, recipe)
    unknown = Question((Choice("a", " p"), Choice("a", " q")), 0)
    with pytest.raises(InvalidDataset, match="f:1: the answer ' p' is the beginning of ' q'"):  # the same tokens
        encode_question(tokenizer, unknown, recipe, "f:1")


def test_a_cut_prompt_keeps_its_special_first_token(tokenizer, recipe):
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    long = Question((Choice("x " * 30 + "It was", " great"),), 0)
    row = encode_question(tokenizer, long, recipe, "f:1").rows[0]
    assert list(row.tokens) == [0, *ids("x x x x x x x x x It was")]


@pytest.mark.parametrize(
    ("truncate", "kept"),
    [
        ("head", "x x x x x x x b c d It was"),
        ("tail", "a x x x x x x x x x It was"),
        ("middle", "a x x x x x x b c d It was"),
    ],
)
@pytest.mark.parametrize("kind", ["choice", "completion"])
def test_what_a_long_prompt_loses(tokenizer, recipe, truncate, kept, kind):
    fields = {"answers": (Answer(text=" great", labels=("1",)), Answer(text=" terrible", labels=("0",)))}
    if kind == "completion":
        fields = {"kind": kind, "answer": " great"}
    task = Task(name="t", prompt="{text} It was", truncate=truncate, **fields)
    encoder = Encoder(task, tokenizer, recipe)
    (example,) = encoder.encode({"text": "a " + "x " * 30 + "b c d", "label": 1}, "f:1")
    assert example.truncated
    assert list(example.rows[0].prompt) == ids(kept)


def test_only_prompts_of_templates_are_truncated():
    assert "truncate" not in named_task("sst2").model_dump_json()
    with pytest.raises(ValueError, match="no prompt to truncate"):
        Task(name="t", kind="text", truncate="tail")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ((Choice("a", " b c d"),), "3 tokens; the recipe's answer_length is 2"),
        ((Choice("a", " b"),) * 4, "4 candidates; the recipe's choices is 3"),
        ((Choice("", " b"),), "prompt is empty"),
        ((Choice("a", " "),), "answer is empty"),
    ],
)
def test_records_that_do_not_fit_are_named(tokenizer, recipe, choices, message):
    with pytest.raises(InvalidDataset, match=f"f:9: .*{message}"):
        encode_question(tokenizer, Question(choices, 0), recipe, "f:9")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a", "label": 1}\nnot json\n', r"d\.jsonl:2: the line is not JSON"),
        ("[1, 2]\n", r"d\.jsonl:1: the line is list"),
        ('{"label": 1}\n', r"d\.jsonl:1: field 'text' is missing"),
        ('{"text": NaN, "label": 1}\n', r"d\.jsonl:1: field 'text' is missing or null"),
        ("\n\n", "contains no records"),
    ],
)
def test_bad_files_name_file_and_line(tmp_path, tokenizer, recipe, text, message):
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(InvalidDataset, match=message):
        load_examples(tmp_path / "d.jsonl", named_task("sst2"), tokenizer, recipe)


def test_a_missing_or_binary_file_is_a_clear_error(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", "binary"):
        with pytest.raises(InvalidDataset, match="cannot be read"):
            list(read_jsonl(tmp_path / name))


def test_candidates_loss_needs_one_prompt(tmp_path, tokenizer, recipe):
    candidates_recipe = recipe.model_copy(update={"loss": "candidates"})
    (tmp_path / "d.jsonl").write_text("{}\n")
    with pytest.raises(InvalidTask, match="separate prompt"):
        load_examples(tmp_path / "d.jsonl", named_task("winogrande"), tokenizer, candidates_recipe)


def test_answer_sizes(tokenizer):
    answers = (Answer(text=" very great", labels=("1",)), Answer(text=" terrible", labels=("0",)))
    assert answer_sizes(Task(name="t", prompt="{text}", answers=answers), tokenizer) == (2, 2)
    with pytest.raises(InvalidTask, match="answer_length"):
        answer_sizes(named_task("arc"), tokenizer)


def test_other_threads_run_while_a_long_text_is_tokenized():
    """The server's event loop must run. The text has the maximum length of a scoring request."""
    long = Tokenizer(models.BPE({letter: number for number, letter in enumerate("abcdefgh")}, []))
    iterations, started, finished = 0, threading.Event(), threading.Event()

    def tokenize():
        started.set()
        token_ids(long, "abcdefgh" * 131_072)
        finished.set()

    thread = threading.Thread(target=tokenize)
    thread.start()
    started.wait()
    while not finished.is_set():
        time.sleep(0.001)
        iterations += 1
    thread.join()
    assert iterations > 20
