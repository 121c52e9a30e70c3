"""Numbers with their nouns, and values of any size, for messages. Not here: any message."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_CHARACTERS = 80
_MOST_NAMES = 12


def count(number: int, noun: str, many: str | None = None) -> str:
    """`number` and the noun in its number: `many` where that is not `noun` and an s.

    >>> count(1, "trial"), count(2, "trial"), count(0, "process", "processes"), count(60_000, "row")
    ('1 trial', '2 trials', '0 processes', '60000 rows')
    """
    return f"{number} {noun if number == 1 else many or noun + 's'}"


def shortened(text: str, most: int = _MOST_CHARACTERS) -> str:
    """`text`, which may be a cell of megabytes, as a message has room for it.

    >>> shortened("abc"), shortened("a" * 1000, 12)
    ('abc', 'aaaaaaaaa...')
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def quoted(value: object, most: int = _MOST_CHARACTERS) -> str:
    """A value that a user or a file gave, as a message shows it.

    >>> quoted("yes"), quoted("a" * 1000, 12)
    ("'yes'", "'aaaaaaaa...")
    """
    if isinstance(value, str | bytes) and len(value) > most:
        value = value[: most + 1]
    try:
        return shortened(repr(value), most)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"


def listed(values: Iterable[object], most: int = _MOST_NAMES) -> str:
    """The first of some values as a list in brackets, and how many more there are.

    >>> listed([1, "a"]), listed(range(20_000), 3)
    ("[1, 'a']", '[0, 1, 2, ... and 19997 more]')
    """
    every = list(values)
    shown = [quoted(value) for value in every[:most]]
    more = [f"... and {len(every) - most} more"] if len(every) > most else []
    return f"[{', '.join([*shown, *more])}]"
