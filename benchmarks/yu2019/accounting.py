"""What of the paper is arithmetic: Figures 1, 2, 3 and 16, Table III, and the conventions of strong composition.

Figures are numbered as they are drawn there; the paper's captions call Figure 2 the one that its text calls 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.yu2019 import SPEC
from dpsgd_cli.accounting import accountants, renyi
from dpsgd_cli.accounting.accountants.additive import largest_order
from dpsgd_cli.accounting.accountants.composition import amplified, classical_gaussian
from dpsgd_cli.accounting.conversions import bun_steinke_epsilon, gaussian_epsilon
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.schedules.price import solve_schedule

DELTA = 1e-5
RATE, NOISE, EPOCHS = 0.01, 6.0, 400
STEPS = round(EPOCHS / RATE)
PUBLISHED_STRONG = 34.3
SOLVED = {one["kind"]: one["noise"] for one in SPEC.content["lists"]["solved"]}
TABLE_3 = {
    "time": (0.0760, 0.0441, 0.0281, 0.0190, 0.0132, 0.0093, 0.0067, 0.0048),
    "step": (0.5459, 0.7008, 0.7922, 0.8510, 0.8910, 0.9190, 0.9400, 0.9560),
    "exponential": (0.0442, 0.0282, 0.0193, 0.0138, 0.0101, 0.0075, 0.0056, 0.0041),
    "polynomial": (6.2077, 3.5277, 2.1948, 1.4317, 0.9549, 0.6382, 0.4167, 0.1626),
}


def _poisson(rate: float, noise: float) -> GaussianSum:
    return GaussianSum(noise, "add-remove", "poisson", rate)


def epsilon(accountant: str, epochs: int, rate: float = RATE, noise: float = NOISE) -> float:
    """Of so many epochs, by an accountant of the package: shuffled batches for zcdp, Poisson ones for the others."""
    if accountant == "zcdp":
        releases = [Release(GaussianSum(noise, "zero-out", "shuffle"), epochs)]
    else:
        releases = [Release(_poisson(rate, noise), round(epochs / rate))]
    return accountants.get(accountant).epsilon(releases, DELTA)


def estimate(epochs: int, rate: float, noise: float) -> float:
    """zCDP(RS) as a formula, also where it is not stated (Theorem 3; nan where no order above 1 is left)."""
    rho, order = epochs / rate * (rate / noise) ** 2, largest_order(_poisson(rate, noise))
    if order <= 1:
        return math.nan
    if math.exp(-rho * (order - 1) ** 2) <= DELTA:
        return bun_steinke_epsilon(rho, DELTA)
    return rho * order - math.log(DELTA) / (order - 1)


def is_stated(rate: float, noise: float) -> bool:
    """Whether zCDP(RS) is conjectured there: q <= 1 / (16 z), z >= 1."""
    return noise >= 1 and rate <= 1 / (16 * noise) * (1 + 1e-12)


def strong_composition() -> list[list[str]]:
    """What each reading of the paper's sentence gives for its 34.3, by what share of delta a step is granted."""
    shares = {
        "delta": DELTA,
        "delta / q k": DELTA / RATE / STEPS,
        "delta / 2 q k": DELTA / RATE / STEPS / 2,
        "delta / k": DELTA / STEPS,
        "delta / 2 k": DELTA / STEPS / 2,
    }
    slacks = {"delta": DELTA, "delta / 2": DELTA / 2, "delta / k": DELTA / STEPS}
    return [
        [
            name,
            *(f"{_strong(amplified(classical_gaussian(NOISE, share), RATE), slack):.2f}" for slack in slacks.values()),
        ]
        for name, share in shares.items()
    ]


def _strong(epsilon: float, slack: float) -> float:
    return math.sqrt(2 * STEPS * math.log(1 / slack)) * epsilon + STEPS * epsilon * math.expm1(epsilon)


def chance() -> tuple[int, int]:
    """Of all combinations of conventions that anybody uses, how many there are, and how many give 34.3."""
    lemmas: list[Callable[[float], float]] = [
        *(lambda share, top=top: math.sqrt(2 * math.log(top / share)) / NOISE for top in (1.0, 1.25, 2.0)),  # type: ignore[misc]
        lambda share: gaussian_epsilon(1 / NOISE, share),
    ]
    sampled: list[Callable[[float], float]] = [
        lambda e: amplified(e, RATE),
        lambda e: RATE * e,
        lambda e: 2 * RATE * e,
        lambda e: RATE * math.expm1(e),
    ]
    drifts: list[Callable[[float], float]] = [
        lambda e: e * math.expm1(e),
        lambda e: e * e,
        lambda e: 2 * e * e,
        lambda e: e * e / 2,
        lambda e: 0.0,
    ]
    whole = [DELTA * x for x in (1, 0.5, RATE)]
    shares = [x / y for x in whole for y in (1, STEPS, RATE * STEPS)]
    values = []
    for lemma, sample, drift, share, slack in itertools.product(lemmas, sampled, drifts, shares, shares):
        each = sample(lemma(share))
        values.append(math.sqrt(2 * STEPS * math.log(1 / slack)) * each + STEPS * drift(each))
    return len(values), sum(abs(value - PUBLISHED_STRONG) <= 0.05 for value in values)


