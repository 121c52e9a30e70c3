"""Parts of messages: numbers with their nouns, rounded numbers, values of any size, similar names.

Printed epsilons are rounded up. Files hold numbers in full.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, Context, Decimal

_MOST_CHARACTERS = 80
# controls except tab and newline, format characters (bidirectional, zero-width), line separators, lone surrogates
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_MOST_NAMES = 12
_MOST_COMPARED, _LONGEST_COMPARED = 5000, 100
_LEAST, _MOST = 0.01, 1e6


def count(number: int, noun: str, many: str | None = None) -> str:
    """Return `number` with its noun; `many` is the plural if it is not `noun` plus s.

    >>> count(1, "trial"), count(2, "trial"), count(0, "process", "processes"), count(60_000, "row")
    ('1 trial', '2 trials', '0 processes', '60000 rows')
    """
    return f"{number} {noun if number == 1 else many or noun + 's'}"


def epsilon_text(epsilon: float) -> str:
    """Return an epsilon, rounded up to four decimals, or to four digits if it is very small or large.

    >>> epsilon_text(2.99991), epsilon_text(1e-6), epsilon_text(0.000123412), epsilon_text(12345678.9)
    ('3.0000', '1e-06', '0.0001235', '1.235e+07')
    """
    if epsilon == 0 or not math.isfinite(epsilon):
        return f"{epsilon:.4f}"
    # the shortest decimal of this number: 0.1 must not become 0.1001 because of its binary digits
    exact = Decimal(repr(float(epsilon)))
    if _LEAST <= epsilon < _MOST:
        return str(exact.quantize(Decimal("0.0001"), rounding=ROUND_CEILING))
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).plus(exact)):.4g}"


def metric_text(value: float) -> str:
    """Return a loss or an accuracy, rounded to four decimals, or to four digits if it is very small or large.

    >>> metric_text(0.91254), metric_text(0.0), metric_text(2.5e-7), metric_text(3262659971121966963065094144.0)
    ('0.9125', '0.0000', '2.5e-07', '3.263e+27')
    """
    return f"{value:.4f}" if value == 0 or _LEAST <= abs(value) < _MOST else f"{value:.4g}"


def interval_text(value: float, half: float | None, sign: str = "") -> str:
    """Return a value with the half-width of its interval, if it has one, both in the format of the larger.

    >>> interval_text(0.91254, 0.0012), interval_text(-0.0012, 0.02, "+"), interval_text(2.5e-7, 1e-8)
    ('0.9125 +- 0.0012', '-0.0012 +- 0.0200', '2.5e-07 +- 1e-08')
    """
    size = max(abs(value), half or 0.0)
    digits = ".4f" if size == 0 or _LEAST <= size < _MOST else ".4g"
    return f"{value:{sign}{digits}}" + ("" if half is None else f" +- {half:{digits}}")


def visible(text: str) -> str:
    """Return `text` with every character that a terminal would obey, or not show, as its JSON escape.

    Newlines and tabs stay. A JSON document stays valid, with the same content.

    >>> visible("a" + chr(27) + "[31m" + chr(0x202E)) == "a" + chr(92) + "u001b[31m" + chr(92) + "u202e"
    True
    """
    return _UNSEEN.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def shortened(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return `text`, of any length, cut to `most` characters for a message: visible and on one line.

    >>> shortened("abc"), shortened("a" * 1000, 12)
    ('abc', 'aaaaaaaaa...')
    """
    line = visible(text[: most + 1]).replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= most else f"{line[: most - 3]}..."


def quoted(value: object, most: int = _MOST_CHARACTERS) -> str:
    """Return a value from a user or a file as a message shows it: quoted and shortened.

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
    """Return the first of some values as a list in brackets, with the number of further ones.

    >>> listed([1, "a"]), listed(range(20_000), 3)
    ("[1, 'a']", '[0, 1, 2, ... and 19997 more]')
    """
    every = list(values)
    shown = [quoted(value) for value in every[:most]]
    more = [f"... and {len(every) - most} more"] if len(every) > most else []
    return f"[{', '.join([*shown, *more])}]"


def any_of(names: Sequence[str]) -> str:
    """Return `a`, `a or b` or `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def similar(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to `word`, ignoring case and dashes; None if none is similar.

    >>> similar("BATCH-SIZE", ["batch_size", "seed"]), similar("xyzzy", ["seed"])
    ('batch_size', None)
    """
    # the time of a comparison grows with the product of the lengths
    known = {
        _plain(name): name for name in itertools.islice(candidates, _MOST_COMPARED) if len(name) <= _LONGEST_COMPARED
    }
    near = difflib.get_close_matches(_plain(word), known, n=1, cutoff=cutoff) if len(word) <= _LONGEST_COMPARED else []
    return known[near[0]] if near else None


def suggested(word: str, candidates: Iterable[object]) -> str:
    """Return a hint to follow an unknown name: the most similar known name, and all of them if they are few.

    >>> suggested("sed", ["seed", "epochs"])
    "; did you mean 'seed'? (known: seed, epochs)"
    """
    names = [str(one) for one in candidates]
    near = similar(word, names)
    hint = f"; did you mean {quoted(near)}?" if near else ""
    return hint + (f" (known: {', '.join(map(shortened, names))})" if 0 < len(names) <= 40 else "")


def _plain(word: str) -> str:
    return word.casefold().replace("-", "_")
