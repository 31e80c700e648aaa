"""Scores what the initial and the trained adapter write for held-out records, for a job's result.

Exact match and token F1 compare words as SQuAD's evaluation does (Rajpurkar et al. 2016): lower case, without ASCII
punctuation and without the articles a, an and the. ROUGE-L (Lin 2004) is the F1 of the longest common subsequence of
words; a word is a run of letters and digits of any script, in lower case. Only the mean scores leave the device.
"""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from rapidfuzz.distance import LCSseq

from device_agent.errors import DoesNotFit, NoRunner, RuntimeFailed
from device_agent.inference.personal_model import open_model
from device_agent.inference.samples import continue_text, held_out_prompts
from device_agent.jobs.lease_and_policy import PolicyGatedRun
from device_agent.programs import ProgramCache
from device_agent.training.run_directory import RunDirectory
from shared.errors import InvalidDataset
from shared.job import Progress
from shared.program import ProgramFile
from shared.result import Result, TextScores
from shared.zo.lora import load_adapter

MAX_SCORED = 40  # held-out texts; each is written twice
WHY = "writing held-out texts, to compare them with the examples' own"

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WORD = re.compile(r"[^\W_]+")
_log = structlog.get_logger()


def score_texts(
    cache: ProgramCache,
    fetch: Callable[[PolicyGatedRun, ProgramFile], Path],
    policy_run: PolicyGatedRun,
    run: RunDirectory,
    result: Result,
) -> Result:
    """Returns the result of a trained run with scores of written texts, and records it; without them if they cannot be
    measured.

    fetch: returns the path of a file of the program, downloading it if necessary.
    """
    plan = run.plan()
    files = plan.manifest.files
    progress = Progress(phase="evaluating", step=result.steps, steps=result.steps, why=WHY)
    policy_run.report(progress)
    try:
        cache.reserve(files)
        paths = {file.role: fetch(policy_run, file) for file in files}
        trained = load_adapter(run.best.read_bytes(), plan.manifest.size)
        model = open_model(plan.job_id, plan.task, plan.manifest, paths)
        try:
            limit = min(plan.training.test_limit or MAX_SCORED, MAX_SCORED)
            _, prompts = held_out_prompts(model, plan.dataset, limit, plan.job_created_at)
            scores = []
            for flat in (plan.begin_b(), trained):
                model.inference.load(flat)
                written = []
                for prompt in policy_run.pace(prompts, progress):
                    text = continue_text(model, prompt.tokens, plan.manifest.recipe.answer_length)
                    written.append((text, prompt.right or (model.tokenizer.decode(prompt.own),)))
                scores.append(text_scores(written))
        finally:
            model.close()
    except (DoesNotFit, InvalidDataset, NoRunner, RuntimeFailed) as error:
        _log.warning("held-out texts were not scored", detail=error.detail)
        return result
    result = result.model_copy(update={"written_before": scores[0], "written_after": scores[1]})
    run.finish(result)
    return result


def text_scores(texts: Sequence[tuple[str, Sequence[str]]]) -> TextScores:
    """Returns the mean scores of written texts, each with the texts that are right, of which the best one counts.

    Every score takes its own best, as SQuAD's evaluation and rouge-score's `score_multi` do; `own_words` counts the
    first's. Raises statistics.StatisticsError without a text, and ValueError for one with nothing that is right.
    """
    return TextScores(
        examples=len(texts),
        exact_match=_mean_best(exact_match, texts),
        token_f1=_mean_best(token_f1, texts),
        rouge_l=_mean_best(rouge_l, texts),
        words=statistics.fmean(len(_words(output)) for output, _ in texts),
        own_words=statistics.fmean(len(_words(right[0])) for _, right in texts),
    )


def _mean_best(score: Callable[[str, str], float], texts: Sequence[tuple[str, Sequence[str]]]) -> float:
    return statistics.fmean(max(score(output, own) for own in right) for output, right in texts)


def exact_match(output: str, own: str) -> float:
    """Returns 1 if two texts have the same words in the same order, otherwise 0."""
    return float(_plain_words(output) == _plain_words(own))


def token_f1(output: str, own: str) -> float:
    """Returns the F1 of two texts' words as multisets, 0 to 1; two texts without words are equal."""
    first, second = _plain_words(output), _plain_words(own)
    common = sum((Counter(first) & Counter(second)).values())
    return _f1(common, len(first), len(second))


def rouge_l(output: str, own: str) -> float:
    """Returns the F1 of two texts' longest common subsequence of words, 0 to 1; two texts without words are equal."""
    first, second = _words(output), _words(own)
    return _f1(LCSseq.similarity(first, second), len(first), len(second))


def _f1(common: int, first: int, second: int) -> float:
    return 2 * common / (first + second) if first + second else 1.0


def _plain_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
