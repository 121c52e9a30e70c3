"""Preconditioned descent against NumPy on rows that were written out, and what is charged and drawn for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.stats import norm

from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.methods.base import Method
from dpsgd_cli.methods.dp_gd import DpGd
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.noise.run import NoiseSource
from dpsgd_cli.preconditioning import maps
from dpsgd_cli.preconditioning import run as preconditioning
from dpsgd_cli.recipe.schema import Recipe
from tests.methods.small_problem import context, points, recipe, run

T, D, BOUND, SHARE = 6, 4, 0.6, 0.3
RHO = 0.5
BINNED = {"path": "small.csv", "target": "y", "preprocess": [{"bin": {}}]}


def made(**changes: Any) -> Recipe:
    kind = changes.pop("preconditioner", "second-moment")
    settings = {"kind": kind, "share": SHARE}
    if kind == "marginals":
        changes.setdefault("data", BINNED)
    method = {"kind": "dp-gd", "learning_rate": 3.0, "preconditioner": settings, **changes.pop("method", {})}
    privacy = {"budget": {"rho": RHO}, "delta": 1e-5, "clipping": {"kind": "flat", "norm": BOUND}}
    privacy |= changes.pop("privacy", {})
    return recipe(method, **{"model": {"kind": "convex"}, "privacy": privacy, "epochs": T, **changes})


def noisy_moments(x: np.ndarray, seed: int, scale: float) -> np.ndarray:
    """A trial's second moments of unit rows, entry by entry."""
    draws = iter(SeededStreams(seed).normal("second-moment", 0, torch.empty(D * (D + 1) // 2).double()).tolist())
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    total = np.zeros((D, D))
    for i in range(D):
        for j in range(i, D):
            noise = scale * next(draws) / (1 if i == j else math.sqrt(2))
            total[i, j] = total[j, i] = sum(row[i] * row[j] for row in unit) + noise
    return total


def noisy_counts(x: np.ndarray, seed: int, scale: float) -> np.ndarray:
    """A trial's noisy counts of the rows whose largest feature is each: the cells, as `context` has no table."""
    draws = SeededStreams(seed).normal("marginals", 0, torch.empty(D).double()).numpy()
    counts = np.array([sum(int(max(row) == row[cell]) for row in x) for cell in range(D)])
    return np.asarray(counts + scale * draws)


def weighed(x: np.ndarray, seed: int, scale: float, records: int) -> np.ndarray:
    """The map that noisy counts make of cells that exclude each other: rows of mean square 1, of any length each."""
    shares = noisy_counts(x, seed, scale) / records
    excess = optimize.brentq(lambda cut: np.maximum(shares - cut, 0).sum() - 1, -10, 10)
    seen = np.maximum(shares - excess, 0)
    root = (seen + 8 / (records * math.sqrt(2 * RHO))) ** -0.5
    return np.diag(root / math.sqrt(sum(seen * root**2)))


def rooted(x: np.ndarray, seed: int, scale: float) -> np.ndarray:
    """The root that noisy second moments make."""
    values, vectors = np.linalg.eigh(noisy_moments(x, seed, scale))
    reach = scale * math.sqrt(2 * D)
    seen = [(e + math.sqrt(e * e - reach * reach)) / 2 if e > reach else 0.0 for e in values]
    return np.asarray(vectors @ np.diag((np.array(seen) + reach / 2) ** -0.5) @ vectors.T)


def descent(u: np.ndarray, y: np.ndarray, records: int, noise: np.ndarray, bound: float) -> np.ndarray:
    """Logistic DP-GD on rows (u, 1), T steps of length 3."""
    z, w = np.hstack([u, np.ones((len(u), 1))]) * (2 * y - 1)[:, None], np.zeros(D + 1)
    for own in noise:
        each = -z / (1 + np.exp(z @ w))[:, None]
        each /= np.maximum(1, np.linalg.norm(each, axis=1, keepdims=True) / bound)
        w = w - 3.0 * (each.sum(axis=0) + own) / records
    return w


def margins(method: Method, trial: int) -> np.ndarray:
    """Of all rows, by what would be published."""
    table = method.rows_for_output(method.context.table)
    rows, _, _ = table.every(0, table.rows)
    values = method.output[trial].numpy()
    return np.asarray(rows[trial if len(rows) > 1 else 0].numpy() @ values[:D] + values[D])


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("folds", [None, 3])
@pytest.mark.parametrize("kind", ["dp-gd", "dp-sgd"])
@pytest.mark.parametrize("preconditioner", ["second-moment", "marginals"])
def test_with_the_same_noise_it_is_descent_on_rows_that_were_written_out(
    adjacency: str, folds: int | None, kind: str, preconditioner: str
) -> None:
    one = made(
        preconditioner=preconditioner,
        method={"kind": kind, "batching": "full"},
        privacy={"adjacency": adjacency},
        repeats=2,
        folds=folds,
    )
    method = (DpGd if kind == "dp-gd" else DpSgd)(context(one))
    run(method)
    (x, y), table = points(), method.context.table
    moves = 2 if adjacency == "replace-one" else 1
    moments = math.sqrt(moves) / math.sqrt(SHARE * 2 * RHO)
    steps = moves * BOUND * math.sqrt(T / ((1 - SHARE) * 2 * RHO))
    source = NoiseSource(method.context.streams, D + 1, torch.device("cpu"), torch.float64)
    noise = np.stack([source.draw(t).numpy() * steps for t in range(T)])
    for trial in range(one.trials):
        own = np.ones(len(y), bool) if table.held_out is None else ~table.held_out[:, trial].numpy()
        root = (
            rooted(x[own], trial, moments)
            if preconditioner == "second-moment"
            else weighed(x[own], trial, moments, len(table))
        )
        everyone = x @ root
        if preconditioner == "second-moment":
            everyone /= np.linalg.norm(everyone, axis=1, keepdims=True)
        w = descent(everyone[own], y[own], len(table), noise[:, trial], BOUND)
        np.testing.assert_allclose(margins(method, trial), everyone @ w[:D] + w[D], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("adjacency", "moved"), [("add-remove", 1), ("zero-out", 1), ("replace-one", math.sqrt(2))])
@pytest.mark.parametrize("budget", [{"rho": RHO}, {"epsilon": 2.0, "delta": 1e-5}])
@pytest.mark.parametrize("kind", ["second-moment", "marginals"])
def test_the_release_is_charged_its_share_before_anything_else(
    adjacency: str, moved: float, budget: dict[str, float], kind: str
) -> None:
    """The whole mu from scipy and the trade-off of a Gaussian, the parts by hand."""
    one = made(preconditioner=kind, privacy={"adjacency": adjacency, "budget": budget, "delta": 1e-5})
    method = DpGd(context(one))
    ledger = method.context.ledgers[0]
    plan = method.context.plans[0]
    assert plan is not None
    for release in plan.preprocessing_releases:
        ledger.spend(release, phase="before")
    run(method)
    found = [entry.release.mechanism for entry in ledger.entries]
    assert all(isinstance(mechanism, GaussianSum) for mechanism in found)
    first, *rest = [mechanism for mechanism in found if isinstance(mechanism, GaussianSum)]
    assert (first.label, first.batching, first.adjacency) == (kind, "full", adjacency)
    assert first.sensitivity == pytest.approx(moved)
    assert len(rest) == T and {mechanism.label for mechanism in rest} == {"gradient"}

    def delta(mu: float) -> float:
        return float(norm.cdf(mu / 2 - 2.0 / mu) - math.exp(2.0) * norm.cdf(-mu / 2 - 2.0 / mu))

    whole = 2 * RHO if "rho" in budget else optimize.brentq(lambda mu: delta(mu) - 1e-5, 0.1, 3.0, xtol=1e-13) ** 2
    assert first.noise_multiplier**-2 == pytest.approx(SHARE * whole, rel=1e-6)
    assert sum(mechanism.noise_multiplier**-2 for mechanism in rest) == pytest.approx((1 - SHARE) * whole, rel=1e-6)


def test_the_share_is_of_what_preprocessing_leaves() -> None:
    from dpsgd_cli.accounting.mechanism import Release
    from dpsgd_cli.accounting.plan import Facts
    from dpsgd_cli.methods.experiment import plan_for

    spent = Release(GaussianSum(2.0, "add-remove", label="pca"))
    plan = plan_for(made(), Facts(60, preprocessing_releases=[spent]))
    first, second = [release.mechanism for release in plan.preprocessing_releases]
    assert first == spent.mechanism and isinstance(second, GaussianSum)
    assert second.noise_multiplier**-2 == pytest.approx(SHARE * (2 * RHO - 1 / 4))
    assert plan.rho() == pytest.approx(RHO)


@pytest.mark.parametrize("kind", ["second-moment", "marginals"])
def test_a_trial_does_not_see_its_pack(kind: str) -> None:
    pack = DpGd(context(made(preconditioner=kind, repeats=3)))
    alone = DpGd(context(made(preconditioner=kind, seed=2)))
    run(pack)
    run(alone)
    assert torch.allclose(pack.output[2], alone.output[0])
    assert pack.preconditioning is not None and alone.preconditioning is not None
    *_, maps = pack.preconditioning.kept if kind == "marginals" else [pack.cuts]
    *_, own = alone.preconditioning.kept if kind == "marginals" else [alone.cuts]
    assert torch.equal(maps[2], own[0]) and not torch.equal(maps[0], maps[1])


@pytest.mark.parametrize("folds", [None, 3])
@pytest.mark.parametrize("kind", ["second-moment", "marginals"])
def test_rows_of_full_batches_are_moved_once(kind: str, folds: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"kind": "dp-sgd", "batching": "full"}
    kept, anew = (DpSgd(context(made(preconditioner=kind, method=full, folds=folds))) for _ in range(2))
    way = maps.Preconditioner if kind == "second-moment" else maps.BlockMap
    moved, units = list[int](), way.units

    def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
        moved.append(x.shape[1])
        return units(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(way, "units", counting)
        run(kept)
        once = len(moved)
        patch.setattr(preconditioning, "MOST_MOVED", 0)
        run(anew)
    assert once > 0 and len(moved) == once * (1 + T)
    assert torch.equal(kept.output, anew.output)


def test_rows_elsewhere_or_changed_are_moved_anew() -> None:
    method = DpSgd(context(made(preconditioner="marginals", method={"kind": "dp-sgd", "batching": "full"})))
    run(method)
    found, table = method.preconditioning, method.context.table
    assert found is not None
    before = found.units(table.x[None]).clone()
    other, kept = table.x[None] + 1, len(found._rows)
    assert torch.equal(found.units(other), found.ready.units(other)) and len(found._rows) == kept
    table.x.mul_(2)
    assert torch.equal(found.units(table.x[None]), found.ready.units(table.x[None]))
    assert not torch.equal(found.units(table.x[None]), before)


class Counted(SeededStreams):
    """Streams that remember what was asked of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.asked: list[str] = []

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        self.asked.append(purpose)
        return super().normal(purpose, counter, out)


@pytest.mark.parametrize("kind", ["second-moment", "marginals"])
def test_what_a_checkpoint_holds_is_not_released_again(kind: str) -> None:
    whole = DpGd(context(made(preconditioner=kind)))
    run(whole)
    first, streams = DpGd(context(made(preconditioner=kind))), Counted(0)
    first.run_epoch(0)
    state = first.state()
    second = DpGd(context(made(preconditioner=kind), streams=[streams]))
    second.load_state(state)
    for epoch in range(1, T):
        second.run_epoch(epoch)
    assert kind not in streams.asked and "noise" in streams.asked
    assert torch.equal(second.output, whole.output)
