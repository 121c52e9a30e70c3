"""What private choices and counts draw, as the methods themselves draw it, against the law that the ledger charges."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.mechanism import PureDP
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.errors import UsageError
from dpsgd_cli.methods.base import _refuse, create
from dpsgd_cli.methods.baselines import Majority
from dpsgd_cli.methods.private_selection import PrivateSelection
from dpsgd_cli.methods.privgene import _Chooser
from dpsgd_cli.methods.settings import METHODS
from dpsgd_cli.noise.selection import select_least
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.training.loop import plan_recipe
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member, start
from tests.conftest import WriteRecipe
from tests.methods.small_problem import Silent, context, points, recipe, run

BUDGET = {"budget": {"epsilon": 2.0, "delta": 1e-5}}
SELECTION: dict[str, Any] = {
    "kind": "private-selection",
    "batching": "shuffle",
    "batch_size": 4,
    "learning_rate": 0.5,
    "epsilon": 1.0,
    "candidates": [{"kind": "uniform", "initial": 4}] * 3,
}


def made(kind: str, **changes: Any) -> Recipe:
    method = {"kind": kind, **changes.pop("method", {})}
    return recipe(method, **{"privacy": BUDGET, **changes})


def selection(write_recipe: WriteRecipe, adjacency: str = "zero-out") -> PrivateSelection:
    """One trial of private selection among three equal schedules, before its first epoch."""
    privacy = {"budget": {"rho": 0.5}, "delta": 1e-3, "adjacency": adjacency}
    loaded = load_recipe(str(write_recipe(method=SELECTION, privacy=privacy, epochs=3, repeats=1)))
    settled = resolve_auto(loaded)
    method = start([Member(settled, plan_recipe(settled)[0])]).method
    assert isinstance(method, PrivateSelection)
    return method


@pytest.mark.parametrize(("adjacency", "span"), [("zero-out", 1), ("replace-one", 2)])
def test_the_published_index_has_the_law_that_its_adjacency_needs(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, adjacency: str, span: int
) -> None:
    """P(i) is proportional to exp(-eps z_i / D) of what the method itself publishes; D = 2 where a replaced record may
    raise one count and lower another (Yu et al. 2019, IV-A3), 1 where a null record lowers none.

    Frequencies over 1500 seeds, 4.5 standard errors: fails falsely with P < 1e-4. Half and twice of D must not pass.
    """
    method = selection(write_recipe, adjacency)
    wrong, draws = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64), 1500
    monkeypatch.setattr(method, "_wrong", lambda: wrong)
    counts = torch.zeros(3)
    for seed in range(draws):
        method.context = replace(method.context, streams=(SeededStreams(seed),))
        method._choose()
        counts[method.chosen[0]] += 1

    def fits(divisor: float) -> bool:
        law = torch.softmax(-wrong / divisor, 0)
        return bool(((counts / draws - law).abs() < 4.5 * (law * (1 - law) / draws).sqrt()).all())

    assert fits(span)
    assert not fits(span / 2) and not fits(2 * span)
    # the largest loss of neighbours: one record more wrong for the first and right for the others (replaced), or every
    # count up by as much as one (null)
    least, raised = torch.log_softmax(-wrong / span, 0), wrong + torch.tensor([1.0, 1.0 - span, 1.0 - span])
    assert float((least - torch.log_softmax(-raised / span, 0)).abs().max()) <= 1.0


def test_noise_batches_and_initial_weights_of_candidates_are_their_own(write_recipe: WriteRecipe) -> None:
    """Noise that candidates with the same schedule shared would cancel in the difference of their weights."""
    first, second, _ = selection(write_recipe).inner.context.streams
    outer = SeededStreams(0)
    for purpose in ("noise", "choice"):
        drawn = [s.normal(purpose, 0, torch.empty(8, dtype=torch.float64)) for s in (first, second, outer)]
        assert len({tuple(one.tolist()) for one in drawn}) == 3
    assert len({s.bits("poisson", 0) for s in (first, second, outer)}) == 3
    assert len({tuple(s.permutation("shuffle", 0, 20).tolist()) for s in (first, second, outer)}) == 3
    assert len({tuple(s.distinct("poisson", 0, 1000, 9).tolist()) for s in (first, second, outer)}) == 3
    assert len({s.integer("init") for s in (first, second, outer)}) == 3


def test_weights_that_are_not_finite_are_wrong_of_every_judge(write_recipe: WriteRecipe) -> None:
    """A candidate that diverged must not seem the best."""
    method = selection(write_recipe)
    method.inner.context.pack.values[1] = math.nan
    assert method._wrong()[1] == 12


def test_the_noise_of_majority_is_laplace_of_the_scale_that_was_charged() -> None:
    """Kolmogorov-Smirnov at 1e-6 of 2000 seeds (Dwork and Roth 2014, Theorem 3.6: scale 1/eps for a difference that
    one record moves by 1); half and twice of the scale, and noise on one side only, are rejected."""
    method = create(context(made("majority")))
    assert isinstance(method, Majority)
    drawn = []
    for seed in range(2000):
        method.context = replace(method.context, streams=(SeededStreams(seed),))
        drawn.append(method._released(0, 3.0) - 3.0)
    assert stats.kstest(drawn, stats.laplace(scale=1 / 2.0).cdf).pvalue > 1e-6
    for scale in (0.25, 1.0):
        assert stats.kstest(drawn, stats.laplace(scale=scale).cdf).pvalue < 1e-12
    assert stats.kstest(np.abs(drawn), stats.laplace(scale=1 / 2.0).cdf).pvalue < 1e-12


@pytest.mark.parametrize(("adjacency", "span"), [("add-remove", 1), ("replace-one", 2)])
def test_privgene_chooses_by_the_epsilon_that_it_charges(adjacency: str, span: int) -> None:
    """P(i) is proportional to exp(-eps misses_i / D) with the eps of the ledger, over 1500 choices of one chooser, 4.5
    standard errors; half and twice of eps do not pass. D = 2 where a replaced record moves counts both ways."""
    one = made("privgene", method={"rounds": 1, "survivors": 1}, privacy={**BUDGET, "adjacency": adjacency})
    trial = context(one)
    chooser = _Chooser(trial, 0, one.method.choices)  # type: ignore[union-attr]
    chooser.ledger = Ledger()
    misses = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    chosen = torch.bincount(torch.tensor([chooser.choose(misses) for _ in range(1500)]), minlength=3) / 1500
    charged = chooser.ledger.entries[0].release.mechanism
    assert isinstance(charged, PureDP)
    assert (len(chooser.ledger.entries), charged.adjacency) == (1500, adjacency)

    def fits(epsilon: float) -> bool:
        law = torch.softmax(-epsilon * misses / span, 0)
        return bool(((chosen - law).abs() < 4.5 * (law * (1 - law) / 1500).sqrt()).all())

    assert fits(charged.epsilon)
    assert not fits(charged.epsilon / 2) and not fits(2 * charged.epsilon)


def test_privgene_never_chooses_by_more_than_it_charges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the rounding of a float32 either: thirty budgets, of which about half would be rounded up."""
    used: list[float] = []

    def watched(scores: torch.Tensor, epsilon: torch.Tensor, bound: torch.Tensor, *others: Any) -> torch.Tensor:
        used.append(float(epsilon / bound))
        return select_least(scores, epsilon, bound, *others)

    monkeypatch.setattr("dpsgd_cli.noise.selection.select_least", watched)
    for epsilon in np.linspace(0.5, 3, 30):
        one = made("privgene", privacy={"budget": {"epsilon": float(epsilon), "delta": 1e-5}})
        chooser = _Chooser(context(one), 0, one.method.choices)  # type: ignore[union-attr]
        chooser.choose(torch.zeros(3, dtype=torch.float64))
        charged = chooser.ledger.entries[0].release.mechanism
        assert isinstance(charged, PureDP)
        assert used[-1] == charged.epsilon


