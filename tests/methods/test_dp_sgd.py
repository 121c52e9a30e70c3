"""DP-SGD: how far a record moves a release, what noise is added, what is charged, and when.

Statistical tests use fixed seeds. Each comparison accepts with probability 1 - 1e-6 over seeds, and each test rejects
a control.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.engine.streams import SecureStreams
from dpsgd_cli.errors import BudgetExceeded, PrivacyError
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.recipe.schema import Recipe
from tests.methods.small_network import RECORDS, context, recipe, records, train

LEAST = 1e-6
LAYERS = (25, 18)
CLIPPINGS: dict[str, dict[str, Any]] = {
    "flat": {"kind": "flat", "norm": 0.7},
    "joint": {"kind": "per-layer", "norm": 0.7},
    "listed": {"kind": "per-layer", "norm": [0.2, 1.1]},
    "as-published": {"kind": "per-layer", "norm": [0.2, 1.1], "noise": "as-published"},
}
NEIGHBOURS = [
    ("poisson", "add-remove"),
    ("poisson", "zero-out"),
    ("poisson", "replace-one"),
    ("fixed", "replace-one"),
    ("random-allocation", "zero-out"),
    ("shuffle", "zero-out"),
    ("shuffle", "replace-one"),
    ("full", "add-remove"),
    ("full", "zero-out"),
    ("full", "replace-one"),
]
SIZES: dict[str, dict[str, Any]] = {
    "poisson": {"batch_size": 6},
    "fixed": {"batch_size": 6},
    "random-allocation": {"batch_size": 7},
    "shuffle": {"batch_size": 7},
    "full": {"batch_size": None},
}


def made(
    batching: str, adjacency: str, clipping: str = "flat", schedule: dict[str, Any] | None = None, **changes: Any
) -> Recipe:
    privacy = {"adjacency": adjacency, "clipping": CLIPPINGS[clipping]}
    return recipe(
        method={"batching": batching, **SIZES[batching]},
        privacy=privacy if schedule is None else {**privacy, "schedule": schedule},
        **changes,
    )


def method_of(trained: Context) -> DpSgd:
    method = create(trained)
    assert isinstance(method, DpSgd)
    return method


def sums_of_an_epoch(trained: Context, values: Tensor) -> Tensor:
    """Clipped sums (steps, R, P) of epoch 0 at fixed weights, before noise."""
    method = method_of(trained)
    trained.pack.values.copy_(values)
    found = []
    for step in range(method.steps):
        trained.pack.sums.zero_()
        method.add_sums(0, step, Diagnostics(trained.trials, values.device))
        found.append(trained.pack.sums.clone())
    return torch.stack(found)


@settings(max_examples=25)
@given(
    neighbours=st.sampled_from(NEIGHBOURS),
    clipping=st.sampled_from(sorted(CLIPPINGS)),
    row=st.integers(0, RECORDS - 1),
    scale=st.sampled_from([0.01, 1.0, 1e3, 1e30]),
    seed=st.integers(0, 99),
)
def test_a_record_moves_the_release_by_no_more_than_the_ledger_says(
    neighbours: tuple[str, str], clipping: str, row: int, scale: float, seed: int
) -> None:
    """The same batches with one record replaced by another, or by one that adds nothing.

    Absent from a Poisson or full batch and adding nothing are the same. Under `shuffle` and `random-allocation` the
    ledger counts an epoch, or each of its k steps, so no more steps of it may move at all.
    """
    batching, adjacency = neighbours
    x, y = records()
    changed, labels = x.copy(), y.copy()
    if adjacency == "replace-one":
        changed[row] = scale * np.random.default_rng(seed).normal(size=4)
        labels[row] = (y[row] + 1) % 3
    else:
        changed[row] = np.nan
    recipes = [made(batching, adjacency, clipping, seed=seed), made(batching, adjacency, clipping, seed=seed + 1)]
    first = context(recipes)
    values = first.pack.values.clone()
    ours = sums_of_an_epoch(first, values)
    theirs = sums_of_an_epoch(context(recipes, data=(changed, labels)), values)
    for trial, plan in enumerate(first.plans):
        assert plan is not None
        mechanism = plan.epochs[0][0].mechanism
        assert isinstance(mechanism, GaussianSum) and mechanism.adjacency == adjacency
        moved = (ours - theirs)[:, trial].norm(dim=1)
        assert float(moved.max()) <= mechanism.sensitivity * (1 + 1e-9)
        if batching in ("shuffle", "random-allocation"):
            assert int((moved > 1e-12).sum()) <= plan.epochs[0][0].count == 1
        else:
            assert plan.epochs[0][0].count == len(moved)


@pytest.mark.parametrize("batching", ["shuffle", "full"])
def test_replacing_a_record_does_move_the_sum_by_more_than_one_norm(batching: str) -> None:
    """The doubled sensitivity is needed, and nearly reached."""
    x, y = records()
    x[0] *= 100
    changed = x.copy()
    changed[0] *= -1
    both = [context([made(batching, "replace-one")], data=(data, y)) for data in (x, changed)]
    values = both[0].pack.values.clone()
    moved = (sums_of_an_epoch(both[0], values) - sums_of_an_epoch(both[1], values)).norm(dim=2).max()
    assert 1.2 * 0.7 < float(moved) <= 2 * 0.7


@pytest.mark.parametrize(("batching", "adjacency"), [("shuffle", "add-remove"), ("fixed", "add-remove")])
def test_what_has_no_proof_is_refused(batching: str, adjacency: str) -> None:
    with pytest.raises(PrivacyError, match=batching):
        context([made(batching, adjacency)])


def noise_of(trained: Context) -> Tensor:
    """What each step of training added, (steps, R, P), found from how the weights moved.

    No record is finite, so the sums are zero, and a step moves the weights by noise times rate over divisor.
    """
    method = method_of(trained)
    found: list[Tensor] = []
    original = method.privatise

    def watched(epoch: int, step: int) -> None:
        assert not trained.pack.sums.any()
        original(epoch, step)
        found.append(trained.pack.sums.clone())

    method.privatise = watched  # type: ignore[method-assign]
    before = trained.pack.values.clone()
    for epoch in range(method.epochs):
        method.run_epoch(epoch)
    moved = before - trained.pack.values
    torch.testing.assert_close(moved, torch.stack(found).sum(dim=0) * 0.5 / method.divisor, rtol=1e-9, atol=1e-9)
    return torch.stack(found)


NOTHING = (np.full((RECORDS, 4), np.nan), np.zeros(RECORDS, dtype=np.int64))


def accepted(values: Tensor, deviation: float) -> bool:
    """Chi-square of the variance: two-sided, 1e-6."""
    total, n = float((values / deviation).square().sum()), values.numel()
    return bool(min(stats.chi2.cdf(total, n), stats.chi2.sf(total, n)) > LEAST / 2)


@pytest.mark.parametrize(
    ("clipping", "batching", "adjacency"),
    [
        *((clipping, *both) for clipping, both in zip(3 * [*CLIPPINGS], NEIGHBOURS, strict=False)),
        ("flat", "poisson", "replace-one"),
        ("listed", "poisson", "add-remove"),
    ],
)
def test_noise_is_the_multiplier_times_the_sensitivity(batching: str, adjacency: str, clipping: str) -> None:
    """On every layer, in every epoch of a falling schedule; 2/3 and 3/2 of it are rejected."""
    epochs = 48 if batching == "full" else 12
    schedule = {"kind": "step", "initial": 2.0, "decay": 0.5, "period": epochs // 2}
    one = made(batching, adjacency, clipping, schedule, epochs=epochs)
    trained = context([one], data=NOTHING)
    plan = trained.plans[0]
    assert plan is not None
    noise = noise_of(trained)[:, 0]
    doubled = 2.0 if adjacency == "replace-one" else 1.0
    bounds = {"flat": [0.7], "joint": [0.7, 0.7]}.get(clipping, [0.2, 1.1])
    whole = doubled * math.sqrt(sum(bound**2 for bound in bounds))
    half = len(noise) // 2
    for part, multiplier in ((noise[:half], 2.0), (noise[half:], 1.0)):
        for layer, values in enumerate(part.split(LAYERS, dim=1)):
            own = doubled * bounds[layer] if clipping == "as-published" else whole
            assert accepted(values, multiplier * own)
            assert not accepted(values, multiplier * own * 2 / 3)
            assert not accepted(values, multiplier * own * 3 / 2)
    first, last = (epoch[0].mechanism for epoch in (plan.epochs[0], plan.epochs[-1]))
    assert isinstance(first, GaussianSum) and isinstance(last, GaussianSum)
    fraction = 1 / math.sqrt(2) if clipping == "as-published" else 1.0
    assert (first.noise_multiplier, last.noise_multiplier) == pytest.approx((2.0 * fraction, 1.0 * fraction))
    assert first.sensitivity == last.sensitivity == pytest.approx(whole)


def test_noise_of_trials_and_steps_is_independent_and_never_repeated() -> None:
    """All pairs of 4 trials x 35 steps; trials of one pack with other norms draw their own normals."""
    recipes = [made("poisson", "add-remove", seed=seed, epochs=7) for seed in range(4)]
    noise = noise_of(context(recipes, data=NOTHING))
    size = noise.shape[-1]
    assert noise.shape[:2] == (35, 4) and len(noise.unique()) == noise.numel()
    flat = noise.reshape(-1, size) / (1.5 * 0.7)
    scores = (flat @ flat.T / math.sqrt(size)).fill_diagonal_(0.0)
    # products of two normals have heavier tails than a normal: the bound is that of a sum of 43 of them, by simulation
    sample = torch.randn(2, 400_000, size, generator=torch.Generator().manual_seed(0)).prod(dim=0).sum(dim=1)
    assert float(scores.abs().max()) < 2 * float(sample.abs().max()) / math.sqrt(size)
    again = flat.clone()
    again[3] = again[100]
    repeated = (again @ again.T / math.sqrt(size)).fill_diagonal_(0.0)
    assert float(repeated.abs().max()) > 0.6 * math.sqrt(size)


def test_secure_noise_is_normal_and_differs_from_run_to_run() -> None:
    runs = []
    for _ in range(2):
        one = made("poisson", "add-remove", seed=None)
        runs.append(noise_of(context([one], data=NOTHING, streams=[SecureStreams()])) / (1.5 * 0.7))
    assert len(torch.stack(runs).unique()) == 2 * runs[0].numel()
    # not seeded: accepts with probability 1 - 1e-6 in every run of this test
    assert stats.kstest(torch.stack(runs).flatten().numpy(), "norm").pvalue > LEAST


def test_the_ledger_is_charged_before_anything_is_computed_from_data(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = context([made("poisson", "add-remove", seed=0), made("poisson", "add-remove", seed=1, epochs=2)])
    method = method_of(trained)
    events: list[str] = []

    def watch(thing: Any, name: str, event: str) -> None:
        original = getattr(thing, name)

        def watched(*given: Any) -> Any:
            events.append(event)
            return original(*given)

        monkeypatch.setattr(thing, name, watched)

    watch(method, "add_sums", "data")
    for trial, ledger in enumerate(trained.ledgers):
        watch(ledger, "spend", f"trial {trial}")
    for epoch in range(4):
        events.clear()
        method.run_epoch(epoch)
        charges = ["trial 0", "trial 1"] if epoch < 2 else ["trial 0"]
        assert events == [*charges, *["data"] * 5]
    for ledger, epochs in zip(trained.ledgers, (4, 2), strict=True):
        assert [(entry.epoch, entry.release.count) for entry in ledger.entries] == [(e, 5) for e in range(epochs)]


def test_a_release_that_does_not_fit_is_not_made() -> None:
    """A ledger that only covers one epoch stops the second before any weight moves."""
    trained = context([made("full", "add-remove")])
    plan = trained.plans[0]
    assert plan is not None
    short = replace(plan, epochs=plan.epochs[:1], budget=None)
    trained = replace(trained, ledgers=(short.ledger(),))
    method = method_of(trained)
    method.run_epoch(0)
    before = trained.pack.values.clone()
    with pytest.raises(BudgetExceeded):
        method.run_epoch(1)
    assert torch.equal(trained.pack.values, before)
    assert len(trained.ledgers[0].entries) == 1


def test_an_empty_batch_is_an_ordinary_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one expected record of 30: those that are empty still add noise, and are divided by one."""
    one = recipe(method={"batching": "poisson", "batch_size": 1}, privacy={"adjacency": "add-remove"}, epochs=1)
    trained = context([one])
    method = method_of(trained)
    empty = [step for step in range(30) if method.batches.sampler.batch(step).rows.shape[1] == 0]  # type: ignore[union-attr]
    assert 3 < len(empty) < 20
    moves: list[Tensor] = []
    original = method.update.apply

    def watched(values: Tensor, gradient: Tensor, *rest: Any) -> None:
        moves.append(gradient.clone())
        original(values, gradient, *rest)

    monkeypatch.setattr(method.update, "apply", watched)
    method.run_epoch(0)
    for step in empty:
        torch.testing.assert_close(moves[step], method.noise.draw(step) * 1.5)
    assert trained.ledgers[0].entries[0].release.count == 30


