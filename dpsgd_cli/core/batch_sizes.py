"""How many records a Poisson batch holds: the binomial law, drawn by exact integer arithmetic.

Not here: which records (`sampling.py`), where the random bits come from (`streams.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

BITS = 512
_SCALE = 192
_MOST_RECORDS = 1 << 40


class BatchSizes:
    """The law Binomial(N, B / N) as a table of whole numbers; made once, then a draw is one search in it.

    Notation: N records, B the expected size, q = B / N as a fraction, u_k = 2^192 p_k / p_m with p_k the probability
    of size k and m the most likely size.

    Guarantee: the law of `draw` of 512 uniform bits is within 2^-100 of Binomial(N, q) in total variation, for
    N <= 2^40. Proof. The table holds w_m = 2^192 and, outwards from m, w_(k+1) = floor(w_k r_k) with the ratio
    r_k = (N - k) B / ((k + 1) (N - B)) <= 1 of whole numbers (downwards its inverse), until w is 0. So
    0 <= u_k - w_k <= |k - m| <= N, and where the table ends u is at most N and grows no more. Hence
    sum |u_k - w_k| <= N (N + 1), while sum u_k >= 2^192: the normalised laws differ by at most
    2 N (N + 1) / 2^192 < 2^-110. `draw` maps 2^512 equally likely numbers onto the W <= (N + 1) 2^192 units of the
    table, which gives each unit its share to 1 / 2^512, so all of them to less than 2^-270.

    What that means for a guarantee. A batch of this size, filled with a uniform set of records, is within 2^-100 of
    independent inclusions with probability q: given their number, those are a uniform set. T steps are within T 2^-100,
    on either of two neighbouring data sets, so (epsilon, delta) of exact Poisson sampling becomes
    (epsilon, delta + (1 + e^epsilon) T 2^-100). Sampling record by record, or by geometric gaps, with uniforms of 53
    bits has no such bound: a gap's law is off by 2^-53 at each of its millions of likely values.

    >>> BatchSizes(4, 2).draw(2**511)
    2
    """

    def __init__(self, records: int, expected: int) -> None:
        if not 0 < expected <= records <= _MOST_RECORDS:
            raise ValueError(f"expected size {expected} of {records} records; give 0 < size <= records <= 2^40")
        most_likely = min((records + 1) * expected // records, records)
        odds, against = expected, records - expected
        below: list[int] = []
        above: list[int] = []
        weight, size = 1 << _SCALE, most_likely
        while size > 0 and (weight := weight * size * against // ((records - size + 1) * odds)):
            below.append(weight)
            size -= 1
        self._least = size
        weight, size = 1 << _SCALE, most_likely
        while size < records and (weight := weight * (records - size) * odds // ((size + 1) * against)):
            above.append(weight)
            size += 1
        self._cumulative = list(accumulate([*reversed(below), 1 << _SCALE, *above]))

    def draw(self, bits: int) -> int:
        """The size that `bits`, uniform on 0..2^512 - 1, stand for."""
        return self._least + bisect_right(self._cumulative, bits * self._cumulative[-1] >> BITS)

    def probability(self, size: int) -> float:
        """Of `size` under `draw`, rounded to a float only here."""
        place = size - self._least
        if not 0 <= place < len(self._cumulative):
            return 0.0
        weight = self._cumulative[place] - (self._cumulative[place - 1] if place else 0)
        return weight / self._cumulative[-1]


@lru_cache(maxsize=8)
def batch_sizes(records: int, expected: int) -> BatchSizes:
    """The table of (records, expected), which all trials of a pack share."""
    return BatchSizes(records, expected)
