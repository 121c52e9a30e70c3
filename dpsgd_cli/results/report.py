"""Report of a result: `report.md` and `report.html` beside it, each a self-contained page.

A page uses only the public part of `result.json`, the ledger and `history.csv`, nothing marked `nonprivate_`, so it may
be published with the model. It is written after the result, whose hashes do not cover it. `dpsgd report` checks the
files of the result and writes the page again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, adjacency_label
from dpsgd_cli.accounting.ledger import read_entries, to_price
from dpsgd_cli.accounting.tradeoff import Attacker, best_attacker, percent, strongest
from dpsgd_cli.common.rounding import epsilon_text, interval_text
from dpsgd_cli.engine.metrics import in_words, less_is_better, usual_metric
from dpsgd_cli.errors import UnsupportedMechanism
from dpsgd_cli.results import audited, curves, reading, store
from dpsgd_cli.results.document import Block, Bullets, Commands, Heading, Picture, Table, Text, html, markdown
from dpsgd_cli.results.files import write_whole
from dpsgd_cli.results.guarantee import CHOSEN, NO_PRIVACY, epsilon_words
from dpsgd_cli.results.result import NONPRIVATE, Row, public, summarise

NAMES = ("report.md", "report.html")
_MOST_ROWS = 11
_CONSTANT = "constant_"
_MORE = "a larger budget, more records, fewer columns, or narrower public bounds"
_TRY = {
    "log_loss": f"{_MORE}; if one class is rare, average precision shows whether the model still orders records",
    "rmse": f"{_MORE}; for amounts that span orders of magnitude, data.target_transform: log",
    "accuracy": f"{_MORE}; if one class is rare, look at average precision and recall",
}
"""Metrics by which a model is compared with a constant, the first that a result has, and what to try."""
_NOT_HIDDEN = (
    "What the data say of people in general is not hidden, and is what a model is for. It may tell something of"
    " somebody who was not in the data as well."
)
_SEVERAL = (
    "Somebody who has several records: what is said holds for one record at a time, and less for all of a person's."
)
_SEVERAL_USERS = "Somebody whose rows stand under several users: what is said holds for one user at a time."
_OUTSIDE = (
    "Everything else that was done with the same data: other runs, settings that were tried and chosen by results, a"
    " look at the records. Each has a price of its own (`dpsgd account FOLDER`, `dpsgd sweep`).",
    "Side channels: how long the training took, the memory of the machine, and that computers round the noise that they"
    " draw.",
)


@dataclass(frozen=True)
class _Read:
    """A result as the page uses it: without anything marked as non-private.

    `hidden` has the names of the marked columns and keys.
    """

    name: str
    document: Row
    rows: list[dict[str, str]]
    hidden: list[str]
    attacker: Attacker | str | None
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

    Raises DataError if the result was changed after it was written.
    """
    found = _read(directory)
    blocks = [
        *_statement(found),
        *_metrics(found),
        *_curves(found),
        *_chosen(found),
        *_not_to_publish(found),
        *_again(found),
    ]
    texts = (markdown(blocks), html(blocks))
    for name, text in zip(NAMES, texts, strict=True):
        write_whole(reading.place(directory, name), text)
    return [directory / name for name in NAMES]


def is_written(directory: Path) -> bool:
    """Return whether the result in `directory` has both pages."""
    return all((directory / name).is_file() for name in NAMES)


def _read(directory: Path) -> _Read:
    document = store.read_whole(directory)
    rows = curves.read(directory / "history.csv")
    private = document["privacy"]["accountant"] is not None
    marked = dict.fromkeys(name for row in (*rows[:1], *document["trials"][:1]) for name in row)
    marked |= dict.fromkeys(key for part in (document, document["metrics"], document["timing"]) for key in part)
    # a public copy has no marked columns, and its marked fields are empty
    hidden = [name for name in marked if name.startswith(NONPRIVATE) and document[f"{NONPRIVATE}files"]]
    name = directory.resolve().name
    attacker = _attacker(directory / "ledger.jsonl") if private else None
    return _Read(name, public(document), rows, hidden, attacker, audited.read(directory))


