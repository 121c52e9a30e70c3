"""Numbers with their nouns, for messages. Not here: any message."""

from __future__ import annotations


def count(number: int, noun: str, many: str | None = None) -> str:
    """`number` and the noun in its number: `many` where that is not `noun` and an s.

    >>> count(1, "trial"), count(2, "trial"), count(0, "process", "processes"), count(60_000, "row")
    ('1 trial', '2 trials', '0 processes', '60000 rows')
    """
    return f"{number} {noun if number == 1 else many or noun + 's'}"
