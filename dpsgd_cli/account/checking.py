"""`dpsgd check`: whether a result's files, claim, ledger, page and code are what they should be. A verdict each.

Nothing here proves who wrote a result: all its hashes can be made anew by whoever holds it (`results/reading.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import dpsgd_cli
from dpsgd_cli.account.cases import noise_facts, span_words
from dpsgd_cli.accounting.ledger import LedgerEntry, charged_by_epoch, priced_releases, read_entries
from dpsgd_cli.accounting.mechanism import Release, merge
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.common.text_format import count, epsilon_text
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.errors import DpsgdError, RecipeError, RunError
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.results import prices, report, store
from dpsgd_cli.results.earlier import earlier_of
from dpsgd_cli.results.files import to_csv
from dpsgd_cli.results.result import Row, summarise

FORGERY = (
    "hashes are no signature: whoever held these files could have written all of them, with new hashes. Whether the"
    " training did what the ledger says is shown by repeating it (`dpsgd train RECIPE`) or attacking it (`dpsgd audit`)"
)


@dataclass(frozen=True)
class Verdict:
    """Verdict on one property: `holds` is None if it cannot be checked here."""

    what: str
    holds: bool | None
    told: str


def verdicts(directory: Path) -> list[Verdict]:
    """Return the verdicts on the result in `directory`. Raises DataError if there is no readable result."""
    try:
        document = store.read_whole(directory)
    except DpsgdError as error:
        return [Verdict("files", False, f"{error}; nothing else was checked")]
    named = len({*document["files"], *document["nonprivate_files"]})
    found = [Verdict("files", True, f"{count(named, 'file')} and result.json are unchanged, by their hashes")]
    privacy = document["privacy"]
    try:
        loaded = load_recipe(str(directory / "recipe.yaml"))
    except RecipeError as error:
        return [*found, Verdict("recipe", False, f"{error}; nothing else was checked")]
    checks: list[tuple[str, Callable[[], tuple[list[str], str]]]] = [
        ("claim", lambda: (prices.problems_of(directory, document), _claim(privacy))),
        ("terms", lambda: (_changed(loaded, privacy), "unit, scope and noise are as in recipe.yaml")),
        ("ledger", lambda: _ledger(directory, document, loaded)),
        ("numbers", lambda: _numbers(directory, document)),
        ("page", lambda: _page(directory)),
        ("code", lambda: _code(directory, document, loaded)),
    ]
    if privacy.get("start") is not None:
        checks.insert(1, ("start", lambda: _start(loaded, document)))
    for what, check in checks:
        try:
            wrong, told = check()
            found.append(Verdict(what, not wrong, "; ".join(wrong) or told))
        except DpsgdError as error:
            found.append(Verdict(what, None, f"cannot be checked here: {error}"))
    return found


def _claim(privacy: Row) -> str:
    if privacy["accountant"] is None:
        return "no privacy is claimed"
    epsilon = "no finite epsilon" if privacy["epsilon"] is None else f"epsilon {epsilon_text(privacy['epsilon'])}"
    both = "" if privacy.get("start") is None else ", with the earlier result that it started from"
    return f"{epsilon} at delta {privacy['delta']:g} is what the ledger costs ({privacy['accountant']}){both}"


def _changed(loaded: LoadedRecipe, privacy: Row) -> list[str]:
    """Return what the statement says otherwise than the recipe by itself."""
    from dpsgd_cli.training.assemble import said_by  # torch

    if privacy["accountant"] is None:
        return []
    own = said_by(loaded, privacy["adjacency"], privacy.get("start") is not None)
    names = {"unit", *own}
    return [f"{name} is {privacy.get(name)}, by the recipe {own.get(name)}" for name in sorted(names)
            if privacy.get(name) != own.get(name)]  # fmt: skip


def _numbers(directory: Path, document: Row) -> tuple[list[str], str]:
    """Return where tables and the model's file say otherwise than `result.json`."""
    from dpsgd_cli.engine import bundle  # torch

    rows, wrong = document["trials"], []
    for name, told in document["metrics"].items():
        if name in rows[0] and told["mean"] != summarise([row[name] for row in rows])["mean"]:
            wrong.append(f"{name} is {told['mean']}, and not the mean of its trials")
    if (directory / "trials.csv").read_text("utf-8") != to_csv(rows):
        wrong.append("trials.csv has other rows than result.json")
    if (directory / bundle.NAME).exists():
        claimed = bundle.read(directory / bundle.NAME).about.get("privacy") or {}
        names = [name for name in claimed if name != "ledger_sha256" and claimed[name] != document["privacy"].get(name)]
        wrong += [f"{bundle.NAME} claims another {name}" for name in names]
        if claimed and claimed["ledger_sha256"] != sha256(directory / "ledger.jsonl"):
            wrong.append(f"{bundle.NAME} names another ledger")
    return wrong[:3], "means, trials.csv and the model's metadata are those of result.json"


