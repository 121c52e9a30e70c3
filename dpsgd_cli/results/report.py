"""Report of a result: `report.md` and `report.html` beside it, each a self-contained page.

A page uses only the public part of `result.json`, the ledger and `history.csv`, nothing marked `nonprivate_`, so it may
be published with the model. It is written after the result, whose hashes do not cover it. `dpsgd report` checks the
files of the result and writes the page again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpsgd_cli.accounting.ledger import priced_parts, read_entries
from dpsgd_cli.accounting.statement import Composition
from dpsgd_cli.accounting.tradeoff import LEAST_ERROR, Attacker, strongest
from dpsgd_cli.common.text_format import epsilon_text, metric_text
from dpsgd_cli.engine.metrics import in_words, is_of_class, usual_metric
from dpsgd_cli.engine.settings import MOST_NAMED
from dpsgd_cli.errors import UnsupportedMechanism
from dpsgd_cli.evaluation.estimates import WHOLE
from dpsgd_cli.results import guarantee, pictures, prices, reading, shapes, store, summary
from dpsgd_cli.results.document import Block, Bullets, Cards, Folded, Heading, Picture, TableBlock, Text, html, markdown
from dpsgd_cli.results.files import write_whole
from dpsgd_cli.results.result import NONPRIVATE, Row, public
from dpsgd_cli.results.summary import NOISY, mean_text, of_constant, point_text

NAMES = ("report.md", "report.html")
_CONSTANT, _GAPS = "constant_", "calibration_gap_"


@dataclass(frozen=True)
class _Read:
    """A result as the page uses it: without anything marked as non-private.

    `is_copy`: the result is a public copy, without marked fields.
    """

    name: str
    document: Row
    rows: list[dict[str, str]]
    is_copy: bool
    attacker: Attacker | str | None
    origin: str
    audit: Row | None = None

    @property
    def privacy(self) -> Row:
        found: Row = self.document["privacy"]
        return found

    @property
    def private(self) -> bool:
        return self.privacy["accountant"] is not None


def write(directory: Path) -> list[Path]:
    """Write both pages of the finished result in `directory`, and return their paths.

    Raises DataError if the result was changed after it was written, or claims less than its ledger costs.
    """
    for name, text in pages(directory).items():
        write_whole(reading.place(directory, name), text)
    return [directory / name for name in NAMES]


def pages(directory: Path) -> dict[str, str]:
    """Return the text of each page of the finished result in `directory`. Raises as `write` does."""
    found, explained = _read(directory), shapes.read(directory)
    curves = _curves(found)
    picture = _roc(found) or ([] if explained is None else shapes.quality(explained.curves))
    behind = [
        *_statement(found),
        *_metrics(found),
        *([] if explained is None else shapes.blocks(explained)),
        *(curves if picture else []),
        *_chosen(found),
    ]
    picture = picture or curves
    blocks = [*_head(found), Cards([*([picture] if picture else []), _advice(found)]), *_folded(behind)]
    return dict(zip(NAMES, (markdown(blocks), html(blocks)), strict=True))


def _advice(found: _Read) -> list[Block]:
    """Return what to know before a result is published, and how to check it, in a few lines."""
    declared = "Not protected, because declared public: what is listed below."
    shared = (
        "Share the folder that `dpsgd report FOLDER --publish DIR` makes: the original also holds values that"
        " were computed without noise."
    )
    if found.private and found.document["provenance"]["seed"] is not None:
        shared = f"Do not publish it: this is {guarantee.EXPERIMENT}, and the seed is in the recipe."
    again = "Each further training on the same data adds to what this one cost."
    checks = [
        "`dpsgd check FOLDER`, with the folder of this page, prices the ledger again and compares it with the recipe,"
        " the page and the code.",
        "`dpsgd account FOLDER` states the price by every accountant that applies.",
        *["`dpsgd account FOLDER --trials all` prices all trials."] * (len(found.document["trials"]) > 1),
        *["`dpsgd audit FOLDER` attacks trainings of the same recipe."]
        * (not found.is_copy and found.privacy.get("start") is None),
    ]
    checks.append("Each hazard of NIST SP 800-226 has a row in `docs/checking-a-claim.md` of dpsgd, with its answer.")
    if not found.private:
        return [Heading("Before you publish"), Text("Keep it to yourself, unless the training data are public.")]
    hidden = (
        f"Never publish fields named `{NONPRIVATE}...` of `result.json`, `trials.csv` and `history.csv`, or"
        " checkpoints: they were computed from training records without noise."
    )
    known = found.privacy["declarations"]
    publish = [shared, *([] if found.is_copy else [hidden]), *([declared] if known else []), again]
    return [Heading("Before you publish"), Bullets(publish), Heading("How to check it"), Bullets(checks)]


def _folded(blocks: Sequence[Block]) -> list[Block]:
    """Return the sections that begin with a heading as folded ones."""
    found: list[Block] = []
    for block in blocks:
        if isinstance(block, Heading):
            found.append(Folded(block.text, []))
        else:
            last = found[-1]
            assert isinstance(last, Folded)
            found[-1] = Folded(last.title, [*last.blocks, block])
    return found


def is_written(directory: Path) -> bool:
    """Return whether the result in `directory` has both pages."""
    return all((directory / name).is_file() for name in NAMES)


def _read(directory: Path) -> _Read:
    document = store.read_whole(directory)
    prices.refuse_false(directory, document)
    rows = pictures.read_history(directory / "history.csv")
    private = document["privacy"]["accountant"] is not None
    name = directory.resolve().name
    attacker = _attacker(directory / "ledger.jsonl") if private else None
    if document["privacy"].get("start") is not None:
        attacker = "of a training and the earlier result that it started from, only epsilon at a delta is proved."
    origin = summary.origin(document, directory)
    is_copy = not document[f"{NONPRIVATE}files"]
    return _Read(name, public(document), rows, is_copy, attacker, origin, store.read_audit(directory))


def _attacker(ledger: Path) -> Attacker | str:
    """Return the best attacker on the trial that reveals most; or the reason why none is known."""
    try:
        trials = Composition.of(map(priced_parts, read_entries(ledger).values()))
        return strongest([curve.attacker() for curve in trials.curves(LEAST_ERROR)])
    except UnsupportedMechanism as refusal:
        return str(refusal)


def _head(found: _Read) -> list[Block]:
    """Return the verdict: who is protected, what an attacker gains, how good the model is, and what is wrong."""
    privacy = found.privacy
    warned = [f"Warning: {text}" for text in found.document["warnings"]]
    uncovered = [f"NOT covered: {step}" for step in privacy.get("uncovered_steps", [])]
    strength = [Text(summary.strength(privacy))] if found.private else []
    return [
        Heading(summary.headline(found.document), 1),
        Text(found.origin),
        summary.cards(found.document, found.attacker),
        *strength,
        *([Bullets([*warned, *uncovered])] if warned or uncovered else []),
    ]


def _statement(found: _Read) -> list[Block]:
    """Describe the guarantee: who is protected from what, the meaning of the numbers, and the assumptions."""
    privacy = found.privacy
    if not found.private:
        return [
            Heading("Who is protected from what"),
            Text(
                "This model was trained without differential privacy. Nothing bounds what it reveals about its training"
                " records: they may be read from its weights or its answers. It serves as a comparison."
            ),
        ]
    released: list[Block] = []
    if told := guarantee.discovered(privacy):
        released = [Heading("What was released of private columns"), Bullets(told)]
    return [
        Heading("Who is protected from what"),
        Text(f"Epsilon {guarantee.epsilon_words(privacy)} ({guarantee.neighbours(privacy)})."),
        Text(guarantee.protected(privacy)),
        Text(guarantee.NOT_HIDDEN),
        Heading("What epsilon and delta mean here"),
        *map(Text, guarantee.meaning(privacy)),
        *_attacks(found.attacker, privacy),
        *_audit(found.audit),
        *released,
        Heading("What was declared public"),
        Bullets(privacy["declarations"] or ["Nothing."]),
        Heading("What is outside the statement"),
        Bullets(guarantee.outside(privacy)),
    ]


def _attacks(attacker: Attacker | str | None, privacy: Row) -> list[Block]:
    """Describe the trade-off curve by three numbers."""
    if not isinstance(attacker, Attacker):
        return [Text(f"Nothing more is known about attacks: {attacker}")]
    most = "" if attacker.exact else "at most "
    rows = [
        (f"{rate:.1%}", f"{most}{guarantee.percent(found)}", f"{rate:.1%}")
        for rate, found in attacker.true_positives.items()
    ]
    if attacker.exact:
        source = (
            "This is exact: what was published is mu-Gaussian-DP with mu ="
            f" {epsilon_text(attacker.mu)}, as hard to tell as one draw of N(0, 1) from one of N(mu, 1)."
        )
    else:
        source = (
            f"A bound, from the trade-off curve of the ledger's releases by `{attacker.proved_by}`. The nearest single"
            f" number: {guarantee.gaussian_words(attacker.mu, attacker.regret)}. An attack with both error rates at"
            " least that large does no better than one that tells a draw of N(0, 1) from one of N(mu, 1). The regret"
            " is the largest distance between the two curves, in error rates: below .01, mu says nearly everything."
        )
    unit = guarantee.one_unit(privacy)
    return [
        Text(
            f"An attacker who knows all other records looks at what was published, and decides whether {unit}"
            f" {'was' if privacy.get('unit') is None else 'were'} in the data (or which of two values it was). No"
            " attack has a higher true positive rate (TPR) at these false positive rates (FPR):"
        ),
        TableBlock(("FPR", "TPR of the strongest attack", "TPR of a blind guess"), rows),
        Text(
            f"If both cases are equally likely beforehand, the strongest attack is right in {most}"
            f"{guarantee.percent(attacker.right)} of cases, and a coin in 50%."
        ),
        Text(source),
    ]


def _audit(audit: Row | None) -> list[Block]:
    """Describe the findings of the recipe's audit, if there is one."""
    if audit is None:
        return []
    verdict = f"REFUTED ({'; '.join(audit['refuted_by'])})" if audit["refuted"] else "not refuted"
    bounds = ", ".join(f"{tier} {bound:.3f}" for tier, bound in audit["lower_bounds"].items())
    lower = f" Lower bounds on epsilon, by tier: {bounds}." if bounds else ""
    tests = f"{len(audit['findings'])} tests on trainings by this recipe, with random records"
    return [Text(f"Audited: {verdict}, at confidence {audit['confidence']:.0%}, by {tests}.{lower}")]