def test_output_perturbation_descends_on_rows_no_longer_than_the_public_bound() -> None:
    """Features up to 50 where the bound says 1: without noise the same weights as on rows that were shortened before,
    and one record more moves them by no more than the ledger's sensitivity."""
    x, y = points(61)
    x[:, 0] *= 50
    short = np.hstack([x, np.ones((61, 1))])
    short *= np.minimum(1, math.sqrt(5) / np.linalg.norm(short, axis=1))[:, None]
    one = made("output-perturbation", method={"steps": 20}, model={"kind": "convex", "bias": False, "l2": 0.0})
    ends = []
    for data in ((np.hstack([x, np.ones((61, 1))]), y), (short, y)):
        trial = context(one, streams=[Silent(0)], data=data)
        method = create(replace(trial, feature_bound=math.sqrt(5)))
        run(method)
        ends.append(method.output[0].numpy().copy())
    assert np.linalg.norm(short, axis=1).max() == pytest.approx(math.sqrt(5))
    assert np.allclose(ends[0], ends[1], rtol=1e-9)


@pytest.mark.parametrize("kind", sorted({*METHODS} - {"python"}))
def test_only_methods_that_look_at_the_data_through_one_sum_run_in_several_processes(kind: str) -> None:
    """Each process would release by itself what the ledger is charged for once, and see only a part or everything."""
    together = {"sgd", "dp-sgd"}
    method = METHODS[kind].model_construct(batching="full")
    one = SimpleNamespace(recipes=(SimpleNamespace(method=method, privacy=None),), team=Team(0, 2), table=None)
    if kind in together:
        _refuse(one)  # type: ignore[arg-type]
        return
    with pytest.raises(UsageError, match=f"method {kind} trains in one process, not in 2"):
        _refuse(one)  # type: ignore[arg-type]
