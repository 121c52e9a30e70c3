"""Clip bounds that follow from releases: what is released, how far one record moves it, and the bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.clipping.run import Diagnostics, add_clipped_sums
from dpsgd_cli.clipping.settings import QuantileClipping
from dpsgd_cli.engine.context import AuditHook
from dpsgd_cli.engine.streams import SecureStreams
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.dp_gd.run import DpGd
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.recipe.schema import Recipe
from tests.methods import small_problem
from tests.methods.small_network import RECORDS, Data, context, recipe, records, train
from tests.methods.small_problem import Silent
from tests.methods.test_dp_sgd import NEIGHBOURS, SIZES, method_of

QUANTILE: dict[str, Any] = {"kind": "quantile", "quantile": 0.3, "learning_rate": 0.4, "count_noise": 2, "initial": 0.5}


def made(batching: str = "poisson", adjacency: str | None = None, seed: int | None = 0, **clipping: Any) -> Recipe:
    privacy = {"adjacency": adjacency, "clipping": QUANTILE | clipping}
    found = recipe(method={"batching": batching, **SIZES[batching]}, privacy=privacy)
    return found.model_copy(update={"seed": seed})


@pytest.mark.parametrize(
    ("z", "count_noise", "applied"),
    [(1.0, 1.0, 1.1547005383792515), (0.8, 0.5, 4 / 3), (2.0, 1.25, 10 / 3), (1.0, 10.0, 1.0012523486435176)],
)
def test_noise_of_sum_and_count_together_is_what_is_charged(z: float, count_noise: float, applied: float) -> None:
    """1/z^2 = 1/z_d^2 + 1/(2 s_b)^2 (Andrew et al. 2019, Theorem 1): 1 = 3/4 + 1/4, 25/16 = 9/16 + 1, ..."""
    kind = QuantileClipping(count_noise=count_noise)
    assert kind.applied(z) == pytest.approx(applied, rel=1e-12)
    assert kind.charged(z, None) == z


@pytest.mark.parametrize("count_noise", [0.2, 0.75])
def test_a_count_that_would_spend_everything_is_refused(count_noise: float) -> None:
    with pytest.raises(PrivacyError, match=r"more than half the noise multiplier 1.5.*give at least 3"):
        context([made(count_noise=count_noise)])


@pytest.mark.parametrize(("batching", "adjacency"), NEIGHBOURS)
def test_a_step_is_charged_as_one_gaussian_in_units_of_the_bound(batching: str, adjacency: Any) -> None:
    plan = context([made(batching, adjacency)]).plans[0]
    assert plan is not None
    moves = 2.0 if adjacency == "replace-one" else 1.0
    rate = 1.0 if batching in ("shuffle", "full") else 0.2
    (charged,) = {release.mechanism for release in plan.releases}
    assert isinstance(charged, GaussianSum)
    assert (charged.noise_multiplier, charged.adjacency, charged.batching) == (1.5, adjacency, batching)
    assert (charged.sampling_rate, charged.sensitivity) == (pytest.approx(rate), moves)


def one_step(data: Data, clip: float, adjacency: Any, mask: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
    """Clipped sum and count of one step over all records, at weights that do not depend on these."""
    trained = context([made("full", adjacency)], data)
    method = method_of(trained)
    trained.pack.values.copy_(torch.linspace(-1, 1, trained.pack.size).double())
    method.bounds.kept["clip"].fill_(clip)
    method.begin()
    method.add_sums(0, 0, Diagnostics(1, trained.pack.values.device))
    assert method.side_statistics is not None
    return trained.pack.sums[0].clone(), method.side_statistics[0].clone()


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_a_record_moves_sum_and_count_together_by_at_most_what_is_charged(adjacency: str) -> None:
    """In units of noise: |dG| / (z_d C moves) and |dB| / (s_b moves) are sides of a triangle, its third at most 1/z."""
    x, y = records()
    clip, moves = 0.4, 2.0 if adjacency == "replace-one" else 1.0
    z, applied, count_noise = 1.5, (1 / 1.5**2 - 1 / 16) ** -0.5, 2.0
    ways = []
    for row in (x[5], -x[5], 30 * x[5], np.zeros(4), np.full(4, np.nan), np.full(4, 1e200)):
        for label in (0, 2):
            other = np.concatenate([x, row[None]]), np.append(y, label)
            if adjacency == "replace-one":
                other = np.concatenate([x[:-1], row[None]]), np.append(y[:-1], label)
            base, moved = (one_step(data, clip, adjacency) for data in ((x, y), other))
            sums = float(torch.linalg.vector_norm(moved[0] - base[0])) / (applied * clip * moves)
            count = abs(float(moved[1] - base[1])) / (count_noise * moves)
            assert abs(float(moved[1] - base[1])) <= 0.5 * moves
            ways.append(math.hypot(sums, count))
    assert max(ways) <= (1 + 1e-9) / z
    assert max(ways) >= (0.999 if adjacency == "add-remove" else 0.5) / z


def norms_at(values: Tensor, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Norms of the gradients of the small network's cross-entropy, one record at a time."""
    w1, b1, w2, b2 = (part.clone() for part in torch.split(values, [20, 5, 15, 3]))
    found = []
    for row, label in zip(torch.from_numpy(x), y, strict=True):
        own = [part.clone().requires_grad_() for part in (w1, b1, w2, b2)]
        hidden = torch.tanh(own[0].view(5, 4) @ row + own[1])
        outputs = own[2].view(3, 5) @ hidden + own[3]
        loss = torch.logsumexp(outputs, 0) - outputs[label]
        found.append(math.sqrt(sum(float(g.square().sum()) for g in torch.autograd.grad(loss, own))))
    return np.array(found)


