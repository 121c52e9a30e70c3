"""What preprocessing, training and looks at validation records cost, each by itself. The total is in `assemble.py`.

Epsilons of parts do not add up to that of the whole; rhos do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsgd_cli.privacy.budget import rho_of
from dpsgd_cli.privacy.ledger import Ledger
from dpsgd_cli.privacy.mechanism import Release, merge
from dpsgd_cli.results import prices
from dpsgd_cli.results.result import Row


def parts(ledgers: Sequence[Ledger], accountant: str, delta: float) -> Row:
    """Epsilon at `delta` and rho of each label (`pca`, `gradient`, ...) of mechanisms, in the most expensive trial.

    None stands for no finite epsilon, or for releases that have no rho.
    """
    known: dict[tuple[Release, ...], tuple[float | None, float | None]] = {}
    found: dict[str, list[tuple[float | None, float | None]]] = {}
    for ledger in ledgers:
        by_label: dict[str, list[Release]] = {}
        for entry in ledger.entries:
            by_label.setdefault(entry.release.mechanism.label, []).append(entry.release)
        for label, releases in by_label.items():
            key = tuple(merge(releases))
            if key not in known:
                epsilon = prices.epsilon(accountant, key, delta)
                known[key] = (epsilon if math.isfinite(epsilon) else None, rho_of(key))
            found.setdefault(label, []).append(known[key])
    return {
        label: {"epsilon": _largest([e for e, _ in prices]), "rho": _largest([rho for _, rho in prices])}
        for label, prices in found.items()
    }


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
