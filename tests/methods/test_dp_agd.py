"""DP-AGD against a short reference written from the paper's Algorithm 2, one trial and one record at a time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.budget import EpsilonBudget
from dpsgd_cli.accounting.conversions import bun_steinke_epsilon, tight_zcdp_epsilon
from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.engine.streams import SeededStreams, Streams
from dpsgd_cli.errors import InfeasibleBudget
from dpsgd_cli.methods.dp_agd import AdaptivePlan, DpAgd, DpAgdMethod, agd_rates, largest_rho
from dpsgd_cli.noise.run import TrialNoise
from dpsgd_cli.noise.selection import select_least
from dpsgd_cli.recipe.schema import Recipe
from tests.methods.small_problem import Silent, context, points, recipe, run, signed


def agd(**changes: Any) -> dict[str, Any]:
    return {"kind": "dp-agd", "splits": 4, "refresh": 3, "step_candidates": 6, **changes}


def losses(w: np.ndarray, z: np.ndarray, bound: float) -> float:
    return float(np.minimum(np.log1p(np.exp(-z @ w)), bound).sum())


def gradient(w: np.ndarray, z: np.ndarray, bound: float) -> np.ndarray:
    each = -z / (1 + np.exp(z @ w))[:, None]
    return np.asarray((each / np.maximum(1, np.linalg.norm(each, axis=1, keepdims=True) / bound)).sum(axis=0))


def reference(made: Recipe, z: np.ndarray, stream: Streams) -> tuple[np.ndarray, list[tuple[str, float]]]:
    """Weights and the zCDP of each release. Lee and Kifer 2018, Algorithm 2, with the L2 term in direction and loss.

    With momentum, a direction is that of a sum of all earlier gradients, each weighted by momentum^age.
    """
    m, model = made.method, made.model
    assert isinstance(m, DpAgdMethod)
    assert isinstance(model, ConvexModel)
    assert made.privacy is not None
    assert isinstance(made.privacy.budget, EpsilonBudget)
    rho = largest_rho(made.privacy.budget.epsilon, 1e-5, "zcdp-tight")
    eps = made.privacy.budget.epsilon / (2 * m.splits)
    rho_max, rho_ng = eps**2 / (2 if m.selection == "laplace" else 8), eps**2 / (4 * math.log(1.25 / 1e-5))
    per_score = 4 if m.selection == "laplace" else 2
    double = torch.empty(0, dtype=torch.float64)
    noise = TrialNoise([stream], "agd-gradient", z.shape[1], double)
    pick = TrialNoise([stream], "agd-selection", (m.step_candidates + 1) * per_score, double)
    w, reach, pull, taken, spent = np.zeros(z.shape[1]), m.alpha_max, len(z) * model.l2, [], []
    gradients: list[np.ndarray] = []

    def measure(exact: np.ndarray, rho: float) -> np.ndarray:
        spent.append(("gaussian", rho))
        return np.asarray(exact + m.gradient_clip / math.sqrt(2 * rho) * noise.draw([0])[0].numpy())

    while rho - rho_ng - rho_max > 0:
        exact = gradient(w, z, m.gradient_clip)
        noisy, rho = measure(exact, rho_ng), rho - rho_ng
        choice = 0
        while choice == 0 and rho - rho_max > 0:
            gradients.append(noisy + pull * w)
            d = sum((m.momentum or 0.0) ** age * old for age, old in enumerate(reversed(gradients)))
            d = d / np.linalg.norm(d)
            steps = np.linspace(0, reach, m.step_candidates + 1)
            scores = [losses(w - a * d, z, m.objective_clip) + pull / 2 * np.sum((w - a * d) ** 2) for a in steps]
            spent.append(("pure", rho_max))
            rho -= rho_max
            normals = pick.draw([0]).view(1, len(steps), per_score)
            given_ = torch.tensor([scores]), torch.tensor([eps]), torch.tensor([m.objective_clip])
            choice = int(select_least(*given_, m.selection, normals))
            if choice > 0:
                w = w - steps[choice] * d
                taken.append(steps[choice])
            elif rho - m.gamma * rho_ng - rho_max > 0:
                better = (1 + m.gamma) * rho_ng
                noisy = (rho_ng * noisy + (better - rho_ng) * measure(exact, better - rho_ng)) / better
                rho, rho_ng = rho - (better - rho_ng), better
            else:
                return w, spent
        if len(taken) == m.refresh:
            reach, taken = (1 + m.alpha_growth) * max(taken), []
    return w, spent


def spending(method: DpAgd, trial: int) -> list[tuple[str, float]]:
    return [(e.release.mechanism.kind, total_rho([e.release])) for e in method.context.ledgers[trial].entries]


@pytest.mark.parametrize("selection", ["laplace", "exponential"])
@pytest.mark.parametrize("momentum", [None, 0.6])
@pytest.mark.parametrize("epsilon", [2.0, 30.0])
def test_with_the_same_noise_it_is_the_reference(selection: str, momentum: float | None, epsilon: float) -> None:
    chosen = agd(selection=selection, splits=9, momentum=momentum)
    made = recipe(chosen, privacy={"budget": {"epsilon": epsilon, "delta": 1e-5}}, repeats=3)
    method = DpAgd(context(made))
    run(method)
    rejected = 0
    for trial in range(3):
        weights, spent = reference(made, signed(made), SeededStreams(trial))
        ours = spending(method, trial)
        assert [kind for kind, _ in ours] == [kind for kind, _ in spent]
        assert [rho for _, rho in ours] == pytest.approx([rho for _, rho in spent], rel=1e-9)
        assert np.allclose(method.output[trial].numpy(), weights, atol=1e-8)
        kinds = [kind for kind, _ in ours]
        rejected += len({rho for kind, rho in ours if kind == "gaussian"}) > 1
        assert kinds[0] == "gaussian"
    assert rejected or epsilon > 10


def test_clipped_gradients_and_losses_are_those_of_the_reference() -> None:
    """Bounds that every gradient and most losses reach."""
    clips = {"gradient_clip": 0.1, "objective_clip": 0.6}
    made = recipe(agd(splits=9, **clips), privacy={"budget": {"epsilon": 30.0, "delta": 1e-5}})
    method = DpAgd(context(made, streams=[SeededStreams(4)]))
    run(method)
    weights, _ = reference(made, signed(made), SeededStreams(4))
    assert np.allclose(method.output[0].numpy(), weights, atol=1e-8)
    assert (np.log1p(np.exp(-signed(made) @ weights)) > 0.6).sum() > 10


@pytest.mark.parametrize("selection", ["laplace", "exponential"])
def test_a_choice_among_replaced_records_has_twice_the_noise(selection: str) -> None:
    """The index is that of scores over twice the bound: a replaced record moves one score up and another down by it
    (Durfee and Rogers 2019: bounded range). The noise of once the bound would choose otherwise now and then."""
    noisy = torch.tensor([1.0, -0.5, 0.2, 0.1, -1.0], dtype=torch.float64)
    d, steps = (noisy / noisy.norm()).numpy(), np.linspace(0, 2, 7)
    per_score = 4 if selection == "laplace" else 2
    found: dict[str, list[int]] = {"add-remove": [], "replace-one": []}
    expected: dict[int, list[int]] = {1: [], 2: []}
    for adjacency, chosen in found.items():
        privacy = {"budget": {"epsilon": 2.0, "delta": 1e-5}, "adjacency": adjacency}
        made = recipe(agd(selection=selection), privacy=privacy)
        trial = context(made)
        for seed in range(150):
            trial.pack.values.zero_()
            method = DpAgd(replace(trial, streams=(SeededStreams(seed),), ledgers=(Ledger(),)))
            method.averaged.copy_(noisy)
            method._aim(torch.tensor([0]))
            method._choose([0], torch.tensor([0]), 0)
            chosen.append(round(sum(method.paces[0].recent) / steps[1]))
    scores = [losses(-a * d, signed(made), 3.0) + 0.6 / 2 * a**2 for a in steps]
    for span, seed in itertools.product(expected, range(150)):
        pick = TrialNoise([SeededStreams(seed)], "agd-selection", 7 * per_score, torch.empty(0, dtype=torch.float64))
        law = torch.tensor([scores]), torch.tensor([2.0 / 8]), torch.tensor([3.0 * span])
        expected[span].append(int(select_least(*law, selection, pick.draw([0]).view(1, 7, -1))))  # type: ignore[arg-type]
    assert found == {"add-remove": expected[1], "replace-one": expected[2]}
    assert expected[1] != expected[2]


def test_without_noise_it_is_the_reference_and_descends() -> None:
    made = recipe(agd(), privacy={"budget": {"epsilon": 3.0, "delta": 1e-5}})
    method = DpAgd(context(made, streams=[Silent(0)]))
    run(method)
    weights, _ = reference(made, signed(made), Silent(0))
    assert np.allclose(method.output[0].numpy(), weights, atol=1e-9)
    assert losses(weights, signed(made), 9) < 0.9 * losses(np.zeros(5), signed(made), 9)


def steep_valley() -> tuple[np.ndarray, np.ndarray]:
    """Classes 0 and 1 that a hinge tells apart only by moving along its kink: one in ten is of class 1."""
    rng = np.random.default_rng(0)
    y = (np.arange(200) % 10 == 0).astype(np.int64)
    x = rng.uniform(size=(200, 4))
    x[:, 0] = 0.4 * x[:, 0] + 0.6 * y
    return x, y


@pytest.mark.parametrize("splits", [40, 160])
def test_without_noise_a_kink_stops_single_gradients_and_not_their_sum(splits: int) -> None:
    """More than twice the loss is left where each direction is of one gradient, even by four times as many steps."""
    z = signed(recipe(agd()), steep_valley())
    reached = {}
    for momentum, steps in ((None, splits), (0.7, 40)):
        chosen = agd(gradient_share=0.5, splits=steps, step_candidates=20, refresh=10, alpha_shrink=0.5)
        made = recipe(
            {**chosen, "momentum": momentum},
            model={"kind": "convex", "loss": "hinge", "l2": 0.001},
            privacy={"budget": {"epsilon": 3.0, "delta": 1e-5}},
        )
        method = DpAgd(context(made, streams=[Silent(0)], data=steep_valley()))
        run(method)
        reached[momentum] = float(np.maximum(0, 1 - z @ method.output[0].numpy()).mean())
    assert reached[0.7] < reached[None] / 2


def test_the_chosen_candidate_is_applied_and_not_the_one_before() -> None:
    """The published code moved by candidate[i - 1]; without noise the first step must be the best listed length."""
    made = recipe(agd())
    method = DpAgd(context(made, streams=[Silent(0)]))
    method._round(0)
    z = signed(made)
    d = gradient(np.zeros(5), z, 3.0)
    d /= np.linalg.norm(d)
    steps = np.linspace(0, 2, 7)
    scores = [losses(-a * d, z, 3.0) + 0.6 / 2 * a**2 for a in steps]
    assert np.allclose(method.output[0].numpy(), -steps[int(np.argmin(scores))] * d)
    assert np.argmin(scores) > 0


def test_repeated_rejections_average_all_measurements_by_inverse_variance() -> None:
    """Every selection refused: after k of them the average has the noise of their whole budget."""
    made = recipe(agd(gamma=0.5, splits=3), privacy={"budget": {"epsilon": 1.0, "delta": 1e-5}})
    trial = context(made)
    method = DpAgd(trial)
    weights, measured = [], []
    method._measure([0], [])
    first = (method.averaged - method.exact)[0].clone()
    weights.append(method.paces[0].rho)
    measured.append(first)
    for _ in range(3):
        method.paces[0].rejected = True
        before, rho = method.averaged[0].clone(), method.paces[0].rho
        extra = method.paces[0].price(0.5)
        method._measure([], [0])
        assert method.paces[0].rho == pytest.approx(rho + extra)
        # recover the new measurement from the average, then check the average of all
        second = (method.averaged[0] * (rho + extra) - before * rho) / extra - method.exact[0]
        weights.append(extra)
        measured.append(second)
    expected = torch.stack([w * m for w, m in zip(weights, measured, strict=True)]).sum(dim=0) / sum(weights)
    assert torch.allclose(method.averaged[0] - method.exact[0], expected)
    assert method.paces[0].rho == pytest.approx(weights[0] * 1.5**3)


def test_a_trial_is_the_same_alone_or_in_a_pack() -> None:
    made = recipe(agd(), repeats=3, folds=2)
    pack = DpAgd(context(made))
    run(pack)
    streams: list[Streams] = [SeededStreams(4)]
    alone = context(made, streams=streams)
    assert pack.context.table.held_out is not None
    alone = alone.__class__(**{**alone.__dict__, "table": alone.table.with_folds(pack.context.table.held_out[:, 4:5])})
    single = DpAgd(alone)
    run(single)
    assert torch.allclose(single.output[0], pack.output[4], atol=1e-9)
    assert spending(single, 0) == spending(pack, 4)


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("chosen", [agd(refresh=2, momentum=0.5), agd(refresh=2), agd(splits=12)])
def test_a_restored_run_goes_on_as_if_never_stopped(chosen: dict[str, Any], stop: int) -> None:
    made = recipe(chosen, privacy={"budget": {"epsilon": 3.0, "delta": 1e-5}}, repeats=2)
    whole, part, rest = DpAgd(context(made)), DpAgd(context(made)), DpAgd(context(made))
    run(whole)
    for epoch in range(stop):
        part.run_epoch(epoch)
    rest.load_state(part.state())
    for epoch in range(stop, rest.epochs):
        rest.run_epoch(epoch)
    assert torch.allclose(rest.output, whole.output, atol=1e-9)


@settings(max_examples=25)
@given(
    chosen=st.fixed_dictionaries(
        {
            "splits": st.floats(1, 12),
            "gradient_share": st.none() | st.floats(0.05, 0.95),
            "gamma": st.floats(0.01, 5),
            "momentum": st.none() | st.floats(0.05, 0.95),
            "selection": st.sampled_from(["laplace", "exponential"]),
        }
    ),
    epsilon=st.floats(0.05, 20),
    accountant=st.sampled_from(["zcdp", "zcdp-tight"]),
    adjacency=st.sampled_from(["add-remove", "replace-one", "zero-out"]),
)
def test_no_budget_is_ever_passed(chosen: dict[str, Any], epsilon: float, accountant: str, adjacency: str) -> None:
    privacy = {"budget": {"epsilon": epsilon, "delta": 1e-5}, "accountant": accountant, "adjacency": adjacency}
    made = recipe(agd(**chosen), privacy=privacy, repeats=2)
    try:
        method = DpAgd(context(made, data=points(12, 2)))
    except InfeasibleBudget:
        return
    run(method)
    assert method.finished
    convert = bun_steinke_epsilon if accountant == "zcdp" else tight_zcdp_epsilon
    for ledger in method.context.ledgers:
        assert ledger.entries
        assert {e.release.mechanism.adjacency for e in ledger.entries} == {adjacency}
        assert convert(total_rho(ledger.releases), 1e-5) <= epsilon
        # every gradient is followed by a selection: nothing was paid for in vain
        kinds = [e.release.mechanism.kind for e in ledger.entries]
        assert kinds == ["gaussian", "pure"] * (len(kinds) // 2)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_recorded_noise_is_the_noise_that_was_added(adjacency: str) -> None:
    """Noise of many measurements, over what the ledger records; rejects 2/3 and 3/2 of it (20,000 normals)."""
    made = recipe(agd(), privacy={"budget": {"epsilon": 1.0, "delta": 1e-5}, "adjacency": adjacency})
    method = DpAgd(context(made))
    method._pay_for_gradients(0)
    mechanism = method.context.ledgers[0].entries[0].release.mechanism
    assert isinstance(mechanism, GaussianSum)
    assert mechanism.sensitivity == 3.0 * (2 if adjacency == "replace-one" else 1)
    drawn = []
    for _ in range(4000):
        method._measure([0], [])
        drawn.append(method.averaged[0] - method.exact[0])
    ratio = float(torch.stack(drawn).std()) / (mechanism.noise_multiplier * mechanism.sensitivity)
    assert ratio == pytest.approx(1, abs=0.03)


def test_published_rates_give_a_gradient_a_37th_of_a_selection() -> None:
    made = recipe({"kind": "dp-agd"}, privacy={"budget": {"epsilon": 0.8, "delta": 1e-8}, "accountant": "zcdp"})
    plan = context(made).plans[0]
    assert isinstance(plan, AdaptivePlan)
    assert isinstance(made.method, DpAgdMethod)
    rates = agd_rates(made.method, plan)
    assert rates.selection_epsilon == pytest.approx(0.8 / 120)
    assert rates.selection_rho / rates.gradient_rho == pytest.approx(37.3, abs=0.1)


def test_shares_give_each_iteration_its_part() -> None:
    made = recipe(agd(splits=10, gradient_share=0.75, selection="exponential"))
    method = DpAgd(context(made))
    rates = method.rates[0]
    assert (rates.gradient_rho + rates.selection_rho) * 10 == pytest.approx(rates.rho)
    assert rates.gradient_rho / rates.selection_rho == pytest.approx(3)
    mechanism = method._selection(0)
    assert isinstance(mechanism, PureDP)
    assert mechanism.source == "exponential"
    assert total_rho([e.release for e in method.context.ledgers[0].entries]) == 0
