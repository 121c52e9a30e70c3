"""What an audit finds, one row a question, and what that says of the claim.

Each bound holds at the stated confidence by itself. A claim is called refuted only where a row refutes it at the
confidence that is left when what may go wrong is divided by the number of rows that can go wrong (Bonferroni): so all
rows of an audit together raise a false alarm with probability at most 1 - confidence.
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
    "B": "Noise of another law than the claimed one, and leaks that no canary's lane shows.",
    "C": "What the ledger does not name, and numbers of one run's streams that repeat beyond it.",
    "D": "Noise: whether what is added covers what neighbours differ in.",
}


@dataclass(frozen=True)
class Finding:
    """One question put to a run. `refutes` says whether the answer refutes the claim at a confidence.

    `epsilon`: the lower bound that it proves, at the audit's confidence. `control`: whether the same question refutes a
    claim that is wrong by a known factor; None where the answer is exact. `chance`: whether it can be wrong at all.
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
    """Every finding as plain data, with what it says once all others are counted."""
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
    """A finding whose p-value, and that of its control, are known; `told` is what was found and what is claimed."""
    return Finding(
        tier, name, *told, lambda confidence: p_value < 1 - confidence,
        control=lambda confidence: control < 1 - confidence, more={"p_value": p_value},
    )  # fmt: skip


def exact(tier: str, name: str, found: str, claimed: str, refuted: bool) -> Finding:
    """A finding that no chance takes part in."""
    return Finding(tier, name, found, claimed, lambda confidence: refuted, chance=False)