@pytest.mark.parametrize("batching", ["full", "poisson"])
def test_without_noise_bounds_are_those_of_the_paper(batching: str) -> None:
    """C <- C exp(-eta (sum b_i / m + 1/2 - gamma)), b_i = 1/2 within the bound and -1/2 beyond, m public."""
    trained = context([made(batching)] * 2, streams=[Silent(0), Silent(1)])
    method, (x, y) = method_of(trained), records()
    clips, size = [0.5, 0.5], 30 if batching == "full" else 6
    for step in range(method.steps):
        batch = method.batches.sampler.batch(step)
        for trial in range(2):
            held = np.arange(RECORDS) if batch.rows is None else np.asarray(batch.rows)[trial]
            if batch.mask is not None:
                held = held[np.asarray(batch.mask)[trial]]
            within = norms_at(trained.pack.values[trial], x[held], y[held]) <= clips[trial]
            clips[trial] *= math.exp(-0.4 * ((within.sum() - (~within).sum()) / 2 / size + 0.5 - 0.3))
        method.step(0, step, Diagnostics(2, trained.pack.values.device))
        assert method.published() == {"clip_norm": pytest.approx(clips, rel=1e-12)}
    assert abs(clips[0] - 0.5) > 0.01


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_noise_is_what_was_charged_and_the_count_has_noise_of_its_own(adjacency: str) -> None:
    """Chi-square at 1e-6, with 2/3 and 3/2 of each scale rejected; no normal is used twice."""
    trained = context([made("full", adjacency)])
    method, moves, steps = method_of(trained), 2.0 if adjacency == "replace-one" else 1.0, 2000
    method.begin()
    beside = method.side_statistics
    assert beside is not None
    seen, drawn = np.empty((steps, 4)), []
    for step in range(steps):
        trained.pack.sums.zero_()
        beside.zero_()
        method.privatise(0, step)
        drawn += trained.pack.sums[0].tolist() if step < 64 else []
        seen[step] = *trained.pack.sums[0, :3].tolist(), float(beside)
    scales = np.array([*[0.5 * moves * (1 / 1.5**2 - 1 / 16) ** -0.5] * 3, 2.0 * moves])
    for factor in (1, 2 / 3, 3 / 2):
        squares = np.square(seen / (factor * scales)).sum(axis=0)
        accepted = (stats.chi2.cdf(squares, steps) > 1e-6) & (stats.chi2.sf(squares, steps) > 1e-6)
        assert accepted.all() if factor == 1 else not accepted.any()
    assert len({f"{normal:.9f}" for normal in (*np.array(drawn) / scales[0], *seen[:64, 3] / scales[3])}) > 64 * 43
    apart = np.abs(np.corrcoef(seen.T) - np.eye(4)).max()
    assert apart < 5 / math.sqrt(steps)