def test_a_diverged_or_damaged_data_set_still_gives_finite_weights() -> None:
    x, y = records()
    x[::3] = np.inf
    x[1::3] *= 1e200
    method = train(context([made("shuffle", "zero-out")], data=(x, y)))
    assert bool(method.output.isfinite().all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"batching": "shuffle", "batch_size": 10}}, r"priced .*\('shuffle', 30, 10\) but not"),
        ({"method": {"batching": "poisson", "batch_size": 7}}, r"priced .*\('poisson', 30, 7\) but not"),
        ({"privacy": {"clipping": {"kind": "flat", "norm": 0.5}}}, "priced sensitivity 0.5 under zero-out.*give 0.7"),
        ({"privacy": {"adjacency": "replace-one"}}, None),
    ],
)
def test_only_what_was_priced_runs(changes: dict[str, Any], message: str | None) -> None:
    """A plan of another batch size, sampler, norm or number of records is refused; sensitivity follows the plan."""
    privacy = {"clipping": CLIPPINGS["flat"], **changes.get("privacy", {})}
    other = context([recipe(**{**changes, "privacy": privacy})])
    trained = replace(context([made("shuffle", "zero-out")]), plans=other.plans)
    if message is None:
        noise = method_of(trained)
        assert float(noise._noise_scale(0)[0, 0]) == pytest.approx(1.5 * 2 * 0.7)
        return
    with pytest.raises(PrivacyError, match=message):
        create(trained)
    fewer = context([made("shuffle", "zero-out")], data=tuple(part[:20] for part in records()))  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match=r"priced .*\('shuffle', 20, 7\) but not \('shuffle', 30, 7\)"):
        create(replace(trained, plans=fewer.plans))


def test_kinds_of_clipping_do_not_share_a_pack() -> None:
    with pytest.raises(PrivacyError, match="share one kind of clipping"):
        create(context([made("full", "add-remove", "flat"), made("full", "add-remove", "joint")]))


def test_per_layer_noise_of_both_kinds_shares_a_pack() -> None:
    method = method_of(context([made("full", "add-remove", "as-published"), made("full", "add-remove", "listed")]))
    scale = method._noise_scale(0)
    assert scale[0].tolist() == pytest.approx([1.5 * 0.2] * LAYERS[0] + [1.5 * 1.1] * LAYERS[1])
    assert scale[1].tolist() == pytest.approx([1.5 * math.hypot(0.2, 1.1)] * sum(LAYERS))


def test_dp_sgd_needs_a_plan_and_a_privacy_section() -> None:
    trained = context([made("full", "add-remove")])
    with pytest.raises(PrivacyError, match="without a plan"):
        create(replace(trained, plans=(None,)))
    bare = trained.recipes[0].model_copy(update={"privacy": None})
    with pytest.raises(PrivacyError, match="no privacy section"):
        create(replace(trained, recipes=(bare,)))