def _one(privacy: Row) -> str:
    """Return the words for what neighbouring data sets differ in."""
    return "a record" if privacy.get("unit") is None else "one person's rows"


def _neighbours(privacy: Row) -> str:
    return adjacency_label(privacy["adjacency"], privacy.get("unit"))


def _protected(privacy: Row) -> str:
    """Describe whom the guarantee protects, and what is hidden about them."""
    unit = privacy.get("unit")
    if unit is None:
        return f"Every single record of the training data. What is hidden is {NEIGHBOURS[privacy['adjacency']].hides}."
    return (
        f"Every user of the training data with all of their rows together: one person's rows, and not one record at a"
        f" time. Rows are one user's where `{unit['column']}` is the same. What is hidden is"
        f" {NEIGHBOURS[privacy['adjacency']].hides_of_users}."
    )


def _attacker(ledger: Path) -> Attacker | str:
    """Return the best attacker on the trial that reveals most; or the reason why none is known."""
    try:
        priced = {tuple(to_price(entries)) for entries in read_entries(ledger).values()}
        return strongest([best_attacker(releases) for releases in priced])
    except UnsupportedMechanism as refusal:
        return str(refusal)


def _statement(found: _Read) -> list[Block]:
    """Describe the guarantee: who is protected from what, the meaning of the numbers, and the assumptions."""
    if not found.private:
        return [
            Heading(f"{found.document['name']}: {NO_PRIVACY}", 1),
            Text(
                "This model was trained without differential privacy. What it tells of the records that it was trained"
                " on has no bound: records may be read from its weights or its answers. It serves as a comparison."
            ),
            *_warnings(found),
        ]
    privacy = found.privacy
    return [
        Heading(f"{found.document['name']}: what is guaranteed", 1),
        Text(f"Epsilon {epsilon_words(privacy)} ({_neighbours(privacy)})."),
        *_warnings(found),
        Heading("Who is protected from what"),
        Text(
            f"{_protected(privacy)}"
            " It is hidden from everybody who sees what was published, whatever else they know (all other records, the"
            " recipe, this program) and however long they compute."
        ),
        Text(_NOT_HIDDEN),
        Heading("What epsilon and delta mean here"),
        *_meaning(privacy),
        *_attacks(found.attacker, privacy),
        *_audit(found.audit),
        Heading("What was declared public"),
        Bullets(privacy["declarations"] or ["Nothing."]),
        Heading("What is outside the statement"),
        Bullets(
            [
                *(f"NOT covered: {step}" for step in privacy.get("uncovered_steps", [])),
                f"It is about {privacy['scope']}.",
                _SEVERAL if privacy.get("unit") is None else _SEVERAL_USERS,
                *_OUTSIDE,
                f"The noise is {privacy['noise_source']}.",
            ]
        ),
    ]


def _warnings(found: _Read) -> list[Block]:
    return [Bullets([f"Warning: {text}" for text in found.document["warnings"]])] if found.document["warnings"] else []


def _meaning(privacy: Row) -> list[Block]:
    epsilon, delta = privacy["epsilon"], privacy["delta"]
    if epsilon is None:
        return [Text("There is no finite epsilon at this delta: nothing bounds what was published.")]
    factor = epsilon_text(math.exp(epsilon)) if epsilon < 700 else "more than 10^304"
    told: list[Block] = [
        Text(
            f"Whatever may come of what was published: with {_one(privacy)} it is at most e^{epsilon_text(epsilon)} ="
            f" {factor} times as likely as without, plus delta = {delta:g} (one in {1 / delta:,.0f}), and the other way"
            f" round. Shown by the accountant `{privacy['accountant']}`."
        )
    ]
    if privacy.get("spent") is not None:
        told.append(Text(f"{CHOSEN[:1].upper()}{CHOSEN[1:]}."))
    return told


