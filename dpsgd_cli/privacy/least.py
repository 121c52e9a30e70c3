"""What is stated where nobody named an accountant: the least of the upper bounds that apply.

Each bound is a theorem about the same releases, so the least of them is true. Releases must be fixed beforehand: of
those that are chosen on the way, the theorem of the filter that admits them is all that is known (`ledger.bounding`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

from dpsgd_cli.errors import UnsupportedMechanism
from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.accountants.base import Accountant, number
from dpsgd_cli.privacy.mechanism import Mechanism, Release


class Least(Accountant):
    """Those of the accountants called `names` that prove what they state, as one; what one refuses, others price."""

    by_divergence = True
    name = "least"
    note = "least upper bound"

    def __init__(self, names: Sequence[str] = accountants.USUAL) -> None:
        self._names = names

    @cached_property
    def _all(self) -> list[Accountant]:
        named = [accountants.get(name) for name in self._names]
        return [accountant for accountant in named if accountant.bound == "upper"]

    def refusal(self, mechanism: Mechanism) -> str | None:
        reasons = [accountant.refusal(mechanism) for accountant in self._all]
        return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        return self.best(releases, delta)[0]

    def best(self, releases: Sequence[Release], delta: float) -> tuple[float, str]:
        """The least epsilon, and the name of the accountant that proves it.

        Raises UnsupportedMechanism, with the reasons of all, when none covers the releases.
        """
        found: list[tuple[float, str]] = []
        reasons: list[str] = []
        for accountant in self._all:
            try:
                found.append((number(accountant, partial(accountant.epsilon, releases, delta)), accountant.name))
            except UnsupportedMechanism as refusal:
                reasons.append(str(refusal))
        if not found:
            raise UnsupportedMechanism("\n".join(dict.fromkeys(reasons)))
        return min(found)

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        found = []
        for accountant in self._all:
            try:
                found.append(number(accountant, partial(accountant.delta, releases, epsilon)))
            except UnsupportedMechanism:
                continue
        return min(found, default=math.inf)
