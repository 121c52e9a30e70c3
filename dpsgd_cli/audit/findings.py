"""Options of an audit, its findings, and the verdict on the claim.

Each bound holds at the stated confidence by itself. For the verdict, the probability of error (1 - confidence) is
divided by the number of findings that depend on chance (Bonferroni). A finding refutes the claim only at the resulting
confidence, so an audit refutes a true claim with probability at most 1 - confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TIERS = {
    "A": "without assumptions",
    "B": "the family of the claim",
    "C": "the parts of the mechanism",
    "D": "neighbouring data, the same randomness",
}
UNSEEN = {
    "A": "How private a run is: only how badly these canaries' membership could be hidden. Even of a claim that is"
    " exactly true it finds less than half.",
    "B": "Noise of another law than the claimed one, and leaks that no canary's coordinate shows.",
    "C": "What the ledger does not name, and numbers of one run's streams that repeat beyond it.",
    "D": "Noise: whether what is added covers what neighbours differ in.",
}


@dataclass(frozen=True)
class AuditSize:
    """Size of an audit: trials, canaries in each trial, and about how many rows all trials may process in all steps."""

    trials: int
    canaries: int
    rows: float


USUAL = AuditSize(trials=100, canaries=100, rows=1e8)
QUICK = AuditSize(trials=20, canaries=100, rows=3e5)


@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit. `quick` decides numbers that are None. `curves`: keep the curves of the picture.

    `reads_file`: also compare what one record moves in the recipe's own file, which is read without noise.
    """

    tiers: tuple[str, ...] = tuple(TIERS)
    confidence: float = 0.95
    trials: int | None = None
    canaries: int | None = None
    quick: bool = False
    curves: bool = True
    reads_file: bool = True
    say: Callable[[str], None] = lambda text: None

    @property
    def size(self) -> AuditSize:
        usual = QUICK if self.quick else USUAL
        return AuditSize(self.trials or usual.trials, self.canaries or usual.canaries, usual.rows)


@dataclass(frozen=True)
class Finding:
    """One question about a run. `refutes` returns whether the answer refutes the claim at a given confidence.

    - `epsilon`: the lower bound that the answer proves at the audit's confidence.
    - `control`: whether the same question refutes a claim that is wrong by a known factor; None if the answer is exact.
    - `chance`: whether the answer can be wrong by chance.
    """

    tier: str
    name: str
    found: str
    claimed: str
    refutes: Callable[[float], bool]
    chance: bool = True
    epsilon: float | None = None
    control: Callable[[float], bool] | None = None
    more: dict[str, Any] = field(default_factory=dict)


def judged(findings: Sequence[Finding], confidence: float) -> list[dict[str, Any]]:
    """Return every finding as plain data, with the verdict at the confidence that all findings share."""
    many = max(1, sum(one.chance for one in findings))
    each = 1 - (1 - confidence) / many
    return [
        {
            "tier": one.tier,
            "name": one.name,
            "found": one.found,
            "claimed": one.claimed,
            "refuted": one.refutes(each),
            **({} if one.epsilon is None else {"epsilon": one.epsilon}),
            **({} if one.control is None else {"control_refuted": one.control(each)}),
            **one.more,
        }
        for one in findings
    ]


def by_p_value(tier: str, name: str, told: tuple[str, str], p_value: float, control: float) -> Finding:
    """Return a finding with the p-values of the claim and its control. `told`: what was found, and what is claimed."""
    return Finding(
        tier, name, *told, lambda confidence: p_value < 1 - confidence,
        control=lambda confidence: control < 1 - confidence, more={"p_value": p_value},
    )  # fmt: skip


def exact(tier: str, name: str, found: str, claimed: str, refuted: bool) -> Finding:
    """Return a finding that does not depend on chance."""
    return Finding(tier, name, found, claimed, lambda confidence: refuted, chance=False)