def test_trials_have_bounds_of_their_own_in_a_pack_as_alone_and_in_pieces() -> None:
    recipes = [made(seed=0), made(seed=1, initial=2.0, quantile=0.8), made(seed=2, learning_rate=1.0, count_noise=9)]
    together = train(context(recipes))
    for trial, one in enumerate(recipes):
        for most in (1000, 2):
            alone = train(context([one], most_rows=most))
            torch.testing.assert_close(alone.output[0], together.output[trial], rtol=1e-9, atol=1e-12)
            assert alone.published()["clip_norm"] == [pytest.approx(together.published()["clip_norm"][trial], rel=1e-9)]


def test_a_resumed_trial_goes_on_with_its_bound_and_one_that_is_over_keeps_it() -> None:
    whole = train(context([made(seed=3)]))
    first, second = (method_of(context([made(seed=3)])) for _ in range(2))
    for epoch in range(2):
        first.run_epoch(epoch)
    second.load_state(first.state())
    for epoch in range(2, 4):
        second.run_epoch(epoch)
    assert torch.equal(second.output, whole.output) and second.published() == whole.published()
    short = made(seed=3).model_copy(update={"epochs": 2})
    both = train(context([short, made(seed=4)]))
    assert both.published()["clip_norm"][0] == pytest.approx(first.published()["clip_norm"][0], rel=1e-9)


def test_it_trains_on_noise_of_the_operating_system() -> None:
    trained = context([made(seed=None)], streams=[SecureStreams()])
    assert isinstance(train(trained), DpSgd)
    assert torch.isfinite(trained.pack.values).all()


@pytest.mark.parametrize("clipping", [{"kind": "flat", "norm": 1}, {"kind": "automatic"}])
def test_other_kinds_do_not_train_with_it(clipping: dict[str, Any]) -> None:
    other = recipe(method={"batching": "poisson", "batch_size": 6}, privacy={"clipping": clipping})
    with pytest.raises(PrivacyError, match="share one kind of clipping"):
        method_of(context([made(), other]))


@pytest.mark.parametrize("kind", ["automatic", "normalised"])
@pytest.mark.parametrize("layers", ["together", "apart"])
def test_gradients_of_one_length_are_charged_that_length(kind: str, layers: str) -> None:
    """Both layers at their own bounds: 0.7 together, whether a layer's is 0.7 / sqrt(2) or not asked for."""
    own = {"stability": 1e-6} if kind == "automatic" else {}
    one = recipe(privacy={"clipping": {"kind": kind, "norm": 0.7, "layers": layers, **own}})
    trained = context([one])
    method, plan = method_of(trained), trained.plans[0]
    assert plan is not None and plan.sensitivity == pytest.approx(0.7) and method.sensitivities == pytest.approx([0.7])
    x, y = method.context.table.x[:1], method.context.table.y[:1]
    add_clipped_sums(trained.pack, (x[None], y[None], None), trained.loss, method.clipping, Diagnostics(1, x.device))
    norm = float(torch.linalg.vector_norm(trained.pack.sums))
    assert norm <= 0.7 * (1 + 1e-9) and norm == pytest.approx(0.7, rel=1e-4)


def convex_gradients(w: np.ndarray, z: np.ndarray) -> np.ndarray:
    return np.asarray(-z / (1 + np.exp(z @ w))[:, None])


def test_convex_models_clip_as_their_kind_says() -> None:
    """DP-GD on the logistic loss without noise, against NumPy: five steps, and the bound that follows."""
    for clipping in ({"kind": "automatic", "norm": 0.7}, {"kind": "normalised", "norm": 0.7}, QUANTILE):
        privacy = {"schedule": {"kind": "uniform", "initial": 1}, "delta": 1e-5, "clipping": clipping}
        one = small_problem.recipe({"kind": "dp-gd", "learning_rate": 2}, model={"kind": "convex"}, privacy=privacy)
        one = one.model_copy(update={"epochs": 5})
        method = DpGd(small_problem.context(one, [Silent(0)]))
        z, w, clip = small_problem.signed(one), np.zeros(5), 0.5
        for epoch in range(5):
            each = convex_gradients(w, z)
            norms = np.linalg.norm(each, axis=1)
            factors = {"automatic": 0.7 / (norms + 0.01), "normalised": 0.7 / norms}
            chosen = factors.get(str(clipping["kind"]), np.minimum(1, clip / norms))
            w = w - 2 * (each * chosen[:, None]).sum(axis=0) / len(z)
            clip *= math.exp(-0.4 * ((norms <= clip).mean() - 0.3))
            method.run_epoch(epoch)
            np.testing.assert_allclose(method.output[0].numpy(), w, rtol=1e-9, atol=1e-12)
        if clipping["kind"] == "quantile":
            assert method.published()["clip_norm"] == [pytest.approx(clip)] and abs(clip - 0.5) > 0.03