_OF_GROUPS = ("accuracy", "sensitivity", "specificity", "auc", "calibration_gap", "log_loss", "mae", "rmse")
"""Metrics of the table by group."""


def _privately_measured(found: _Read) -> list[Block]:
    """Return the metrics on private held-out records, with 95% intervals; nothing if there are none."""
    released = found.document.get("evaluation")
    if not released:
        return []
    first, several = released[0], f" of trial 0 of {len(released)}" if len(released) > 1 else ""
    rows = [
        [
            name.replace("_", " "),
            point_text(point),
            _interval(low, high),
            of_constant(first, name),
        ]
        for name, (point, low, high) in first["metrics"].items()
        if not name.startswith(_GAPS)
    ]
    gaps = "; ".join(_cell(one) for name, one in first["metrics"].items() if name.startswith(_GAPS))
    by_part = (
        [Text(f"Calibration gap, by parts of the predicted probability from low to high: {gaps}.")] if gaps else []
    )
    unit = first["unit"]
    clamp = ""
    if first["clamp"] is not None:
        clamp = (
            f" No error counts as more than {metric_text(first['clamp'])}, in intervals, too: larger errors, of few"
            " records, would make MAE and RMSE larger and R2 smaller by any amount."
        )
    means = " A metric is a mean over users of the means of their rows." if unit == "users" else ""
    positive = f" The positive class is {first['classes'][1]}." if first["kind"] == "two-classes" else ""
    told = (
        f"Measured{several} on about {max(first['records'], 0):.0f} held-out {unit}, which are private, by one noisy"
        " release in parallel with the training. It costs nothing more. The intervals hold the metric on new records"
        f" with probability 95%, noise included.{means}{clamp}{positive}"
    )
    if first["kind"] == "classes" and not first["constants"]:
        told += f" There is no baseline: it follows from a confusion matrix, which is for at most {MOST_NAMED} classes."
    table = TableBlock(("metric", "model", "95% interval", "baseline (best constant answer)"), rows)
    return [Heading("How good the model is"), Text(told), table, *by_part, *_confusion(first), *_by_group(first)]


