"""Numbers, options and ledgers that `dpsgd account` must refuse, because an answer would be false."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mpmath
import pytest

import dpsgd_cli
from dpsgd_cli.account.options import OPTIONS, QUESTIONS, RANGES
from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.mechanism import PureDP, PureSource, Release, to_record
from dpsgd_cli.accounting.renyi import laplace_divergence, pure_divergence
from dpsgd_cli.errors import FailedAccountant, UsageError
from tests.cli.accounting import rows, run
from tests.conftest import Train, WriteRecipe

PLAIN = ["--noise-multiplier", "4", "--sampling-rate", "0.01", "--steps", "1000"]
ONE_STEP: dict[str, Any] = {"method": {"kind": "dp-gd", "learning_rate": 1}, "epochs": 1, "repeats": 1}


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "-1e-300"])
@pytest.mark.parametrize("name", [name for name, one in OPTIONS.items() if one.kind in RANGES])
def test_no_numeric_option_takes_nan_infinity_or_a_negative_number(name: str, value: str) -> None:
    told = run(*PLAIN, f"{option(name)}={value}")
    assert told.exit_code == 2 and told.stdout == ""
    assert option(name) in told.stderr
    if OPTIONS[name].kind not in ("count", "group") and name not in ("max_epsilon", "excess_risk"):
        with pytest.raises(UsageError, match=f"{option(name)} is .*, but must be "):
            dpsgd_cli.account(**{name: float(value)})  # type: ignore[arg-type]


GIVEN: dict[str, list[str]] = {
    "delta": ["--delta", "1e-6"],
    "accountant": ["--accountant", "rdp"],
    "trials": ["--trials", "2"],
    "best_of": ["--best-of", "2"],
    "law": ["--best-of", "2", "--law", "poisson"],
    "max_epsilon": ["--max-epsilon", "99"],
    "attacker": ["--attacker"],
    "group": ["--group", "2"],
    "solve": ["--solve", "steps"],
    "target_epsilon": ["--target-epsilon", "1"],
    "target_rho": ["--target-rho", "1"],
    "plot": ["--plot", "x.png"],
}
ASKED: dict[str, list[str]] = {
    "a price": PLAIN,
    "--at-epsilon": [*PLAIN, "--at-epsilon", "1"],
    "--curve": [*PLAIN, "--curve"],
    "--over": [*PLAIN, "--over", "steps=1:3:1"],
    "--over order": [*PLAIN[:4], "--over", "order=2:4:1"],
    "--over false-positives": [*PLAIN, "--over", "false-positives=0.1:0.9:0.4"],
    "--excess-risk": ["lectures/adult-dp-gd", "--excess-risk", "0.1"],
}


@pytest.mark.parametrize("question", ASKED)
@pytest.mark.parametrize("name", GIVEN)
def test_an_option_that_a_question_does_not_use_is_refused(question: str, name: str) -> None:
    (asked,) = [key for key, words in QUESTIONS.items() if words == question]
    if asked in OPTIONS[name].asked or (asked == "P" and name in ("solve", "target_epsilon", "target_rho")):
        return
    told = run(*ASKED[question], *GIVEN[name])
    assert told.exit_code == 2 and told.stdout == ""
    assert "does not use" in told.stderr and option(name) in told.stderr


def test_a_budget_for_another_adjacency_than_its_release_is_refused(tmp_path: Path) -> None:
    """An add-remove budget bounds no release that is stated for replaced records."""
    cap = {"mechanism": "zcdp", "rho": 1.0, "label": "budget"}
    line = to_record(Release(PureDP(0.1, "replace-one")))
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(line | {"within": cap | {"adjacency": "replace-one"}}))
    assert run(str(path)).exit_code == 0
    path.write_text(json.dumps(line | {"within": cap | {"adjacency": "add-remove"}}))
    told = run(str(path))
    assert (told.exit_code, "within is stated for add-remove" in told.stderr) == (2, True)


@pytest.mark.parametrize("source", ["pure", "laplace", "exponential"])
def test_many_tiny_epsilons_never_cost_less_than_randomised_response(source: PureSource) -> None:
    """2^53 binary answers of epsilon 1e-16: by the central limit theorem the loss is normal, of variance n epsilon^2.

    That of range epsilon (exponential) has a quarter of it at least. A normal loss of variance s^2 and mean s^2 / 2
    has delta(epsilon) = Phi(s/2 - epsilon/s) - e^epsilon Phi(-s/2 - epsilon/s).
    """
    count, each, delta = 2**53, 1e-16, 1e-10
    s = mpmath.sqrt(count) * each * (0.5 if source == "exponential" else 1)

    def excess(epsilon: Any) -> Any:
        return mpmath.ncdf(s / 2 - epsilon / s) - mpmath.exp(epsilon) * mpmath.ncdf(-s / 2 - epsilon / s) - delta

    with mpmath.workdps(40):
        true = float(mpmath.findroot(excess, (s, 4 * s), solver="anderson", tol=1e-30))
    assert true > 1e-9
    releases = [Release(PureDP(each, "add-remove", source), count)]
    for name in accountants.NAMES:
        accountant = accountants.get(name)
        if accountant.bound == "upper" and not name.startswith(("lemma", "nikolov")):
            try:
                found = accountant.epsilon(releases, delta)
            except FailedAccountant:
                assert name == "pld"
                continue
            assert found >= true * (1 - 1e-9), name


@pytest.mark.parametrize("epsilon", [1e-16, 1e-12, 1e-8, 1e-4, 0.01, 0.3, 3.0])
@pytest.mark.parametrize("order", [1.001, 1.5, 2.0, 32.0])
def test_divergences_of_tiny_epsilons_keep_their_digits(epsilon: float, order: float) -> None:
    """Mironov 2017, Propositions 5 (whose randomised response is attained) and 6, in 80 digits."""
    with mpmath.workdps(80):
        e, a = mpmath.mpf(epsilon), mpmath.mpf(order)
        p = mpmath.exp(e) / (1 + mpmath.exp(e))
        pure = mpmath.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1)
        share = a / (2 * a - 1)
        laplace = mpmath.log(share * mpmath.exp((a - 1) * e) + (1 - share) * mpmath.exp(-a * e)) / (a - 1)
    assert pure_divergence(epsilon, order) == pytest.approx(float(pure), rel=1e-11, abs=0)
    assert laplace_divergence(epsilon, order) == pytest.approx(float(laplace), rel=1e-11, abs=0)


def stated(*args: object) -> list[tuple[str, float | None, str]]:
    told = run(*map(str, args), "--trials", "all", "--format", "json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    return sorted((r["accountant"], r["epsilon"], r["note"] if r["epsilon"] is None else "") for r in found)


def test_trials_add_up_alike_by_every_route(write_recipe: WriteRecipe, train: Train) -> None:
    """Two results, their folder, their ledgers the library: twice the rho of one (Bun and Steinke 2016)."""
    path = write_recipe(**ONE_STEP)
    first, second = train(path), train(path, "seed=1")
    whole = stated(first.parent)
    assert stated(first, second) == whole
    assert stated(first / "ledger.jsonl", second / "ledger.jsonl") == whole
    assert stated(first, first, second) == whole
    by_library = dpsgd_cli.account(first, second, trials="all")
    assert sorted((r["accountant"], r["epsilon"]) for r in by_library) == [row[:2] for row in whole]
    one = rows(str(first), "--accountant", "zcdp")["zcdp"]["rho"]
    assert rows(str(first), str(second), "--trials", "all", "--accountant", "zcdp")["zcdp"]["rho"] == 2 * one


def test_trials_of_one_seed_are_refused_alike_by_every_route(write_recipe: WriteRecipe, train: Train) -> None:
    path = write_recipe(**ONE_STEP)
    first, second = train(path), train(path, "method.learning_rate=2")
    for sources in ([first.parent], [first, second], [first / "ledger.jsonl", second / "ledger.jsonl"]):
        found = stated(*sources)
        assert {epsilon for _, epsilon, _ in found} == {None}
        assert all("share seed 0, and thus noise" in note for _, _, note in found)
    assert run(str(path), str(first), "--trials", "all").exit_code == 2


@pytest.mark.parametrize(("epochs", "code", "words"), [(2, 2, "epochs go back"), (1, 0, "they may be two runs of one")])
def test_two_runs_of_one_seed_in_one_file_have_no_statement(
    tmp_path: Path, write_recipe: WriteRecipe, train: Train, epochs: int, code: int, words: str
) -> None:
    lines = (train(write_recipe(**ONE_STEP), f"epochs={epochs}") / "ledger.jsonl").read_text()
    path = tmp_path / "both.jsonl"
    path.write_text(lines)
    assert run(str(path), "--max-epsilon", "1e9").exit_code == 0
    path.write_text(lines + lines)
    for extra in ([], ["--trials", "all"]):
        told = run(str(path), *extra)
        assert (told.exit_code, words in " ".join(told.output.split())) == (code, True)
        assert run(str(path), *extra, "--max-epsilon", "1e9").exit_code == max(code, 1)
