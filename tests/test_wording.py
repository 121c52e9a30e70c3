"""A number and its noun."""

from __future__ import annotations

import pytest

from dpsgd_cli.wording import count


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (1, ("trial",), "1 trial"),
        (0, ("trial",), "0 trials"),
        (2, ("missing label",), "2 missing labels"),
        (1, ("process", "processes"), "1 process"),
        (3, ("process", "processes"), "3 processes"),
    ],
)
def test_one_is_singular_and_all_else_is_plural(number: int, words: tuple[str, ...], said: str) -> None:
    assert count(number, *words) == said
