"""Features of columns of dates, many categories and free text (`data.columns`), computed from each cell by itself.

- A date becomes the days since its first public day, and one category for each cycle: month of the year, day of the
  week, hour of the day.
- A category of many becomes one of a number of buckets, by a hash of its text.
- A text becomes the counts of its words, and of runs of words, in a number of buckets. With `rarity`, a word counts by
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
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from typing import Any

import numpy as np

from dpsgd_cli.common.text_format import count, quoted
from dpsgd_cli.data.cells import Cells
from dpsgd_cli.data.column_settings import ColumnUse, Computed, DateColumn, HashedColumn, Missing, TextColumn
from dpsgd_cli.data.dataset import Column
from dpsgd_cli.errors import DataError, UsageError

_DAY = np.timedelta64(1, "D")
_TYPED_DATE = r"\d{4,}-\d\d-\d\d( \d\d:\d\d:\d\d(\.\d+)?(\+00:00)?)?"
"""Form of the text of a cell that is a date in a file or a frame (`cells.text_of`)."""
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_CYCLES = {
    "year": ("month", tuple(map(str, range(1, 13)))),
    "week": ("weekday", WEEKDAYS),
    "day": ("hour", tuple(map(str, range(24)))),
}
"""Name and values of the category that stands for each cycle of a date."""


def columns_of(name: str, use: ColumnUse, filling: Missing | None, problems: list[str]) -> list[Column]:
    """Return the features of the file's column `name`. Appends to `problems` what its `filling` cannot mean.

    A missing category is a category of its own, and so is the cycle of a missing date; a missing text has no words.
    """
    if isinstance(use, DateColumn):
        return _of_dates(name, use, filling, problems)
    if filling is not None:
        problems.append(
            f"data.missing: {name}: a missing cell of a hash or text column is one of its own; leave {quoted(name)} out"
        )
    if isinstance(use, HashedColumn):
        values = tuple(f"bucket {number}" for number in range(use.hash))
        return [Column(name, values=(*values, ""), filling="", computed=Computed(name, "hash", buckets=use.hash))]
    rule = Computed(name, "text", buckets=use.text, words=use.words, rarity=use.rarity, lexicon=use.lexicon)
    return [
        Column(
            f"{name} (text {number})",
            (0.0, 1.0),
            indicator=True,
            category=f"{name} (text)",
            computed=replace(rule, bucket=number),
        )
        for number in range(rule.features)
    ]


def _of_dates(name: str, use: DateColumn, filling: Missing | None, problems: list[str]) -> list[Column]:
    first, last = use.ends
    days = float((last - first).days + 1)
    value: float | None = None
    if filling is not None:
        value = days / 2 if filling.value is None else _days_of(filling.value, first)
        if value is None or not 0 <= value <= days:
            problems.append(
                f"data.missing: {name}: give a day within the column's bounds, as {use.bounds[0]}, or leave the value"
                " out, which takes their middle"
            )
    own = [Column(name, (0.0, days), filling=value, computed=Computed(name, "days", use.date, use.bounds[0]))]
    if filling is not None and filling.indicator:
        marks = f"{name} is missing"
        own.append(Column(marks, (0.0, 1.0), indicator=True, category=marks, marks=name))
    for cycle in use.told_cycles:
        called, values = _CYCLES[cycle]
        own.append(
            Column(f"{name} ({called})", values=(*values, ""), filling="", computed=Computed(name, cycle, use.date))
        )
    return own


def _days_of(value: object, first: datetime) -> float | None:
    try:
        return float((datetime.fromisoformat(str(value)) - first).days)
    except (ValueError, TypeError):
        return None


def entries(cells: Cells, missing: np.ndarray, column: Column, kept: dict[str, Any]) -> np.ndarray:
    """Return the entries (N,) of a computed column for the cells of its source, `missing` (N,) of which are gaps.

    `kept` holds what several columns of one source share; it starts empty for every source.

    Raises DataError, naming the first row, for a cell that is no date of the column's form, and for a missing date
    without a filling.
    """
    rule = column.computed
    assert rule is not None
    if rule.kind == "text":
        if "text" not in kept:
            texts, codes = cells.distinct
            kept["text"] = features([*(text or "" for text in texts), ""], rule), np.where(missing, len(texts), codes)
        told, codes = kept["text"]  # "" has no words, as a gap
        return np.asarray(told[codes, rule.bucket])
    if rule.kind == "hash":
        return np.where(missing, rule.buckets, cells.mapped(lambda text: _bucket(text or "", rule.buckets), np.int64))
    if "dates" not in kept:
        kept["dates"] = moments(cells, missing, rule.form)
    return _of_moments(kept["dates"], missing, cells, column)


def _of_moments(times: np.ndarray, missing: np.ndarray, cells: Cells, column: Column) -> np.ndarray:
    rule = column.computed
    assert rule is not None
    days = times.astype("datetime64[D]")
    if rule.kind == "days":
        found = (times - np.datetime64(rule.first, "us")) / _DAY
        if missing.any() and column.filling is None:
            raise DataError(
                f"column {quoted(rule.of)} has {count(int(missing.sum()), 'missing date')}, first in data row"
                f" {cells.row(missing.argmax())}; say what they mean,"
                f" data.missing: {{{rule.of}: {{indicator: true}}}}, or leave those rows out"
            )
        return np.where(missing, float(column.filling or 0.0), found)
    months = times.astype("datetime64[M]")
    codes = {
        "year": lambda: months.astype(np.int64) % 12,
        "week": lambda: (days.astype(np.int64) + 3) % 7,  # 1 January 1970 was a Thursday
        "day": lambda: (times - days).astype("timedelta64[h]").astype(np.int64),
    }[rule.kind]()
    return np.where(missing, len(column.values or ()) - 1, codes)


def moments(cells: Cells, missing: np.ndarray, form: str) -> np.ndarray:
    """Return the times of cells, datetime64[us] (N,): of text in the form `form`, or as typed files and frames tell it.

    Raises DataError, naming the first row, for a cell that is neither missing nor a date. Never its content.
    """
    import pandas as pd

    texts, codes = cells.distinct
    told = pd.Series([(text or "").strip() for text in texts], dtype=object)
    read = pd.to_datetime(told, format=form, errors="coerce", utc=True)
    typed = pd.to_datetime(told.where(told.str.fullmatch(_TYPED_DATE)), format="ISO8601", errors="coerce", utc=True)
    times = read.fillna(typed).dt.tz_localize(None).to_numpy("datetime64[us]")[codes]
    bad = np.isnat(times) & ~missing
    if bad.any():
        more = f" and {int(bad.sum()) - 1} more" if bad.sum() > 1 else ""
        raise DataError(
            f"column {quoted(cells.name)} holds no date of the form {form} in data row {cells.row(bad.argmax())}"
            f"{more}; mend it, or give the column another use under data.columns"
        )
    return np.where(missing, np.datetime64(0, "us"), times)


def _bucket(text: str, buckets: int) -> int:
    from sklearn.utils import murmurhash3_32

    return int(murmurhash3_32(text, seed=0, positive=True) % buckets)


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
    return [_bucket(word, buckets) for word in words_of(text)]


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