def _interval(low: float, high: float) -> str:
    return f"{metric_text(low)} to {metric_text(high)}"


def _cell(estimate: Sequence[float | None]) -> str:
    """Return an estimate as `point (low to high)`."""
    point, low, high = estimate
    assert low is not None and high is not None
    if (low, high) in WHOLE:
        return NOISY
    return _interval(low, high) if point is None else f"{metric_text(point)} ({_interval(low, high)})"


def _confusion(measured: Row) -> list[Block]:
    """Return the confusion matrix: for each true class, the share that each class is predicted for; and F1 scores."""
    table = measured.get("confusion")
    if not table:
        return []
    names = measured["classes"]
    rows = [
        [name, *map(_cell, row), _cell(f1)] for name, row, f1 in zip(names, table, measured["f1_by_class"], strict=True)
    ]
    told = (
        "Share of the records of each true class (rows) for which each class is predicted (columns), and the class's F1"
        " score:"
    )
    return [Text(told), TableBlock(("true class", *names, "F1"), rows)]


def _roc(found: _Read) -> list[Block]:
    """Return a picture of the released ROC curve with its 95% intervals; nothing if there is none."""
    released = found.document.get("evaluation")
    points = released[0].get("curve") if released else None
    if not points:
        return []
    known = sorted((1 - of[0], *one) for _, one, of in points if one[0] is not None and of[0] is not None)
    return shapes.roc([(0.0, 0.0, 0.0, 0.0), *known, (1.0, 1.0, 1.0, 1.0)], "private held-out records, with intervals")


