"""Options of an audit, its findings, the verdict on the claim, and the files: `audit.json` and a page.

Each bound holds at the stated confidence by itself. For the verdict, the probability of error (1 - confidence) is
divided by the number of findings that depend on chance (Bonferroni). A finding refutes the claim only at the resulting
confidence, so an audit refutes a true claim with probability at most 1 - confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.results.document import Block, Bullets, Heading, TableBlock, Text, markdown
from dpsgd_cli.results.files import to_json, write_whole
from dpsgd_cli.results.store import AUDIT

TIERS = {
    "A": "without assumptions",
    "B": "the family of the claim",
    "C": "the parts of the mechanism",
    "D": "neighbouring data, the same randomness",
}
UNSEEN = {
    "A": "The true epsilon: the lower bound from these canaries is less than half of it even if the claim is exact.",
    "B": "Noise of another distribution than the claimed one, and leaks outside the canaries' coordinates.",
    "C": "Releases that the ledger does not name, and random numbers that repeat or follow another law.",
    "D": "Whether the noise is large enough to cover the difference between neighbours.",
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
    """Options of an audit. `quick` decides numbers that are None.

    `reads_file`: also compare what one record moves in the recipe's own file, which is read without noise.
    """

    tiers: tuple[str, ...] = tuple(TIERS)
    confidence: float = 0.95
    trials: int | None = None
    canaries: int | None = None
    quick: bool = False
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
    - `chance`: whether the answer can be wrong by chance.
    """

    tier: str
    name: str
    found: str
    claimed: str
    refutes: Callable[[float], bool]
    chance: bool = True
    epsilon: float | None = None
    p_value: float | None = None


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
            **({} if one.p_value is None else {"p_value": one.p_value}),
        }
        for one in findings
    ]


def by_p_value(tier: str, name: str, found: str, claimed: str, p_value: float) -> Finding:
    """Return a finding that refutes the claim where the `p_value` of what was found, if the claim is true, is small."""
    return Finding(tier, name, found, claimed, lambda confidence: p_value < 1 - confidence, p_value=p_value)


def exact_finding(tier: str, name: str, found: str, claimed: str, refuted: bool) -> Finding:
    """Return a finding that does not depend on chance."""
    return Finding(tier, name, found, claimed, lambda confidence: refuted, chance=False)


def write(document: dict[str, Any], directory: Path) -> list[Path]:
    """Write all files into `directory`, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = {AUDIT: to_json(document), "audit.md": markdown(page(document))}
    for name, text in texts.items():
        write_whole(directory / name, text, owner_only=True)
    return [directory / name for name in texts]


def lines(document: dict[str, Any]) -> list[str]:
    """Return the lines that the command prints."""
    claim, told = document["claim"], [f"{document['name']}: {verdict(document)}"]
    told.append(
        f"  claim     epsilon {epsilon_text(claim['epsilon'])} at delta {claim['delta']:g} ({claim['adjacency']})"
    )
    for tier, name in TIERS.items():
        rows = [row for row in document["findings"] if row["tier"] == tier]
        for row in rows if tier in "AB" else [row for row in rows if row["refuted"]]:
            told.append(f"  tier {tier}    {row['name']}: {row['found']}{' - REFUTED' if row['refuted'] else ''}")
        if rows and tier in "CD":
            well = sum(not row["refuted"] for row in rows)
            told.append(f"  tier {tier}    {name}: {well} of {len(rows)} as claimed")
    if document["refuted"] and not any(row["refuted"] and row["tier"] == "D" for row in document["findings"]):
        told.append(
            f"  at most {1 - document['confidence']:.2g} of audits refute a true claim by chance: repeat the audit with"
            f" another seed (seed=1000)"
        )
    told += [f"  not audited: {reason}" for reason in document["not_audited"]]
    return told


def verdict(document: dict[str, Any]) -> str:
    if document["refuted"]:
        return f"REFUTED ({'; '.join(document['refuted_by'])})"
    return "not refuted" if document["findings"] else "nothing was audited"


def page(document: dict[str, Any]) -> list[Block]:
    claim, training = document["claim"], document.get("training")
    blocks: list[Block] = [
        Heading(f"Audit of {document['name']}: {verdict(document)}", 1),
        Text(
            f"The claim: epsilon {epsilon_text(claim['epsilon'])} at delta {claim['delta']:g} ({claim['adjacency']}, by"
            f" `{claim['accountant']}`). Each bound below holds at {document['confidence']:.0%}. A row"
            " is called refuted only if that holds at the same confidence for the whole table, however long it is."
        ),
    ]
    if training is not None:
        changes = ", ".join(f"{name} {value}" for name, value in training["changed"].items()) or "nothing"
        blocks.append(
            Text(
                f"{training['trials']} trials with {training['canaries']} canaries each: {training['in']} in,"
                f" {training['out']} out. The rows are random. Also changed: {changes}. The claim at that size:"
                f" epsilon {epsilon_text(training['epsilon_audited'])}."
            )
        )
    for tier, name in TIERS.items():
        rows = [row for row in document["findings"] if row["tier"] == tier]
        if not rows:
            continue
        table = [[row["name"], row["found"], row["claimed"], "REFUTED" if row["refuted"] else "stands"] for row in rows]
        blocks += [
            Heading(f"Tier {tier}: {name}"),
            TableBlock(("part", "found", "claimed", "verdict"), table),
            Text(f"What this tier cannot see: {document['cannot_see'][tier]}"),
        ]
    if document["not_audited"]:
        blocks += [Heading("Not audited"), Bullets(document["not_audited"])]
    return blocks