def _start(loaded: LoadedRecipe, document: Row) -> tuple[list[str], str]:
    """Return where the earlier result, which is checked whole, is not what this one says that it started from."""
    earlier = earlier_of(loaded)
    assert earlier is not None, "the claim was compared with the recipe"
    told = document["privacy"]["start"]
    wrong = [f"{name} is {own}, and {told[name]} is told" for name, own in earlier.record.items() if told[name] != own]
    return wrong, f"{earlier.folder.name} is the earlier result whose epsilon and delta are added"


def _ledger(directory: Path, document: Row, loaded: LoadedRecipe) -> tuple[list[str], str]:
    """Return where ledger and declarations are not what the recipe plans: steps, noise, sampling, clip, other releases.

    What is planned depends on the layout of the data, which must be there.
    """
    from dpsgd_cli.training.assemble import declared_by  # torch
    from dpsgd_cli.training.plans import plan_and_outline

    if document["privacy"]["accountant"] is None:
        return [], "there is none"
    plan, outline = plan_and_outline(loaded)
    if plan is None:
        return ["a price is claimed, and the recipe plans no private training"], ""
    declared = document["privacy"]["declarations"]
    missing = [text for text in (*outline.declarations, *declared_by(loaded)) if text not in declared]
    wrong, early = [f"it is not listed among what is public: {text}" for text in missing[:1]], ""
    for trial, entries in read_entries(directory / "ledger.jsonl").items():
        done = next(row["epochs"] for row in document["trials"] if row["trial"] == trial)
        stopped = any("Training was stopped after" in text for text in declared)
        found = _unplanned(plan, entries, done if stopped else plan.most_epochs)
        early = f"; training was stopped after {count(done, 'epoch')} of {plan.most_epochs}" if stopped else early
        wrong += [f"trial {trial}: {text}" for text in found]
    planned = "its budget, of which it chooses" if plan.is_adaptive else _said(plan.releases) or "nothing"
    return wrong[:3], f"it is what the recipe plans: {planned}{early}"


def _unplanned(plan: Plan, entries: Sequence[LedgerEntry], done: int) -> list[str]:
    """Return the differences between a trial's ledger and its plan, which ended after `done` epochs."""
    of = {phase: [one for one in entries if one.phase == phase] for phase in ("before", "train", "held-out")}
    made = {phase: merge([one.release for one in own]) for phase, own in of.items()}
    pairs = [
        ("before training", made["before"], merge([*plan.preprocessing_releases])),
        ("on held-out records", made["held-out"], merge([*plan.held_out])),
    ]
    if plan.is_adaptive:
        own = priced_releases([*of["before"], *of["train"]])
        pairs = [*pairs[1:], ("in all", own, merge(plan.priced_releases))]
    else:
        planned = plan.released_by(done) or {}
        charged = charged_by_epoch(of["train"])
        # somebody who watched may have chosen the end: then the rest of the plan is charged, too
        whole = plan.released_by(plan.most_epochs) or {}
        if charged not in (planned, whole):
            pairs.append(("in training", made["train"], merge([r for own in planned.values() for r in own])))
            if made["train"] == pairs[-1][2]:
                return ["its releases are not those of the planned epochs"]
    return [
        f"{_said(own) or 'nothing'} is charged {when}, {_said(wanted) or 'nothing'} is planned"
        for when, own, wanted in pairs
        if set(own) != set(wanted)
    ]


def _said(releases: Sequence[Release]) -> str:
    """Return releases in words, one text for each label."""
    labels = dict.fromkeys(release.mechanism.label for release in releases)
    texts = []
    for label in labels:
        own = [release for release in releases if release.mechanism.label == label]
        noise = ""
        if facts := {name: span_words(value) for name, value in noise_facts([own], label).items()}:
            noise = " of z {noise_multiplier}, rate {sampling_rate}, sensitivity {sensitivity}".format(**facts)
        texts.append(f"{label} x {sum(release.count for release in own)}{noise}")
    return "; ".join(texts)


def _page(directory: Path) -> tuple[list[str], str]:
    """Return pages that differ from what the result generates."""
    there = {name: text for name, text in report.pages(directory).items() if (directory / name).exists()}
    edited = [name for name, text in there.items() if (directory / name).read_text(encoding="utf-8") != text]
    return [f"{name} is not what the result generates (`dpsgd report` writes it again)" for name in edited], (
        f"{' and '.join(there)} are what the result generates" if there else "there is none"
    )


def _code(directory: Path, document: Row, loaded: LoadedRecipe) -> tuple[list[str], str]:
    """Return the named files of code, weights and data that are not those that ran."""
    from dpsgd_cli.results.provenance import check_unchanged  # torch

    try:
        gone = check_unchanged(document, loaded, directory)
    except RunError as error:
        return [str(error)], ""
    version = document["provenance"].get("version")
    told = f"the files that the recipe names are those that ran (version {version}; this is {dpsgd_cli.__version__})"
    return [], told + (f"; gone, or without a hash in this copy, so not compared: {', '.join(gone)}" if gone else "")
