"""Words of a guarantee: who is protected, epsilon and delta, attacks, several trials, what is public, what is outside.

The only place for these sentences: the terminal, reports, comparisons, sweeps and `dpsgd account` take them from here.
`privacy` is that section of a `result.json`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, adjacency_label
from dpsgd_cli.accounting.joint_composition import Run, why_apart
from dpsgd_cli.accounting.tradeoff import LEAST_ERROR
from dpsgd_cli.common.text_format import epsilon_text, metric_text

Privacy = Mapping[str, Any]
Terms = list[tuple[str, str]]
NO_PRIVACY = "nothing protects the training data"
ADAPTIVE = "releases may be chosen by earlier releases, so the budget is the bound, and what a run spent is not"
EXPERIMENT = "an experiment: anybody who knows the seed can subtract the noise"
FIXED = "added up for trials whose number and settings were fixed beforehand, not chosen by what other trials found"
ASSUMED = "added up as if each had noise of its own and none measured, without noise, records that another trained on"
NOT_HIDDEN = (
    "The guarantee does not hide what the data say about people in general, which is what a model is for. That may"
    " reveal something even about people who are not in the data."
)
SUM = (
    "The sum holds for a further budget that was fixed before the earlier result was seen; if it was chosen later, for"
    " every limit that was fixed before and that the sum keeps"
)
SEVERAL_TRIALS = "`dpsgd account --trials all` on the folder that holds these results prices all of them together."


def epsilon_words(stated: Privacy) -> str:
    """Return `epsilon` and `delta` of a statement as text, and whether its `bound` is a proof."""
    if stated["epsilon"] is None:
        return f"not finite at delta {stated['delta']:g}"
    epsilon = f"{epsilon_text(stated['epsilon'])} at delta {stated['delta']:g}"
    return f"at most {epsilon}" if stated["bound"] == "upper" else f"about {epsilon} (an estimate, no proof)"


def book_words(charged: Mapping[str, str]) -> str:
    """Return which book a result was charged to (`privacy.book`), by random ids."""
    return f"budget book {charged['book']}, entry {charged['charge']}"


def start_words(start: Mapping[str, Any]) -> str:
    """Return the terms of a sum: the price of a training, and of the earlier result that it started from."""
    own, earlier = (
        f"{'not finite' if one['epsilon'] is None else epsilon_text(one['epsilon'])} at delta {one['delta']:g}"
        for one in (start["own"], start)
    )
    return f"{own} of this training, and {earlier} of the earlier result (ledger {start['ledger_sha256'][:8]}...)"


def neighbours(privacy: Privacy) -> str:
    """Return the adjacency with its unit of privacy, such as `add-remove of users`."""
    return adjacency_label(privacy["adjacency"] or "none", privacy.get("unit"))


def unit_words(unit: object) -> str:
    """Return a remark on a protected unit of several rows, to follow a description; empty for single records."""
    return "" if unit is None else ", all rows of a user together"


def price_terms(privacy: Privacy) -> Terms:
    """Return what the guarantee says in numbers, as terms with their descriptions."""
    if privacy["accountant"] is None:
        return [("privacy", f"none: {NO_PRIVACY}")]
    found = [("epsilon", f"{epsilon_words(privacy)}{_rho_words(privacy['rho'], ', rho ')}")]
    found += [("of both", f"{start_words(start)}. {SUM}.")] if (start := privacy.get("start")) is not None else []
    found += _part_terms(privacy.get("parts", {}))
    if (spent := privacy.get("spent")) is not None:
        epsilon = "none" if spent["epsilon"] is None else metric_text(spent["epsilon"])
        found += [("spent of that", f"epsilon {epsilon}, rho {_rho_words(spent['rho']) or 'none'}: no guarantee")]
        found += [*_part_terms(spent.get("parts", {})), ("adaptive", ADAPTIVE)]
    if (attacker := privacy.get("attacker")) is not None:
        rates = attacker["true_positives"]
        words = attack_words(attacker["mu"], attacker["regret"], rates, attacker["proved_by"])
        found.append(("strongest attack", words))
    return found


def setting_terms(privacy: Privacy) -> Terms:
    """Return what the guarantee is about, which no budget changes, as terms with their descriptions."""
    if privacy["accountant"] is None:
        return []
    return [
        ("adjacency", f"{neighbours(privacy)} ({privacy['batching']} batches; {privacy['accountant']})"),
        *([("noise", privacy["correlated_noise"])] if "correlated_noise" in privacy else []),
        ("noise source", privacy["noise_source"]),
        *([("charged to", book_words(privacy["book"]))] if "book" in privacy else []),
        *(("released", text) for text in discovered(privacy)),
        *(("NOT covered", text) for text in privacy.get("uncovered_steps", [])),
        *(("declared public", text) for text in privacy["declarations"]),
        *([("scope", privacy["scope"])] if "scope" in privacy else []),
    ]


def discovered(privacy: Privacy) -> list[str]:
    """Return a line for each private column: the bounds or categories that the first trial released."""
    trials = privacy.get("discovered", [])
    of_several = f" (the first of {len(trials)} trials; result.json has all)" if len(trials) > 1 else ""
    return [line + of_several for line in trials[0]] if trials else []


def _part_terms(parts: Privacy) -> Terms:
    """Return the price of each kind of release by itself, if there are several kinds."""
    words = {"held-out": "in parallel: held-out"}
    found = [
        (f"  {words.get(label, f'of that {label}')}", f"rho {_rho_words(part['rho'])}")
        for label, part in parts.items()
        if part["rho"] is not None
    ]
    return found if len(found) > 1 else []


def _rho_words(rho: float | None, before: str = "") -> str:
    return "" if rho is None else f"{before}{rho:.6g}"


def attack_words(mu: float | None, regret: float, true_positives: Mapping[Any, float], proved_by: str) -> str:
    """Return the true positive rates (TPR) that no membership inference attack exceeds, rounded up, and mu, as text.

    >>> attack_words(1.0, 0.0, {0.01: 0.09236, 0.001: 0.0183}, "gaussian")
    'TPR 9.24% at FPR 1%, 1.83% at FPR 0.1%; exactly mu-Gaussian-DP with mu 1.0000'
    >>> attack_words(1.5685, 0.00102, {0.01: 0.2241}, "pld")
    'TPR at most 22.41% at FPR 1%; by pld; mu-Gaussian-DP with mu 1.5685 down to error rates of 1e-10, regret 0.0011'
    """
    if regret or mu is None or not math.isfinite(mu):
        return f"{rates_words(true_positives)}; by {proved_by}; {gaussian_words(mu, regret)}"
    return f"{rates_words(true_positives).replace('TPR at most', 'TPR')}; exactly {gaussian_words(mu, regret)}"


def rates_words(true_positives: Mapping[Any, float]) -> str:
    """Return the true positive rates that no membership inference attack exceeds, by false positive rate, as text.

    False positive rates are numbers, or texts of numbers as JSON has them.
    """
    rates = ", ".join(f"{percent(found)} at FPR {float(rate) * 100:g}%" for rate, found in true_positives.items())
    return f"TPR at most {rates}"


def gaussian_words(mu: float | None, regret: float) -> str:
    """Return the nearest Gaussian (`tradeoff.nearest_gaussian`) as text; `mu` None: there is none."""
    if mu is None or not math.isfinite(mu):
        return "no finite mu"
    if not regret:
        return f"mu-Gaussian-DP with mu {epsilon_text(mu)}"
    off = math.ceil(regret * 1e4 - 1e-9) / 1e4
    return f"mu-Gaussian-DP with mu {epsilon_text(mu)} down to error rates of {LEAST_ERROR:g}, regret {off:.4f}"


def percent(share: float) -> str:
    """Return `share` as a percentage, rounded up because it bounds an attack: `3.42%`."""
    return f"{min(100.0, math.ceil(share * 1e4 - 1e-9) / 100):.2f}%"


def brief_protection(privacy: Privacy) -> str:
    """Return who is protected in a few words."""
    if privacy["accountant"] is None:
        return f"nobody: {NO_PRIVACY}"
    unit, adjacency = privacy.get("unit"), privacy["adjacency"]
    if unit is None:
        return f"each record, one at a time ({adjacency}); a person with several records is protected less"
    return f"each user with all rows of one `{unit['column']}` together ({adjacency})"


def protected(privacy: Privacy) -> str:
    """Return who is protected, what is hidden about them, and from whom."""
    unit, kind = privacy.get("unit"), NEIGHBOURS[privacy["adjacency"]]
    whole = "data, held out or not" if privacy.get("evaluation") == "private" else "training data"
    if unit is None:
        whom = f"Every single record of the {whole}. What is hidden is {kind.hides}."
    else:
        whom = (
            f"Every user of the {whole}, with all of their rows together. Rows with the same value of"
            f" `{unit['column']}` belong to one user. What is hidden is {kind.hides_of_users}."
        )
    return (
        f"{whom} It is hidden from everybody who sees what was published, whatever else they know (all other records,"
        " the recipe, this program) and however long they compute."
    )


def meaning(privacy: Privacy) -> list[str]:
    """Return paragraphs on what epsilon and delta mean for one record (or user)."""
    epsilon, delta = privacy["epsilon"], privacy["delta"]
    if epsilon is None:
        return ["There is no finite epsilon at this delta: nothing bounds what was published."]
    factor = epsilon_text(math.exp(epsilon)) if epsilon < 700 else "more than 10^304"
    of_both = "" if privacy.get("start") is None else " for the training, and by that of the earlier result for it"
    found = [
        f"Any conclusion from what was published has with and without {one_unit(privacy)} probabilities that differ by"
        f" a factor of at most e^{epsilon_text(epsilon)} = {factor}, plus delta = {delta:g} (one in {1 / delta:,.0f})."
        f" Proved by the accountant `{privacy['accountant']}`{of_both}."
    ]
    if privacy["bound"] != "upper":
        found[0] = found[0].replace("Proved", "Estimated, not proved,")
    if (start := privacy.get("start")) is not None:
        found.append(
            f"The training started from an earlier result on private records, and the statement is of both: epsilon"
            f" {start_words(start)}. {SUM}."
        )
    return found + ([f"{ADAPTIVE.capitalize()}."] if privacy.get("spent") is not None else [])


def one_unit(privacy: Privacy) -> str:
    """Return the words for what neighbouring data sets differ in."""
    return "a record" if privacy.get("unit") is None else "one user's rows"


def outside(privacy: Privacy) -> list[str]:
    """Return what the statement does not cover."""
    several = "A person with several records" if privacy.get("unit") is None else "A person who is several users"
    whose, secure = "one record" if privacy.get("unit") is None else "one user", privacy["noise_source"] == "secure"
    rounding = "inside a step's float32 products, before noise" if secure else "of noise by computers"
    return [
        *(f"NOT covered: {step}" for step in privacy.get("uncovered_steps", [])),
        f"Scope: {privacy['scope']}.",
        f"{several}: the statement holds for {whose} at a time, and is weaker for all of them together.",
        "Everything else that was done with the same data: other runs, settings that were tried and chosen by their"
        " results, a look at the records. Each has a price of its own (`dpsgd account FOLDER`, `dpsgd sweep`).",
        *([f"It was charged to {book_words(privacy['book'])}."] if "book" in privacy else []),
        f"Side channels: the duration of training, the memory of the machine, and the rounding {rounding}.",
        *([] if secure else [f"The noise is {privacy['noise_source']}."]),
    ]


def scope(run: Run) -> str:
    """Return which trials the epsilon of a result covers."""
    if run.seeds is not None and len(run.seeds) == 1:
        return "this one trial; for several results together, ask `dpsgd account --trials all`"
    if (reason := why_apart([run])) is not None:
        return f"each trial on its own; no statement about several of them, published together or as a mean: {reason}"
    return (
        "each trial on its own; all trials of this result together, and means over them, cost the sum of their ledgers"
        " (`dpsgd account --trials all`)"
    )


def together(reason: str | None) -> str:
    """Return the joint statement about several results; `reason`: why there is none (`joint_composition.why_apart`)."""
    return SEVERAL_TRIALS if reason is None else f"No joint guarantee is given for all of them: {reason}."


def sweep_lines(privacy: Privacy) -> list[str]:
    """Return the statements about a sweep: on each trial, on all trials together, and on the published choice."""
    seeded = f"; {EXPERIMENT}" if privacy["noise_source"] != "secure" else ""
    lines = [
        f"{'each trial':<25} epsilon {epsilon_words(one)} ({one['adjacency']}{seeded})" for one in privacy["each_trial"]
    ]
    for name, title in (("all_trials", "all trials together"), ("choice", "publishing the chosen")):
        told = privacy[name]
        if told is None:
            continue
        if told["epsilon"] is None:
            lines.append(f"{title:<25} no statement: {told.get('note', 'no accountant covers it')}")
            continue
        how = f"; {told['kind']}" if "kind" in told else f"; {told['trials']} trials; {told['accountant']}"
        noise = f"; {EXPERIMENT}" if told.get("randomness", "secure") != "secure" else seeded
        lines.append(f"{title:<25} epsilon {epsilon_words(told)} ({told['adjacency']}{how}{noise})")
    return [*lines, *(f"warning: {warning}" for warning in privacy["warnings"])]