@pytest.mark.parametrize("noise", [{"kind": "tree"}, {"kind": "toeplitz"}])
def test_noise_across_steps_is_refused_where_the_bound_moves(noise: dict[str, Any]) -> None:
    moving = recipe(privacy={"clipping": QUANTILE, "noise": noise})
    with pytest.raises(PrivacyError, match=r"no guarantee for privacy.noise .* with privacy.clipping quantile"):
        context([moving])


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "python", "file": "own.py", "batch_size": 6},
        {"kind": "dp-sgd", "batching": "fixed", "batch_size": 1},
        {"kind": "dp-sgd", "batching": "full", "batch_size": None, "learning_rate": "theorem"},
    ],
)
def test_methods_that_know_no_such_bounds_refuse_them(method: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"privacy.clipping.*quantile|theorem is"):
        recipe(method=method, privacy={"clipping": QUANTILE})


HISTOGRAM: dict[str, Any] = {"kind": "histogram", "quantile": 0.4, "share": 0.02, "bins": 40, "range": [0.05, 20]}


def counted(batching: str = "shuffle", adjacency: Any = None, **clipping: Any) -> Recipe:
    privacy = {"adjacency": adjacency, "clipping": HISTOGRAM | clipping, "budget": {"rho": 0.5}, "delta": 1e-5}
    return recipe(method={"batching": batching, **SIZES[batching]}, privacy=privacy, epochs=1)


@dataclass
class Seen(AuditHook):
    """A watcher of what is released before the first step."""

    made: list[tuple[Any, Tensor, Tensor]] = field(default_factory=list)

    def prepared(self, mechanism: Any, exact: Tensor, noisy: Tensor) -> None:
        self.made.append((mechanism, exact.clone(), noisy.clone()))


def counts_of(one: Recipe, data: Data | None = None) -> tuple[Any, Tensor, Tensor, DpSgd]:
    seen = Seen()
    method = method_of(replace(context([one], data), watcher=seen))
    method.run_epoch(0)
    ((mechanism, exact, noisy),) = seen.made
    return mechanism, exact[0], noisy[0], method


@pytest.mark.parametrize("quantile", [0.05, 0.4, 0.9])
def test_without_noise_the_bound_is_in_the_bin_of_the_quantile(quantile: float) -> None:
    trained = context([counted(quantile=quantile)], streams=[Silent(0)])
    norms = norms_at(trained.pack.values[0], *records())
    method = method_of(trained)
    method.run_epoch(0)
    (found,) = method.published()["clip_norm"]
    edges = np.geomspace(0.05, 20, 41)
    wanted = np.quantile(norms, quantile, method="inverted_cdf")
    assert np.searchsorted(edges, found * (1 - 1e-9)) == np.searchsorted(edges, wanted)
    assert method.clipping is not None and method.clipping.norms.tolist() == [[pytest.approx(found)]]


def test_a_histogram_is_charged_its_share_before_training_and_steps_in_units_of_its_bound() -> None:
    """rho .5 is mu^2 = 1, of which .02 is z = .02^(-1/2)."""
    for adjacency, root in (("zero-out", 1.0), ("replace-one", math.sqrt(2))):
        plan = context([counted(adjacency=adjacency)]).plans[0]
        assert plan is not None
        (first,) = plan.preprocessing_releases
        assert isinstance(first.mechanism, GaussianSum)
        assert first.mechanism.noise_multiplier == pytest.approx(7.0710678118654755)
        expected = GaussianSum(1, adjacency, sensitivity=root, label="norm-histogram")  # type: ignore[arg-type]
        assert replace(first.mechanism, noise_multiplier=1) == expected
        assert plan.sensitivity == pytest.approx(root**2)
        gaussians = [(r.mechanism, r.count) for r in plan.releases if isinstance(r.mechanism, GaussianSum)]
        spent = sum(count / one.noise_multiplier**2 / 2 for one, count in gaussians)
        assert 0.01 < spent <= 0.5


