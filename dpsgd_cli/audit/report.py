"""Files of an audit: `audit.json`, a page in words, and pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from dpsgd_cli.audit.findings import TIERS
from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.results.document import Block, Bullets, Heading, Table, Text, markdown
from dpsgd_cli.results.files import to_json, write_whole
from dpsgd_cli.results.pictures import COLOURS
from dpsgd_cli.results.store import AUDIT

_OTHER_SEED = "seed=1000"


def write(document: dict[str, Any], directory: Path) -> list[Path]:
    """Write all files into `directory`, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = draw(document, directory)
    write_whole(directory / "audit.md", markdown(page(document, [path.name for path in drawn])), owner_only=True)
    write_whole(directory / AUDIT, to_json(document), owner_only=True)
    return [directory / AUDIT, directory / "audit.md", *drawn]


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
        weak = [row["name"] for row in rows if row.get("control_refuted") is False]
        if weak:
            told.append(f"            too few observations to refute a wrong claim: {', '.join(weak)}")
    if document["refuted"] and not any(row["refuted"] and row["tier"] == "D" for row in document["findings"]):
        told.append(
            f"  at most {1 - document['confidence']:.2g} of audits refute a true claim by chance: repeat the audit with"
            f" another seed ({_OTHER_SEED})"
        )
    told += [f"  not audited: {reason}" for reason in document["not_audited"]]
    return told


def verdict(document: dict[str, Any]) -> str:
    if document["refuted"]:
        return f"REFUTED ({'; '.join(document['refuted_by'])})"
    return "not refuted" if document["findings"] else "nothing was audited"


def page(document: dict[str, Any], pictures: list[str]) -> list[Block]:
    claim, training = document["claim"], document.get("training")
    blocks: list[Block] = [
        Heading(f"Audit of {document['name']}: {verdict(document)}", 1),
        Text(
            f"The claim: epsilon {epsilon_text(claim['epsilon'])} at delta {claim['delta']:g} ({claim['adjacency']}, by"
            f" `{claim['accountant']}`). Each bound below holds at {document['confidence']:.0%}; what is called refuted"
            " is so at that confidence for all rows together."
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
    blocks += [Text(f"![{name}]({name})") for name in pictures if name.endswith(".svg")]
    for tier, name in TIERS.items():
        rows = [row for row in document["findings"] if row["tier"] == tier]
        if not rows:
            continue
        table = [[row["name"], row["found"], row["claimed"], _said(row)] for row in rows]
        blocks += [
            Heading(f"Tier {tier}: {name}"),
            Table(("part", "found", "claimed", "verdict"), table),
            Text(f"What this tier cannot see: {document['cannot_see'][tier]}"),
        ]
    if document["not_audited"]:
        blocks += [Heading("Not audited"), Bullets(document["not_audited"])]
    return blocks


def _said(row: dict[str, Any]) -> str:
    if row["refuted"]:
        return "REFUTED"
    return "too little to tell" if row.get("control_refuted") is False else "stands"


def draw(document: dict[str, Any], directory: Path) -> list[Path]:
    """Draw the trade-off curves as SVG and PNG, and return the files; none if no canary was scored.

    The picture shows false negatives over false positives. No attack should get below the claim's curve. The box
    contains both true rates at the stated confidence. The dashed curve is that of the last member of the claim's family
    that the box does not refute.
    """
    found = document.get("membership")
    if found is None or "curves" not in found:
        return []
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    claim, made = document["claim"], []
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpsgd", "font.size": 10}):
        figure = Figure(figsize=(5.6, 5.2))
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        curves = found["curves"]
        label = f"claimed: epsilon {claim['epsilon']:.3g}"
        axes.plot(curves["false_positive"], curves["claimed"], color=COLOURS[0], label=label)
        axes.fill_between(curves["false_positive"], curves["claimed"], color=COLOURS[0], alpha=0.08, linewidth=0)
        bound = document["lower_bounds"].get("B")
        if bound is not None:
            axes.plot(curves["false_positive"], curves["refuted"], color=COLOURS[1], linestyle="--",
                      label=f"refuted up to: epsilon {bound:.3g}")  # fmt: skip
        rates, low, high = found["rates"], found["rates_at_least"], found["rates_at_most"]
        corner = (low["false_positive"], low["false_negative"])
        box = [high[name] - low[name] for name in ("false_positive", "false_negative")]
        axes.add_patch(Rectangle(corner, *box, color=COLOURS[2], alpha=0.35, linewidth=0,
                                 label=f"observed, {document['confidence']:.0%} each way"))  # fmt: skip
        axes.plot(rates["false_positive"], rates["false_negative"], "+", color="black")
        axes.plot([0, 1], [1, 0], color="grey", linewidth=0.8, linestyle=":", label="random guess")
        axes.set(xlabel="false positives", ylabel="false negatives", xlim=(0, 1), ylim=(0, 1))
        axes.set_title(f"{document['name']}: {'REFUTED' if document['refuted'] else 'not refuted'}")
        axes.legend(loc="upper right", frameon=False)
        axes.grid(alpha=0.3)
        figure.tight_layout()
        for ending in ("svg", "png"):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=ending, dpi=150, metadata={"Date": None} if ending == "svg" else {})
            made.append(directory / f"trade-off.{ending}")
            write_whole(made[-1], drawn.getvalue())
    return made
