"""Features of a column of free text: its words in hashed buckets, and what public lists say of them.

A text becomes the counts of its words, and of runs of words, in a number of buckets. With `rarity`, a word counts by
the root of its rarity in public texts of a language (wordfreq's Zipf scale), and a run by the mean of its words. With
`lexicon`, the sum of its words' sentiments in VADER's public list is two features more, its positive and its negative
part. A negation turns the sentiment of the next words and marks them, so that "not good" does not count as "good".
All features of a text together are divided by their length.

Guarantee: the features are data-independent. They depend on the recipe, on public lists of words and on the record's
own cell only, so neighbouring data sets stay neighbouring and the features cost no privacy. The hash is MurmurHash3
with seed 0: it is public, and hides nothing by itself. The features of a text have L2 norm at most 1 in the numbers as
they are stored: the norm is rounded up by a relative 2^-21, and rounding to float32 adds at most 2^-24 to each number.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from dpsgd_cli.data.column_settings import Computed, TextColumn
from dpsgd_cli.errors import UsageError

_SLACK = 2.0**-21
_WORD = re.compile(r"\w+(?:'\w+)*")
_MOST_ZIPF = 8.0
"""A word of every 10; the Zipf scale is log10 of occurrences in a billion words."""
_LEAST_RARITY = 0.05
_TURNED = -0.74
"""Factor of the sentiment of a negated word, as VADER has it."""
_SCOPE = 3
"""Words after a negation that it turns."""
_SENTIMENT = 0.5
"""Weight of a unit of sentiment beside a word of rarity 1."""


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return _WORD.findall(text.lower())


def hashed(text: str, buckets: int) -> list[int]:
    """Return the bucket of each word of a text, from 0 to `buckets` - 1.

    >>> hashed("Good, good film", 4096) == [*hashed("good", 4096) * 2, *hashed("film", 4096)]
    True
    """
    from sklearn.utils import murmurhash3_32

    return [murmurhash3_32(word, seed=0, positive=True) % buckets for word in words_of(text)]


def features(texts: Sequence[str], rule: Computed) -> np.ndarray:
    """Return the features of texts, float32 (C, rule.features).

    Raises UsageError if a public list that the rule names is not installed, or does not know the language.
    """
    from sklearn.feature_extraction import FeatureHasher

    weight, sentiment = _rarity(rule.rarity), _lexicon(rule.lexicon)
    hasher = FeatureHasher(rule.buckets, input_type="pair", alternate_sign=False, dtype=np.float64)
    said = [_weighed(words_of(text), rule.words, weight, sentiment) for text in texts]
    found = hasher.transform([runs for runs, _ in said]).toarray()
    if rule.lexicon:
        sums = _SENTIMENT * np.array([[total] for _, total in said])
        found = np.hstack([found, np.maximum(sums, 0.0), np.maximum(-sums, 0.0)])
    norms = np.sqrt(np.einsum("ij,ij->i", found, found))
    return (found / (np.maximum(norms, np.finfo(float).tiny) * (1 + _SLACK))[:, None]).astype(np.float32)


def _weighed(
    words: list[str], longest: int, weight: Callable[[str], float], sentiment: Callable[[str], float | None] | None
) -> tuple[list[tuple[str, float]], float]:
    """Return the runs of up to `longest` words with their weights, and the sum of the words' sentiments."""
    weights, total, turned = [weight(word) for word in words], 0.0, 0
    if sentiment is not None:
        marked = []
        for word in words:
            value = sentiment(word)
            marked.append(f"not {word}" if turned and value is not None else word)
            total += (value or 0.0) * (_TURNED if turned else 1.0)
            turned = _SCOPE if value is None else max(turned - 1, 0)
        words = marked
    runs = [
        (" ".join(words[at : at + length]), sum(weights[at : at + length]) / length)
        for length in range(1, longest + 1)
        for at in range(len(words) - length + 1)
    ]
    return runs, total


@functools.cache
def _rarity(language: str | None) -> Callable[[str], float]:
    """Return the function from a word to its weight: 1, or the root of its rarity in a language."""
    if language is None:
        return lambda word: 1.0
    wordfreq = _needed("wordfreq")
    if language not in wordfreq.available_languages():
        known = ", ".join(sorted(wordfreq.available_languages()))
        raise UsageError(f"rarity: wordfreq has no list of the language {language!r}; it has {known}")

    @functools.cache
    def weight(word: str) -> float:
        return float(max(_MOST_ZIPF - wordfreq.zipf_frequency(word, language), _LEAST_RARITY) ** 0.5)

    return weight


def _lexicon(name: str | None) -> Callable[[str], float | None] | None:
    """Return the function from a word to its sentiment, from -4 to 4, 0 if it is not listed, None for a negation."""
    if name is None:
        return None
    vader = _needed("vaderSentiment.vaderSentiment")
    listed, negations = _vader_list(), {*vader.NEGATE, "no", "nor"}

    def sentiment(word: str) -> float | None:
        return None if word in negations or word.endswith("n't") else listed.get(word, 0.0)

    return sentiment


@functools.cache
def _vader_list() -> dict[str, float]:
    return dict(_needed("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer().lexicon)


def _needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            "rarity and lexicon of a text column need public lists of words: pip install 'dpsgd[text]'"
        ) from None


def described(use: TextColumn) -> str:
    """Return how a text becomes numbers, in words, with the versions of the public lists."""
    told = f"hashed runs of up to {use.words} words in {use.text} buckets"
    if use.rarity is not None:
        told += f", weighted by their rarity in wordfreq {version('wordfreq')} ({use.rarity})"
    if use.lexicon is not None:
        told += f", and the sentiment of its words by the list of vaderSentiment {version('vaderSentiment')}"
    return told
