"""Text by public lists: by hand with small lists, and with the real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils import murmurhash3_32

from dpsgd_cli.data import computed_columns
from dpsgd_cli.data.column_settings import Computed, TextColumn
from dpsgd_cli.errors import UsageError

BUCKETS = 64
PLAIN = Computed("c", "text", buckets=BUCKETS, words=1)
LISTED = Computed("c", "text", buckets=BUCKETS, words=1, rarity="en", lexicon="vader")


def bucket(word: str) -> int:
    return abs(int(murmurhash3_32(word, seed=0))) % BUCKETS


def _forget() -> None:
    computed_columns._vader_list.cache_clear()
    computed_columns._rarity.cache_clear()


@pytest.fixture
def _small_lists(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`film` is on the Zipf scale at 4, every other word at 7; `good` has sentiment 2."""
    frequencies = SimpleNamespace(
        available_languages=lambda: {"en": ""}, zipf_frequency=lambda word, _: 4.0 if word == "film" else 7.0
    )
    vader = SimpleNamespace(
        NEGATE=["never"], SentimentIntensityAnalyzer=lambda: SimpleNamespace(lexicon={"good": 2.0, "bad": -2.5})
    )
    monkeypatch.setitem(sys.modules, "wordfreq", frequencies)
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", vader)
    _forget()
    yield
    _forget()


@pytest.mark.usefixtures("_small_lists")
@pytest.mark.parametrize(
    ("text", "words", "sentiment"),
    [
        ("A good film", {"a": 1, "good": 1, "film": 2}, 2.0),
        ("never a good film", {"never": 1, "not a": 1, "not good": 1, "not film": 2}, -0.74 * 2),
        ("isn't a b c good", {"isn't": 1, "not a": 1, "not b": 1, "not c": 1, "good": 1}, 2.0),
        ("bad bad", {"bad": 2}, -5.0),
    ],
)
def test_words_weigh_by_rarity_and_a_negation_turns_them(text: str, words: dict[str, float], sentiment: float) -> None:
    """Weights are sqrt(8 - Zipf): 2 for `film`, 1 for the others; half the sentiment, in one of two features."""
    wanted = np.zeros(BUCKETS + 2)
    for word, weight in words.items():
        wanted[bucket(word)] += weight
    wanted[BUCKETS:] = max(sentiment / 2, 0), max(-sentiment / 2, 0)
    found = computed_columns.features([text], LISTED)
    assert found.dtype == np.float32
    assert found[0] == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-6)


@pytest.mark.usefixtures("_small_lists")
def test_a_run_weighs_the_mean_of_its_words() -> None:
    found = computed_columns.features(["good film"], Computed("c", "text", buckets=BUCKETS, words=2, rarity="en"))
    wanted = np.zeros(BUCKETS)
    for run, weight in {"good": 1, "film": 2, "good film": 1.5}.items():
        wanted[bucket(run)] += weight
    assert found[0] == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-6)


@given(st.lists(st.text(alphabet="goda nevrfilm'.", max_size=40), min_size=1, max_size=6), st.integers(1, 3))
def test_no_text_is_longer_than_one_with_lists(texts: list[str], words: int) -> None:
    rule = Computed("c", "text", buckets=8, words=words, rarity="en", lexicon="vader")
    for row in computed_columns.features(texts, rule):
        assert sum(Fraction(float(entry)) ** 2 for entry in row) <= 1


def test_the_real_lists_know_english() -> None:
    """`excellent` is positive and rarer than `the`; a text without words is all zeros."""
    found = computed_columns.features(["excellent", "the excellent", "awful", " "], LISTED)
    assert found[0, BUCKETS] > 0 and found[2, BUCKETS + 1] > 0
    assert 0 < found[1, bucket("the")] < found[1, bucket("excellent")]
    assert not found[3].any()


def test_without_lists_it_is_counts() -> None:
    found = computed_columns.features(["b a b"], PLAIN)
    assert found[0, bucket("b")] == pytest.approx(2 / 5**0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("use", "module", "said"),
    [
        ({"rarity": "en"}, "wordfreq", r"pip install 'dpsgd\[text\]'"),
        ({"lexicon": "vader"}, "vaderSentiment.vaderSentiment", r"pip install 'dpsgd\[text\]'"),
        ({"rarity": "tlh"}, None, "wordfreq has no list of the language 'tlh'"),
    ],
)
def test_what_is_missing_is_said(
    use: dict[str, Any], module: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forget()
    if module is not None:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=said):
        computed_columns.features(["a"], Computed("c", "text", buckets=4, words=1, **use))


def test_the_declaration_names_lists_and_versions() -> None:
    told = computed_columns.described(TextColumn(text=8, rarity="en", lexicon="vader"))
    assert "wordfreq 3." in told and "vaderSentiment 3." in told
