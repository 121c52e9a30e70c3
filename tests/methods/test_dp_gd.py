"""DP-GD and GD against a few lines of NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dpsgd_cli.accounting import accountants
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.errors import UnsupportedMechanism
from dpsgd_cli.methods.dp_gd import DpGd, Gd
from dpsgd_cli.noise.run import NoiseSource
from dpsgd_cli.recipe.schema import Recipe
from tests.methods.small_problem import Silent, context, recipe, run, signed

T = 12


def clipped(w: np.ndarray, z: np.ndarray, bound: float) -> np.ndarray:
    each = -z / (1 + np.exp(z @ w))[:, None]
    return np.asarray((each / np.maximum(1, np.linalg.norm(each, axis=1, keepdims=True) / bound)).sum(axis=0))


def reference(z: np.ndarray, noise: np.ndarray, rate: float, radius: float, bound: float) -> list[np.ndarray]:
    """Lecture 15, Algorithm 2: the iterates w_0 ... w_T; `noise` is that on the sum."""
    w = np.zeros(z.shape[1])
    iterates = [w]
    for t in range(len(noise)):
        w = w - rate * ((clipped(w, z, bound) + noise[t]) / len(z) + 0.01 * w)
        w = w / max(1, np.linalg.norm(w) / radius)
        iterates.append(w)
    return iterates


def made(**changes: Any) -> Recipe:
    method = {"kind": "dp-gd", "learning_rate": 2.0, **changes.pop("method", {})}
    model = {"kind": "convex", "l2": 0.01, "radius": 1.5}
    privacy = {"budget": {"epsilon": 0.9, "delta": 1e-5}, "clipping": {"kind": "flat", "norm": 0.7}}
    return recipe(method, **{"model": model, "privacy": privacy, "epochs": T, **changes})


@pytest.mark.parametrize(
    ("averaging", "kept"),
    [(None, slice(T, None)), ({"kind": "all"}, slice(0, T)), ({"kind": "tail", "fraction": 0.25}, slice(T - 2, None))],
)
def test_with_the_same_noise_it_is_the_reference(averaging: dict[str, Any] | None, kept: slice) -> None:
    one = made(method={"averaging": averaging}, repeats=2)
    method = DpGd(context(one))
    run(method)
    plan = method.context.plans[0]
    assert plan is not None
    scale = plan.noise_multipliers[0] * 0.7
    source = NoiseSource([SeededStreams(1)], 5, torch.device("cpu"), torch.float64)
    noise = np.stack([source.draw(t)[0].numpy() * scale for t in range(T)])
    iterates = reference(signed(one), noise, 2.0, 1.5, 0.7)
    assert np.allclose(method.output[1].numpy(), np.mean(iterates[kept], axis=0))


def test_without_noise_dp_gd_is_gd() -> None:
    private, plain = made(), made(method={"kind": "gd"}, privacy=None)
    wide = {"budget": {"epsilon": 0.9, "delta": 1e-5}, "clipping": {"kind": "flat", "norm": 100}}
    quiet = DpGd(context(made(privacy=wide), streams=[Silent(0)]))
    exact = Gd(context(plain))
    run(quiet)
    run(exact)
    assert torch.allclose(quiet.output, exact.output)
    assert np.allclose(exact.output[0].numpy(), reference(signed(plain), np.zeros((T, 5)), 2.0, 1.5, 1e9)[-1])
    assert private.privacy is not None
    assert exact.context.ledgers[0].entries == []


def test_the_packed_path_for_other_models_agrees() -> None:
    """The same recipe through dp-sgd with full batches: recorded activations instead of the closed form."""
    from dpsgd_cli.methods.dp_sgd.run import DpSgd

    fast = DpGd(context(made(repeats=2, folds=3)))
    slow = DpSgd(context(made(method={"kind": "dp-sgd", "batching": "full"}, repeats=2, folds=3)))
    run(fast)
    run(slow)
    assert torch.allclose(fast.output, slow.output)


@pytest.mark.parametrize("name", ["auto", "zcdp", "lemma-15.1", "nikolov"])
def test_noise_by_each_theorem_meets_its_own_statement_and_the_exact_one(name: str) -> None:
    method = DpGd(context(made(privacy={"budget": {"epsilon": 0.9, "delta": 1e-5}, "accountant": name})))
    run(method)
    releases = method.context.ledgers[0].releases
    stated = accountants.get("gaussian" if name == "auto" else name).epsilon(releases, 1e-5)
    assert stated == pytest.approx(0.9, rel=1e-4)
    assert stated <= 0.9
    exact = accountants.get("gaussian").epsilon(releases, 1e-5)
    assert exact <= 0.9
    assert (exact == pytest.approx(0.9, rel=1e-4)) == (name == "auto")


def test_lemma_15_1_gives_the_variance_it_states() -> None:
    privacy = {"budget": {"epsilon": 0.9, "delta": 1e-5}, "accountant": "lemma-15.1", "adjacency": "replace-one"}
    plan = context(made(privacy={**privacy, "clipping": {"kind": "flat", "norm": 0.5}})).plans[0]
    assert plan is not None
    sigma_of_mean = plan.noise_multipliers[0] * plan.sensitivity / 60
    variance = 64 * 0.5**2 * T * math.log(2 / 1e-5) * math.log(2.5 * T / 1e-5) / (60**2 * 0.9**2)
    assert sigma_of_mean**2 == pytest.approx(variance, rel=1e-5)


def test_lemma_15_1_refuses_a_budget_that_it_is_not_proved_for() -> None:
    with pytest.raises(UnsupportedMechanism, match=r"lemma-15\.1: it is stated for epsilon below 1"):
        context(made(privacy={"budget": {"epsilon": 2.0, "delta": 1e-5}, "accountant": "lemma-15.1"}))


def test_the_theorems_rate_is_r_over_b_root_t() -> None:
    method = DpGd(context(made(method={"learning_rate": "theorem"})))
    plan = method.context.plans[0]
    assert plan is not None
    moment = (0.7 + 0.01 * 1.5) ** 2 + 5 * (plan.noise_multipliers[0] * 0.7 / 60) ** 2
    assert float(method.learning_rate) == pytest.approx(1.5 / math.sqrt(moment * T))
    plain = Gd(context(made(method={"kind": "gd", "learning_rate": "theorem"}, privacy=None)))
    lipschitz = math.sqrt(5)
    assert float(plain.learning_rate) == pytest.approx(1.5 / ((lipschitz + 0.01 * 1.5) * math.sqrt(T)))


def test_public_constants_leave_nothing_to_clip() -> None:
    """At the Lipschitz constant of the public bounds, clipped and unclipped sums agree."""
    one = made()
    trial = context(one)
    risk = DpGd(trial).risk
    assert risk is not None
    values = torch.full((1, 5), 3.0, dtype=torch.float64)
    bound = torch.tensor([math.sqrt(5)], dtype=torch.float64)
    assert torch.equal(risk.gradient_sums_at(values, bound), risk.gradient_sums_at(values, bound * math.inf))
