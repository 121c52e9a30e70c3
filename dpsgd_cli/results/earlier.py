"""The private result whose weights a training starts from (`privacy.start`), and what both cost together.

Released, in all: the earlier result Y = A(D), with all that its own statement covers, and the further result B(T, Y),
whose recipe may have been written after Y was seen. D and T are their tables: the same, or others.

Neighbours: pairs (D, T) and (D*, T*) that differ in one record of D, or in one of T, or in one of each. With a unit, in
all rows of one user, in either table or in both. Adjacency and unit are those of both results, so they must be equal.

Guarantee (basic composition, whose second budget may be chosen last): let A be (e1, d1)-DP and, for each y, B(., y) be
(e2(y), d2(y))-DP. If e1 + e2(y) <= E and d1 + d2(y) <= F for every y, with numbers E and F that were fixed before Y was
seen, then all that is released is (E, F)-DP. In particular, a further budget that was fixed beforehand is added.
Proof: for a set S of pairs let S_y be its part at y, and f(y) = min(1, e^(E - e1) Pr[B(T*, y) in S_y]). For each y,
Pr[B(T, y) in S_y] <= min(1, e^(e2(y)) Pr[B(T*, y) in S_y]) + d2(y) <= f(y) + F - d1. As 0 <= f <= 1, the mean of f over
A(D) is at most e^e1 times that over A(D*), plus d1. So Pr[(Y, B(T, Y)) in S] on (D, T) is at most e^e1 mean f(A(D*)) +
d1 + F - d1, and that is at most e^E Pr[(Y, B(T*, Y)) in S] on (D*, T*), plus F.

This sum is all that is stated. The ledger of B may have been chosen by Y, so it is not composed with that of A by RDP,
PLD or trade-off curves, whose theorems are of a list that was fixed beforehand: no rho, no mu and no rates of attacks.

The proof takes the noise of B as independent of Y, so neither has a seed. It needs both statements to be of all records
that either used: what one measures in the clear, the other may not train on (`check_records`). A chain needs nothing
more: the statement of Y is then a sum itself, and takes the place of (e1, d1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd_cli.accounting import joint_composition
from dpsgd_cli.accounting.joint_composition import Run
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.recipe.loading import LoadedRecipe, resolved
from dpsgd_cli.results import prices, reading, store
from dpsgd_cli.results.evaluated import identities_in, protects_all, records_of, tested_section
from dpsgd_cli.results.guarantee import brief_protection
from dpsgd_cli.results.result import Row

_EARLIER = "By an earlier result: "


@dataclass(frozen=True)
class Earlier:
    """A result that was checked, and that a training may start from: its folder and the content of `result.json`."""

    folder: Path
    document: Row

    @property
    def record(self) -> Row:
        """Return what a result says of the one that it starts from: its statement, and the hash of its ledger."""
        privacy = self.document["privacy"]
        ledger = hashlib.sha256((self.folder / "ledger.jsonl").read_bytes()).hexdigest()
        return {"epsilon": privacy["epsilon"], "delta": privacy["delta"], "ledger_sha256": ledger}

    @property
    def declarations(self) -> list[str]:
        """Return what the earlier statement declares public: the sum rests on it, too."""
        declared: list[str] = self.document["privacy"]["declarations"]
        return list(dict.fromkeys(f"{_EARLIER}{said.removeprefix(_EARLIER)}" for said in declared))

    def check_records(self, loaded: LoadedRecipe, sha256: Mapping[str, str]) -> None:
        """Raise PrivacyError unless the two statements are of all records that either result used.

        `sha256`: of each file that the recipe reads. They are if both measure held-out records with noise and declare
        none public: whoever is in either table is then protected by its statement, whatever their part of it. Else the
        two must leave out the same records of the same data.
        """
        data, folds = reading.data_and_folds(reading.recipe_text_of(self.folder / "recipe.yaml"))
        ours = tested_section(resolved(loaded.recipe))
        if protects_all(data) and protects_all(ours):
            return
        pair = records_of(data, folds, identities_in(self.document["provenance"])), records_of(ours, None, sha256)
        names = self.folder.name, loaded.recipe.name
        apart = joint_composition.why_records_apart(
            [Run(name, [None], None, records) for name, records in zip(names, pair, strict=True)]
        )
        if apart is None and data.get("public") != ours.get("public"):
            apart = "they declare different records public"
        if apart is not None:
            raise PrivacyError(
                f"privacy.start: no sum is proved of {names[0]} and {names[1]}: {apart}; give both data.evaluation:"
                " private, which protects held-out records"
            )


def earlier_of(loaded: LoadedRecipe) -> Earlier | None:
    """Return the result that a recipe starts from; None if it names none.

    Raises DataError if it is none, was changed, or claims less than its ledger costs; and PrivacyError if no sum of its
    statement and another is proved.
    """
    recipe = loaded.recipe
    if recipe.privacy is None or recipe.privacy.start is None:
        return None
    folder = loaded.base / recipe.privacy.start
    document = store.read_whole(folder)
    prices.refuse_false(folder, document)
    store.check_may_be_published(folder, document)
    privacy = document["privacy"]
    if privacy["epsilon"] is None or privacy["bound"] != "upper":
        raise PrivacyError(f"privacy.start: {folder} states no epsilon that is a bound, so nothing can be added to it")
    unit = recipe.privacy.unit
    ours = {"adjacency": recipe.adjacency, "unit": None if unit is None else {"column": unit.column}}
    told, own = brief_protection(privacy), brief_protection(ours | {"accountant": ""})
    if told != own:
        raise PrivacyError(
            f"privacy.start: there is no sum: {folder} protects {told}, and the recipe {own}; give the"
            " adjacency and the unit of the earlier result"
        )
    return Earlier(folder, document)


def total(own_epsilon: float | None, own_delta: float, start: Mapping[str, Any]) -> tuple[float | None, float]:
    """Return epsilon and delta of a further training together with the result that it starts from."""
    epsilon = None if own_epsilon is None else start["epsilon"] + own_epsilon
    return epsilon, start["delta"] + own_delta
