"""What a person reads first: the numbers of the result, and none where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.results.summary import brief_text, result_text

PRIVACY: dict[str, Any] = {
    "epsilon": 2.99999,
    "delta": 1e-5,
    "rho": 0.25,
    "adjacency": "zero-out",
    "batching": "shuffle",
    "accountant": "gaussian",
    "bound": "upper",
    "noise_source": "secure",
    "declarations": ["The moon is public."],
}


def document(privacy: dict[str, Any] = PRIVACY, mean: float | None = 0.9125, epochs: tuple[int, ...] = (3, 3)) -> dict:
    metric = {"mean": mean, "std": 0.01, "ci95": 0.0898, "n": 2}
    trials = [{"epochs": length} for length in epochs]
    return {"name": "toy", "trials": trials, "metrics": {"test_accuracy": metric}, "privacy": privacy, "warnings": []}


def test_five_lines_say_who_is_protected_how_well_it_does_and_at_what_price() -> None:
    constant = {"mean": 0.5, "std": 0.0, "ci95": None, "n": 2}
    attacker = {"mu": 1.0, "regret": 0.0, "true_positives": {"0.01": 0.0924}, "proved_by": "gaussian"}
    told = document(PRIVACY | {"attacker": attacker, "noise_source": "seeded (experiment)"})
    told["metrics"]["constant_accuracy"] = constant
    assert brief_text(told, Path("r")).splitlines() == [
        "toy: 2 trials, 3 epochs",
        "  protected   each record, one at a time (zero-out); a person with several records is protected less",
        "  accuracy    0.9125 +- 0.0898 (95% CI, 2 trials); baseline: 0.5000",
        "  epsilon     at most 3.0000 at delta 1e-05; each trial on its own; an experiment: anybody who knows the seed"
        " can subtract the noise",
        "  attacks     TPR at most 9.24% at FPR 1%",
        "  result      r",
    ]
    measured = {"metrics": {"accuracy": [None, 0.7, 0.9]}, "constants": {"accuracy": [0.6, 0.5, 0.7]}}
    held_out = brief_text(document() | {"evaluation": [measured]}, Path("r")).splitlines()[2]
    assert held_out == "  accuracy    too noisy to say (95% interval 0.7000 to 0.9000); baseline: 0.6000"
    users = PRIVACY | {"unit": {"column": "person"}, "uncovered_steps": ["pca was fitted on the records"]}
    text = brief_text(document(users), Path("r"))
    assert "each user with all rows of one `person` together" in text
    assert "NOT covered pca was fitted on the records" in text
    assert "nobody: nothing protects" in brief_text(document(PRIVACY | {"accountant": None}), Path("r"))


def test_what_was_spent_of_a_budget_is_no_guarantee() -> None:
    spent = {"epsilon": 2.5, "rho": 0.2, "parts": {"gradient": {"rho": 0.15}, "step": {"rho": 0.05}}}
    lines = result_text(document({**PRIVACY, "spent": spent}), Path("r")).splitlines()
    at = next(i for i, line in enumerate(lines) if "spent of that" in line)
    assert "at most 3.0000 at delta 1e-05, rho 0.25" in lines[at - 1]
    assert "epsilon 2.5000, rho 0.2: no guarantee" in lines[at]
    assert "of that step" in lines[at + 2] and "rho 0.05" in lines[at + 2]
    assert "spent of that" not in result_text(document({**PRIVACY, "spent": None}), Path("r"))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"bound": "estimate"}, "epsilon                   about 3.0000 at delta 1e-05 (an estimate, no proof)"),
        ({"epsilon": None}, "epsilon                   not finite at delta"),
        ({"rho": None}, "3.0000 at delta 1e-05\n"),
        ({"accountant": None}, "none: nothing protects the training data"),
    ],
)
def test_other_statements(changed: dict[str, Any], says: str) -> None:
    assert says in result_text(document(PRIVACY | changed), Path("r"))
