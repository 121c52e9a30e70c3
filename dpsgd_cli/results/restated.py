"""Old results of methods that choose what to release: their budget in place of what they happened to spend.

Results have said `spent` (None where what was released is the bound) since budgets are stated. One without it is read
as if it had been written so; its files stay as they are. Not here: which budget polices what (`privacy/unmarked.py`).
"""

from __future__ import annotations

from pathlib import Path

from dpsgd_cli.results.result import Row


def restate(document: Row, directory: Path) -> Row:
    """The result in `directory` with the epsilon and rho that are proved, and under `spent` those of its ledgers."""
    privacy = document.get("privacy")
    if not isinstance(privacy, dict) or "spent" in privacy or privacy.get("accountant") is None:
        return document

    from dpsgd_cli.privacy.unmarked import cap_beside

    if cap_beside(directory) is None:
        return document

    from dpsgd_cli.privacy.budget import rho_of
    from dpsgd_cli.privacy.ledger import read_ledgers
    from dpsgd_cli.results import prices

    trials, stated = [], []
    ledgers = read_ledgers(directory / "ledger.jsonl")
    for row in document["trials"]:
        bounds = ledgers.get(row["trial"], [])
        stated.append((prices.epsilon(privacy["accountant"], bounds, privacy["delta"]), rho_of(bounds)))
        epsilon, rho = stated[-1]
        spent = {"spent_epsilon": row["epsilon"], "spent_rho": row["rho"]}
        trials.append({**row, "epsilon": epsilon, "rho": rho, **spent})
    epsilon, rho = max(stated, key=lambda pair: pair[0])
    spent = {name: privacy.get(name) for name in ("epsilon", "rho", "parts")}
    kept = {name: value for name, value in privacy.items() if name != "parts"}
    proved = {**kept, "epsilon": epsilon, "rho": rho, "spent": {**spent, "parts": spent["parts"] or {}}}
    return {**document, "privacy": proved, "trials": trials}