def _attacks(attacker: Attacker | str | None, privacy: Row) -> list[Block]:
    """Describe the trade-off curve by three numbers."""
    if not isinstance(attacker, Attacker):
        return [Text(f"Of attackers no more is known than that: {attacker}")]
    exact = attacker.mu is not None
    rows = [
        (f"{rate:.1%}", f"{'' if exact else 'at most '}{percent(found)}", f"{rate:.1%}")
        for rate, found in attacker.true_positives.items()
    ]
    told: list[Block] = [
        Text(
            f"An attacker who knows all other records looks at what was published and says whether {_one(privacy)}"
            f" {'was' if privacy.get('unit') is None else 'were'} there (or which of two values it was). Of those that"
            " were, the best attacker finds this share, for the false alarms that it may raise:"
        ),
        Table(("false positives", "true positives of the best attacker", "of a blind guess"), rows),
        Text(
            f"Where both are as likely beforehand, the best attacker is right in {'' if exact else 'at most '}"
            f"{percent(attacker.right)} of cases, and a coin in 50%."
        ),
    ]
    if attacker.mu is not None:
        told.append(
            Text(
                f"This is exact: what was published is mu-Gaussian-DP with mu = {_up(attacker.mu)}, as hard to tell as"
                " one draw of N(0, 1) from one of N(mu, 1)."
            )
        )
    else:
        told.append(Text(f"A bound, from the trade-off curve of the ledger's releases by `{attacker.proved_by}`."))
    return told


def _audit(audit: Row | None) -> list[Block]:
    """Describe the findings of the recipe's audit, if there is one."""
    if audit is None:
        return []
    verdict = f"REFUTED ({'; '.join(audit['refuted_by'])})" if audit["refuted"] else "not refuted"
    bounds = ", ".join(f"{tier} {bound:.3f}" for tier, bound in audit["lower_bounds"].items())
    lower = f" Epsilon is at least (by tier): {bounds}." if bounds else ""
    return [
        Text(
            f"Audited: {verdict}, at {audit['confidence']:.0%}; {len(audit['findings'])} questions were put to a"
            f" training by this recipe, on records of chance.{lower}"
        )
    ]


def _up(mu: float) -> str:
    return epsilon_text(mu)


def _metrics(found: _Read) -> list[Block]:
    metrics = found.document["metrics"]
    names = [name for name in metrics if not name.startswith(_CONSTANT)]
    if not names:
        return []
    trials = len(found.document["trials"])
    several = f"Means over {trials} trials with 95% intervals. " if trials > 1 else ""
    beside = any(name.startswith(_CONSTANT) for name in metrics)
    rows = []
    for name in names:
        constant = metrics.get(_CONSTANT + name.partition("_")[2])
        best = "" if constant is None else _metric(constant)
        rows.append([in_words(name), _metric(metrics[name]), *([best] if beside else [])])
    told = f"{several}Measured without noise on records that are declared public."
    header = ("metric", "of the model", *(["of the best constant answer"] if beside else []))
    return [Heading("How good the model is"), Text(told), Table(header, rows), *_no_better(metrics)]


def _no_better(metrics: Row) -> list[Block]:
    """Say if the model is no better than the best constant answer, by log loss, RMSE or else accuracy; what to try."""
    for name, hint in _TRY.items():
        model, constant = metrics.get(f"test_{name}"), metrics.get(f"{_CONSTANT}{name}")
        if model is None or constant is None or model["mean"] is None or constant["mean"] is None:
            continue
        gain = model["mean"] - constant["mean"]
        if (gain < 0) if less_is_better(f"test_{name}") else (gain > 0):
            return []
        words = in_words(f"test_{name}")
        return [Text(f"The model is no better than the best constant answer, by {words}. Try {hint}.")]
    return []


def _metric(metric: Row) -> str:
    return "none: not every trial stayed finite" if metric["mean"] is None else _interval(metric)


def _interval(metric: Row) -> str:
    return interval_text(metric["mean"], metric["ci95"]).replace("+-", "\u00b1")


