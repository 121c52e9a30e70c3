"""Results from before ledgers said which filter polices them: the cap, from the recipe and the result that lie beside.

Only methods that choose what to release from what they released have one (`ledger.py`): `dp-agd`, schedules that
follow the validation accuracy, and a user's own method. A ledger with nothing beside it is refused where DP-AGD wrote
it (nobody else releases a `step`), and else taken as it is. Not here: ledgers that say it themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dpsgd_cli.errors import DataError, UnsupportedMechanism
from dpsgd_cli.privacy.mechanism import GaussianSum

if TYPE_CHECKING:
    from dpsgd_cli.privacy.ledger import Entry
    from dpsgd_cli.privacy.mechanism import Mechanism

# Each stands in the resolved recipe of a method that chooses; most recipes are not parsed.
_SIGNS = ("dp-agd", "validation", "python")


def mark(trials: dict[int, list[Entry]], directory: Path) -> dict[int, list[Entry]]:
    """The entries of trials, with the cap that `directory` tells of where its method chose what to release.

    Raises UnsupportedMechanism for entries of DP-AGD when nothing there tells the budget.
    """
    found = cap_beside(directory)
    if found is None:
        if any(entry.release.mechanism.label == "step" for entries in trials.values() for entry in entries):
            raise UnsupportedMechanism(
                f"{directory}: a ledger of dp-agd that does not say within which budget its releases were chosen; put"
                " it beside the recipe.yaml and the result.json that it came with"
            )
        return trials
    cap, covers_before = found
    counted = [e for entries in trials.values() for e in entries if e.phase == "train" or covers_before]
    if isinstance(cap, GaussianSum) and not all(isinstance(e.release.mechanism, GaussianSum) for e in counted):
        cap = _in_zcdp(directory) or cap

    def marked(entries: Sequence[Entry]) -> list[Entry]:
        return [replace(e, within=cap) if e.phase == "train" or covers_before else e for e in entries]

    return {trial: marked(entries) for trial, entries in trials.items()}


def _in_zcdp(directory: Path) -> Mechanism | None:
    """A budget in rho as it was policed then: in zCDP, which is no Gaussian DP where not all releases are Gaussian."""
    from dpsgd_cli.privacy.mechanism import ZeroConcentrated

    stated = json.loads((directory / "result.json").read_text(encoding="utf-8"))["privacy"]
    return ZeroConcentrated(stated["budget"]["rho"], stated["adjacency"]) if "rho" in stated["budget"] else None


def cap_beside(directory: Path) -> tuple[Mechanism, bool] | None:
    """What the filter of the run in `directory` never let pass, and whether it counted private preprocessing.

    None where nothing was chosen, or where the recipe or the result is missing. DataError where one is damaged.
    """
    try:
        text = (directory / "recipe.yaml").read_text(encoding="utf-8")
        if not any(sign in text for sign in _SIGNS):
            return None
        stated = json.loads((directory / "result.json").read_text(encoding="utf-8"))["privacy"]
        recipe = yaml.safe_load(text)
        kind, private = recipe["method"]["kind"], recipe.get("privacy") or {}
        follows = private.get("schedule", {}).get("kind") == "validation"
        if stated["accountant"] is None or not (follows or kind in ("dp-agd", "python")):
            return None
        cap = _cap(kind, stated)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise DataError(f"{directory}: damaged result: {error!r}") from None
    return None if cap is None else (cap, stated.get("budget_covers", "total") == "total")


def _cap(kind: str, stated: dict[str, Any]) -> Mechanism | None:
    from dpsgd_cli.privacy.adaptive import largest_rho
    from dpsgd_cli.privacy.budget import one_gaussian
    from dpsgd_cli.privacy.mechanism import ZeroConcentrated
    from dpsgd_cli.recipe import schema

    given, accountant, adjacency = stated["budget"], stated["accountant"], stated["adjacency"]
    if given is None:
        return None
    budget = schema.RhoBudget(**given) if "rho" in given else schema.EpsilonBudget(**given)
    if kind != "dp-agd":
        return one_gaussian(budget, accountant, adjacency)
    if isinstance(budget, schema.RhoBudget):
        return ZeroConcentrated(budget.rho, adjacency)
    return ZeroConcentrated(largest_rho(budget.epsilon, budget.delta, accountant), adjacency)