@pytest.mark.parametrize(("adjacency", "most"), [("zero-out", 1.0), ("replace-one", math.sqrt(2))])
def test_a_record_moves_the_histogram_by_at_most_what_is_charged(adjacency: str, most: float) -> None:
    """One count by one (beside a null record, which is in none), or two counts; the edges' sides are in outer bins."""
    x, y = records()
    one, moved = counted(adjacency=adjacency), []
    for row in (x[3], -x[3], 1e3 * x[3], np.full(4, np.nan), np.full(4, np.inf), np.zeros(4)):
        other = np.concatenate([x[:3], row[None], x[4:]])
        _, exact, _, _ = counts_of(one, (other, y))
        assert float(exact.sum()) == RECORDS and bool((exact >= 0).all())
        moved.append(exact)
    apart = max(float(torch.linalg.vector_norm(a - b)) for a in moved for b in moved)
    assert apart == pytest.approx(math.sqrt(2)) and (adjacency == "zero-out" or apart <= most + 1e-12)
    table = context([one]).table
    without = replace(table, held_out=(torch.arange(RECORDS) == 3)[:, None], own=table.y.new_tensor([[0]]))
    seen = Seen()
    trained = replace(context([one]), table=replace(without, own=torch.arange(RECORDS)[None]), watcher=seen)
    method_of(trained).run_epoch(0)
    assert float(seen.made[0][1].sum()) == RECORDS - 1


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_noise_on_the_histogram_is_what_was_charged(adjacency: str) -> None:
    """Chi-square at 1e-6 of 2,000 counts; 2/3 and 3/2 of the scale are rejected."""
    mechanism, exact, noisy, method = counts_of(counted(adjacency=adjacency, bins=2000))
    scale = 0.02**-0.5 * (math.sqrt(2) if adjacency == "replace-one" else 1.0)
    for factor in (1, 2 / 3, 3 / 2):
        squares = float(((noisy - exact) / (factor * scale)).square().sum())
        accepted = stats.chi2.cdf(squares, 2000) > 1e-6 and stats.chi2.sf(squares, 2000) > 1e-6
        assert accepted == (factor == 1)
    assert mechanism.label == "norm-histogram"
    # and that of the steps is the schedule's multiplier times the bound, doubled where records are replaced
    plan, (clip,) = method.plans[0], method.published()["clip_norm"]
    pack, steps = method.context.pack, 300
    seen = []
    for step in range(steps):
        pack.sums.zero_()
        method.privatise(0, step)
        seen += pack.sums[0].tolist()
    moves = 2.0 if adjacency == "replace-one" else 1.0
    assert np.std(seen) == pytest.approx(plan.noise_multipliers[0] * clip * moves, rel=0.05)


def test_a_resumed_trial_takes_its_bound_and_releases_nothing_anew() -> None:
    one = counted().model_copy(update={"epochs": 2})
    seen = Seen()
    first, second = (method_of(replace(context([one]), watcher=seen)) for _ in range(2))
    first.run_epoch(0)
    second.load_state(first.state())
    second.run_epoch(1)
    assert len(seen.made) == 1 and second.published() == first.published()
    assert second.clipping is not None and first.clipping is not None
    assert torch.equal(second.clipping.norms, first.clipping.norms)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"budget": None, "schedule": {"kind": "uniform", "initial": 2}}, "is one of privacy.budget, which is missing"),
        ({"budget_covers": "training"}, "is one of the whole budget"),
        ({"clipping": HISTOGRAM | {"range": [3, 0.1]}}, "give the smaller bound first"),
    ],
)
def test_histograms_that_no_budget_pays_for_are_refused(changes: dict[str, Any], told: str) -> None:
    base = {"clipping": HISTOGRAM, "budget": {"rho": 0.5}, "delta": 1e-5}
    with pytest.raises(ValueError, match=told):
        recipe(privacy=base | changes)