def _by_group(measured: Row) -> list[Block]:
    """Return a table for each column by whose values held-out records were measured."""
    blocks: list[Block] = []
    for column, values in measured.get("groups", {}).items():
        names = [name for name in _OF_GROUPS if name in next(iter(values.values()))["metrics"]]
        rows = [
            [value or "(missing)", f"about {max(one['records'], 0):.0f}", *map(_cell, map(one["metrics"].get, names))]
            for value, one in values.items()
        ]
        told = (
            f"By {column}, with 95% intervals. Intervals that overlap show no difference; an interval as wide as the"
            " metric's range says nothing."
        )
        header = (column, measured["unit"], *(name.replace("_", " ") for name in names))
        blocks += [Text(told), TableBlock(header, rows)]
    return blocks


def _metrics(found: _Read) -> list[Block]:
    if measured := _privately_measured(found):
        return measured
    metrics = found.document["metrics"]
    names = [name for name in metrics if not name.startswith(_CONSTANT)]
    if not names:
        return []
    trials = len(found.document["trials"])
    several = f"Means over {trials} trials with 95% intervals. " if trials > 1 else ""
    beside = any(name.startswith(_CONSTANT) for name in metrics)
    of_all: list[list[str]] = []
    of_class: list[list[str]] = []
    for name in names:
        constant = metrics.get(_CONSTANT + name.partition("_")[2])
        best = "" if constant is None else mean_text(constant)
        row = [in_words(name), mean_text(metrics[name]), *([best] if beside else [])]
        (of_class if is_of_class(name) else of_all).append(row)
    told = f"{several}Measured without noise on records that are declared public."
    header = ("metric", "model", *(["majority-class (mean, or median for absolute errors) baseline"] if beside else []))
    by_class: list[Block] = [Text("By class:"), TableBlock(header, of_class)] if of_class else []
    return [Heading("How good the model is"), Text(told), TableBlock(header, of_all), *by_class]


def _curves(found: _Read) -> list[Block]:
    """Show epsilon and the usual metric by epoch."""
    names = list(found.rows[0]) if found.rows else []
    metric = usual_metric(names)
    columns = {name: pictures.by_epoch(found.rows, name) for name in ("epsilon", metric) if name is not None}
    panels = {_axis(found, name): values for name, values in columns.items() if values}
    if not panels:
        return []
    picture = Picture(pictures.draw_curves(panels), "curves by epoch")
    return [Heading("Epoch by epoch"), picture, Text("The numbers are in `history.csv`.")]


def _axis(found: _Read, name: str) -> str:
    if name != "epsilon":
        return in_words(name)
    return "epsilon spent (not the guarantee)" if found.privacy.get("spent") is not None else "epsilon"


def _chosen(found: _Read) -> list[Block]:
    """List the settings that the recipe leaves `auto`."""
    chosen = found.document["provenance"].get("chosen") or {}
    if not chosen:
        return []
    rows = [(f"`{key}`", json.dumps(one["value"]).replace('"', ""), one["why"]) for key, one in chosen.items()]
    return [
        Heading("What was set automatically"),
        Text("These settings are `auto` in the recipe. They follow from public facts alone, so they cost nothing."),
        TableBlock(("setting", "value", "why"), rows),
    ]