def _curves(found: _Read) -> list[Block]:
    """Show epsilon and the usual metric by epoch: a picture, and some of its points as numbers."""
    names = list(found.rows[0]) if found.rows else []
    metric = usual_metric(names)
    columns = {name: curves.by_epoch(found.rows, name) for name in ("epsilon", metric) if name is not None}
    columns = {name: values for name, values in columns.items() if values}
    if not columns:
        return []
    titles = {name: _axis(found, name) for name in columns}
    epochs = sorted(set.union(*(set(values) for values in columns.values())))
    step = max(1, -(-(len(epochs) - 1) // (_MOST_ROWS - 1)))
    shown = [*epochs[:-1:step], epochs[-1]]
    rows = [
        [str(epoch), *(_point(values.get(epoch), name == "epsilon") for name, values in columns.items())]
        for epoch in shown
    ]
    return [
        Heading("Epoch by epoch"),
        Picture(curves.draw({titles[name]: values for name, values in columns.items()}), "curves by epoch"),
        Table(("epoch", *titles.values()), rows),
    ]


def _axis(found: _Read, name: str) -> str:
    if name != "epsilon":
        return in_words(name)
    return "epsilon spent (not the guarantee)" if found.privacy.get("spent") is not None else "epsilon"


def _point(values: Sequence[float] | None, epsilon: bool) -> str:
    if not values:
        return ""
    return epsilon_text(max(values)) if epsilon else _metric(summarise(values))


def _chosen(found: _Read) -> list[Block]:
    """List the settings that the recipe leaves `auto`."""
    chosen = found.document["provenance"].get("chosen") or {}
    if not chosen:
        return []
    rows = [(f"`{key}`", json.dumps(one["value"]).replace('"', ""), one["why"]) for key, one in chosen.items()]
    return [
        Heading("What was set by rule"),
        Text("The recipe leaves these `auto`. They follow from public facts alone, so they cost nothing."),
        Table(("setting", "value", "why"), rows),
    ]


def _not_to_publish(found: _Read) -> list[Block]:
    if not found.hidden:
        return []
    told = [
        f"What is named `{NONPRIVATE}...`: computed from training records without noise. Here: "
        + ", ".join(f"`{name}`" for name in found.hidden)
        + ", in `result.json`, `trials.csv` and `history.csv`.",
        "Checkpoints (`.*.checkpoint` beside the result) and TensorBoard's files: they hold the same, and the clock.",
    ]
    if not found.private:
        told.insert(0, "The model and all that was measured of it, unless the training data are public.")
    elif found.document["provenance"]["seed"] is not None:
        told.insert(
            0,
            "Anything, if the records need protection: the seed is written down, and who knows it can take the noise"
            " away. Train without `seed` for a model that is to be published.",
        )
    rest = "the model, `recipe.yaml`, `ledger.jsonl`, this page and the rest of those tables"
    if len(found.document["trials"]) > 1:
        rest = f"{rest}, of one trial; all trials together (their means, too) are another statement, see below"
    copied = f"`dpsgd report {found.name} --publish DIR` copies what may be handed on, where that is everything else."
    free = [Text(f"Covered by the statement: {rest}. {copied}")] if found.private else []
    return [Heading("What must not be published"), Bullets(told), *free]


def _again(found: _Read) -> list[Block]:
    """List the commands that derive the numbers again."""
    lines = [f"dpsgd train {found.name}/recipe.yaml --out again"]
    if found.private:
        stated = f"--accountant {found.privacy['accountant']} --delta {json.dumps(found.privacy['delta'])}"
        together = [f"dpsgd account {found.name} --trials all"] if len(found.document["trials"]) > 1 else []
        lines = [f"dpsgd account {found.name} {stated}", f"dpsgd account {found.name}", *together, *lines]
    lines.insert(-1, f"dpsgd report {found.name}")
    return [
        Heading("How to check it again"),
        Text(
            f"In the folder that holds `{found.name}` (its files are compared with their SHA-256 first): the price, as"
            " it is stated and by every accountant that applies; this page; and the training itself."
        ),
        Commands(lines),
    ]