def solved(kind: str, epochs: int) -> float:
    """The decay rate with which `epochs` epochs spend rho 0.78125."""
    recipe = load_recipe("yu2019/mnist-exponential", (f"privacy.schedule={SOLVED[kind]}", f"epochs={epochs}")).recipe
    assert recipe.privacy is not None
    answer = solve_schedule(recipe.privacy.schedule, epochs, lambda z: sum(0.5 / x**2 for x in z) - 0.78125, 1e-9)
    return float(answer.decay)  # type: ignore[union-attr]


def crossing() -> int:
    """The first epoch from which zCDP(RF) is below strong composition at its best."""
    epochs = range(1, EPOCHS + 1)
    return next(n for n in epochs if epsilon("zcdp", n) < epsilon("strong-composition", n))


def figure_1() -> Figure:
    """The divergence of a sampled Gaussian leaves its amplified branch."""
    figure, axes = framed()
    orders = [1.5, *range(2, 301)]
    axes.plot(orders, [renyi.gaussian_divergence(4, a) for a in orders], label="not sampled: alpha / 2 z^2")
    found = [renyi.poisson_gaussian_divergence(RATE, 4, a) for a in orders]
    axes.plot(orders, found, label="sampled at rate .01")
    edge = largest_order(_poisson(RATE, 4))
    axes.axvline(edge, color="grey", linewidth=0.8, linestyle=":", label=f"U = {edge:.1f}, the last order of zCDP(RS)")
    axes.set(xlabel="order alpha", ylabel="Renyi divergence, z = 4")
    axes.legend(fontsize=8)
    return figure


def figure_2() -> Figure:
    """Epsilon by epoch."""
    figure, axes = framed()
    epochs = [1, *range(10, EPOCHS + 1, 10)]
    named = {
        "strong-composition": "strong composition, optimised (Poisson)",
        "zcdp": "zCDP(RF): shuffled",
        "zcdp-rs": "zCDP(RS): an estimate (Poisson)",
        "moments": "moments accountant (Poisson)",
        "pld": "privacy loss distribution (Poisson)",
    }
    for accountant, label in named.items():
        axes.plot(epochs, [epsilon(accountant, n) for n in epochs], label=label)
    axes.plot([EPOCHS], [PUBLISHED_STRONG], "kx", label="34.3, published for strong composition")
    axes.set(xlabel="epochs, q = .01, z = 6", ylabel="epsilon at delta 1e-5", yscale="log")
    axes.legend(fontsize=7)
    return figure


def figure_3() -> Figure:
    """Epsilon by sampling rate, and by noise, after 200 epochs."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = np.linspace(0.002, 0.05, 49)
    noises = np.linspace(5, 14, 37)
    _sides(left, rates, [(rate, NOISE) for rate in rates])
    _sides(right, noises, [(RATE, noise) for noise in noises])
    left.set(xlabel="sampling rate q, z = 6", ylabel="epsilon after 200 epochs, delta 1e-5", yscale="log")
    right.set(xlabel="noise multiplier z, q = .01", yscale="log")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _sides(axes: Axes, xs: np.ndarray, points: Sequence[tuple[float, float]]) -> None:
    axes.plot(xs, [epsilon("zcdp", 200, q, z) for q, z in points], label="zCDP(RF)")
    formula = np.array([estimate(200, q, z) for q, z in points])
    inside = np.array([is_stated(q, z) for q, z in points])
    axes.plot(xs, np.where(inside, formula, np.nan), "C1-", label="zCDP(RS), where it is stated: q <= 1 / 16 z")
    beyond = ~inside | np.append(~inside[1:], False) | np.append(False, ~inside[:-1])
    axes.plot(xs, np.where(beyond, formula, np.nan), "C1:", label="its formula beyond, where nobody conjectures it")
    axes.plot(xs, [epsilon("pld", 200, q, z) for q, z in points], "C2-", label="privacy loss distribution")
    for x, out in zip(xs, ~inside, strict=True):
        if out:
            axes.axvspan(x - (xs[1] - xs[0]) / 2, x + (xs[1] - xs[0]) / 2, color="grey", alpha=0.12, linewidth=0)


def figure_16() -> Figure:
    """The conjectured bound beside the divergence."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, noise in zip(figure.subplots(1, 2), (1.0, 4.0), strict=True):
        most = largest_order(_poisson(RATE, noise))
        orders = np.linspace(1.05, most, 60)
        axes.plot(orders, [RATE**2 * a / noise**2 for a in orders], label="bound q^2 alpha / z^2")
        found = [renyi.poisson_gaussian_divergence(RATE, noise, float(a)) for a in orders]
        axes.plot(orders, found, label="divergence")
        axes.set(xlabel=f"order alpha up to U = {most:.1f}", title=f"z = {noise:g}, q = .01")
        axes.legend(fontsize=8)
    return figure


def framed() -> tuple[Figure, Axes]:
    """A figure of one grid."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    return figure, axes


FIGURES = {"figure-01": figure_1, "figure-02": figure_2, "figure-03": figure_3, "figure-16": figure_16}
