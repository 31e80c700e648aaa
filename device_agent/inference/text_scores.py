"""Scores of written texts against a person's own: exact match, token F1 and ROUGE-L.

Exact match and token F1 compare words as SQuAD's evaluation does (Rajpurkar et al. 2016): lower case, without ASCII
punctuation and without the articles a, an and the. ROUGE-L (Lin 2004) is the F1 of the longest common subsequence of
words; a word is a run of letters and digits of any script, in lower case.
"""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter
from collections.abc import Callable, Sequence

from rapidfuzz.distance import LCSseq

from shared.job import TextScores

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WORD = re.compile(r"[^\W_]+")


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
