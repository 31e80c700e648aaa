"""Scoring and generating on the device: against the training program's scores, and against reading all over again."""

import numpy as np
import pytest

from device_agent.executors.python import PythonLauncher
from device_agent.executors.runner import RunnerLauncher
from device_agent.inference.session import InferenceSession
from shared.errors import BadRequest


@pytest.fixture(scope="module", params=["native", "python"])
def launcher(request):
    if request.param == "python":
        return PythonLauncher()
    return RunnerLauncher(request.getfixturevalue("runner_directory"))


@pytest.fixture(scope="module")
def inference(rademacher, launcher):
    """The tiny program's inference file in either executor, its B random."""
    files = rademacher.path("inference"), rademacher.path("weights")
    executor = launcher.launch(rademacher.manifest, *files, resident=True)
    opened = InferenceSession(rademacher.manifest, executor)
    opened.load(np.random.default_rng(1).normal(0, 0.1, rademacher.manifest.size).astype(np.float32))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def text(rademacher):
    """45 tokens: more than the recipe's S of 40."""
    return np.random.default_rng(2).integers(0, rademacher.manifest.shape.vocabulary, 45).tolist()


def test_a_long_candidate_is_the_sum_of_its_tokens(inference, text):
    prompt, candidate = text[:20], text[20:]  # 25 tokens, several times the program's T of 6
    steps = [inference.score(text[:end], [[text[end]]])[0] for end in range(20, 45)]
    (score,) = inference.score(prompt, [candidate])
    assert score == pytest.approx(sum(steps), rel=1e-5)


def test_candidates_that_are_restricted_compete_at_their_forks_alone(inference, text):
    prompt, first, second, third = text[:20], [5, 6, 7, 8], [5, 6, 9, 8], [10, 11]

    def share(prefix, token, tokens):
        weights = {each: np.exp(inference.score(prompt + prefix, [[each]])[0]) for each in tokens}
        return weights[token] / sum(weights.values())

    scores = inference.score(prompt, [first, second, third], restrict=True)
    begin = share([], 5, (5, 10))
    expected = [begin * share([5, 6], 7, (7, 9)), begin * share([5, 6], 9, (7, 9)), 1 - begin]
    np.testing.assert_allclose(np.exp(scores), expected, rtol=1e-4)


def test_a_greedy_text_is_the_likeliest_token_after_all_before_it(inference, text):
    continuation = [each.token for each in inference.generate(text, 20)]
    tokens = list(text)
    while len(tokens) < 65:
        for place, token in enumerate(tokens):
            logits = inference.extend([token], place, [0])
        tokens.append(int(logits[0].argmax()))
    assert continuation == tokens[45:]


def test_a_text_whose_cache_is_gone_does_not_go_on(inference, text):
    tokens = inference.generate(text, 5)
    next(tokens)
    inference.score(text, [[1]])
    with pytest.raises(BadRequest, match="one text at a time"):
        next(tokens)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda inference, text: inference.generate(text, 21), "45 tokens and 21 more .* 64"),
        (lambda inference, text: inference.score(text, [[1] * 20, [1] * 21]), "45 tokens and 21 more .* 64"),
        (lambda inference, text: inference.generate([], 1), "at least one token"),
        (lambda inference, text: inference.generate([288], 1), "from 0 to 287"),
        (lambda inference, text: inference.score(text, [[-1]]), "from 0 to 287"),
        (lambda inference, text: inference.score(text, [[]]), "at least one token"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_begins(inference, text, call, reason):
    with pytest.raises(BadRequest, match=reason):
        call(inference, text)
