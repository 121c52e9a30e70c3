"""Options of an audit: tiers, confidence, and size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpsgd_cli.audit.findings import TIERS
from dpsgd_cli.audit.stage import Size

USUAL = Size(trials=100, canaries=100, rows=1e8)
QUICK = Size(trials=20, canaries=100, rows=3e5)


@dataclass(frozen=True)
class Options:
    """Options of an audit. `quick` decides numbers that are None. `curves`: keep the curves of the picture."""

    tiers: tuple[str, ...] = tuple(TIERS)
    confidence: float = 0.95
    trials: int | None = None
    canaries: int | None = None
    quick: bool = False
    curves: bool = True
    say: Callable[[str], None] = lambda text: None

    @property
    def size(self) -> Size:
        usual = QUICK if self.quick else USUAL
        return Size(self.trials or usual.trials, self.canaries or usual.canaries, usual.rows)
