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
from collections.abc import Sequence

from rapidfuzz.distance import LCSseq

from shared.job import TextScores

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WORD = re.compile(r"[^\W_]+")


def text_scores(texts: Sequence[tuple[str, str]]) -> TextScores:
    """Returns the mean scores of pairs of a written text and the person's own.

    Raises statistics.StatisticsError without a pair.
    """
    return TextScores(
        examples=len(texts),
        exact_match=statistics.fmean(_plain_words(written) == _plain_words(own) for written, own in texts),
        token_f1=statistics.fmean(token_f1(written, own) for written, own in texts),
        rouge_l=statistics.fmean(rouge_l(written, own) for written, own in texts),
        words=statistics.fmean(len(_words(written)) for written, _ in texts),
        own_words=statistics.fmean(len(_words(own)) for _, own in texts),
    )


def token_f1(written: str, own: str) -> float:
    """Returns the F1 of two texts' words as multisets, 0 to 1; two texts without words are equal."""
    first, second = _plain_words(written), _plain_words(own)
    common = sum((Counter(first) & Counter(second)).values())
    return _f1(common, len(first), len(second))


def rouge_l(written: str, own: str) -> float:
    """Returns the F1 of two texts' longest common subsequence of words, 0 to 1; two texts without words are equal."""
    first, second = _words(written), _words(own)
    return _f1(LCSseq.similarity(first, second), len(first), len(second))


def _f1(common: int, first: int, second: int) -> float:
    return 2 * common / (first + second) if first + second else 1.0


def _plain_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
