"""Kronecker factors: clipped sums against autograd in the preconditioned space, and where the factors come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.data import synthetic
from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import MlpModel
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import DataError, ModelError
from dpsgd_cli.methods.descriptor import plan_for
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.preconditioning.kronecker import RANK, SEED, KroneckerFactors
from dpsgd_cli.preconditioning.settings import Kfac
from dpsgd_cli.recipe.schema import Recipe
from tests.methods.small_problem import points, recipe, run

DOUBLE = Placement(torch.device("cpu"), torch.float64)
DAMPING = 0.3
KFAC = {"kind": "kfac", "probes": "uniform", "every": 2, "damping": DAMPING, "factors": "both"}
BOTH = Kfac.model_validate(KFAC)
INPUTS = BOTH.changed(factors="inputs")


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)
    )


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 3))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Conv1d(4, 3, 3), nn.Flatten())


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "images": (images, torch.from_numpy(synthetic.probes("uniform", 40, (2, 7, 7), 0)).double()),
    "tokens": (tokens, torch.from_numpy(synthetic.probes("uniform", 40, (3,), 0, 7))),
    "grouped": (grouped, torch.from_numpy(synthetic.probes("uniform", 40, (2, 4), 0)).double()),
}


def factored(name: str, settings: Kfac = BOTH) -> tuple[Pack, KroneckerFactors]:
    build, probes = CASES[name]
    pack = Pack(build, (0, 1), DOUBLE, trusted=True)
    made = KroneckerFactors(pack, probes, cross_entropy, settings)
    made.renew(0)
    return pack, made


def matrix(cut: Tensor | None, trial: int, size: int) -> Tensor:
    """I - C C^T of a trial."""
    if cut is None:
        return torch.eye(size).double()
    own = cut[min(trial, len(cut) - 1)]
    return torch.eye(len(own), dtype=own.dtype) - own @ own.T


def moved(pack: Pack, trial: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """One example's gradients in the preconditioned space, from the definition."""
    found = dict(gradients)
    for place, layer in zip(pack.member_names, pack.members, strict=True):
        if layer.cuts is None:
            continue
        for own in layer.names:
            name, g = f"{place}.{own}", gradients[f"{place}.{own}"]
            table = layer.cuts.inputs is None and own == "weight" and place == "0"
            outputs = matrix(layer.cuts.outputs, trial, g.shape[-1 if table else 0]) * layer.cuts.scale[trial]
            if table:
                found[name] = g @ outputs
            elif own == "bias":
                found[name] = outputs @ g
            else:
                inputs = matrix(layer.cuts.inputs, trial, g.shape[1])
                found[name] = torch.einsum("po,oi...,ij->pj...", outputs, g, inputs)
    return found


def of_one(pack: Pack, name: str, trial: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Autograd's gradient of one example's loss in a trial, by the names of the module."""
    module = CASES[name][0]().double()
    for parameter, (offset, shape) in pack.spans.items():
        own = pack.values[trial, offset : offset + shape.numel()].view(shape)
        module.get_parameter(parameter).data.copy_(own)
    loss = nn.functional.cross_entropy(module(x[None]), y[None])
    named = dict(module.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize(
    ("name", "settings"), [("images", BOTH), ("images", INPUTS), ("tokens", BOTH), ("grouped", BOTH)]
)
def test_clipped_sums_are_those_of_single_gradients_in_the_preconditioned_space(name: str, settings: Kfac) -> None:
    """Norm and sum of s G g A, by autograd one example at a time; and no example adds more than its bound."""
    pack, made = factored(name, settings)
    x, y = made.probes[0, 30:36], torch.arange(6) % 3
    bounds = torch.tensor([[50.0, 0.2]], dtype=torch.float64)
    expected = {parameter: torch.zeros(2, *shape).double() for parameter, (_, shape) in pack.spans.items()}
    shortened = 0
    for trial in range(2):
        for row in range(6):
            parts = moved(pack, trial, of_one(pack, name, trial, x[row], y[row]))
            norm = torch.stack([part.square().sum() for part in parts.values()]).sum().sqrt()
            shortened += int(norm > bounds[0, trial])
            for parameter, part in parts.items():
                expected[parameter][trial] += part * (bounds[0, trial] / norm).clamp(max=1)
    add_clipped_sums(pack, (x[None], y[None], None), cross_entropy, Clipping(bounds), Diagnostics(2, x.device))
    for parameter, (offset, shape) in pack.spans.items():
        ours = pack.sums[:, offset : offset + shape.numel()].view(2, *shape)
        torch.testing.assert_close(ours, expected[parameter], rtol=1e-9, atol=1e-12)
    assert shortened == 6
    pack.sums.zero_()
    for row in range(6):
        one = (x[None, row : row + 1], y[None, row : row + 1], None)
        add_clipped_sums(pack, one, cross_entropy, Clipping(bounds), Diagnostics(2, x.device))
        assert bool((torch.linalg.vector_norm(pack.sums, dim=1) <= bounds[0] * (1 + 1e-9)).all())
        pack.sums.zero_()


def test_layers_without_a_rule_keep_their_gradients() -> None:
    found = [[layer.cuts is not None for layer in factored(name)[0].members] for name in CASES]
    assert found == [[True, True, True], [True, True, False, True], [False, True]]
    assert [layer.cuts is not None for layer in factored("tokens", INPUTS)[0].members] == [False, True, False, True]
    shared = nn.Linear(3, 3)
    pack = Pack(lambda: nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 3)), [0], DOUBLE, trusted=True)
    made = KroneckerFactors(pack, torch.rand(9, 3).double(), cross_entropy, BOTH)
    assert len(made.layers) == 2  # one module that is called twice is one layer
    with pytest.raises(ModelError, match="this model has none"):
        KroneckerFactors(Pack(lambda: nn.LayerNorm(3), [0], DOUBLE, True), torch.rand(9, 3), cross_entropy, BOTH)


def test_factors_are_roots_of_second_moments_on_the_probes() -> None:
    """A of the first dense layer's inputs, by NumPy; and the probes' gradients keep their mean square length."""
    rows = torch.randn(50, 5, generator=torch.Generator().manual_seed(1)).double() * torch.tensor([4, 2, 1, 1, 0.1])
    pack = Pack(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), [0], DOUBLE, trusted=True)
    made = KroneckerFactors(pack, rows, cross_entropy, BOTH)
    made.renew(3)
    moments = rows.numpy().T @ rows.numpy()
    values, axes = np.linalg.eigh(moments / np.trace(moments) * 5)
    root = (axes * ((values[0] + DAMPING) / (values + DAMPING)) ** 0.5) @ axes.T
    layer = pack.members[0]
    assert layer.cuts is not None
    np.testing.assert_allclose(matrix(layer.cuts.inputs, 0, 0).numpy(), root, atol=1e-9)
    with_factors = mean_squares(pack, rows, made._labels(3))
    pack.preconditioned = []
    torch.testing.assert_close(with_factors, mean_squares(pack, rows, made._labels(3)), rtol=1e-9, atol=0)


def mean_squares(pack: Pack, rows: Tensor, labels: Tensor) -> Tensor:
    """The mean squared length of the rows' gradients, of each layer."""
    found: list[Tensor] = []
    bounds = Clipping(torch.ones(1, 1).double(), on_norms=lambda squares, _: found.append(squares.mean(dim=2)))
    add_clipped_sums(pack, (rows[None], labels, None), cross_entropy, bounds, Diagnostics(1, rows.device))
    return found[0]


def test_directions_beyond_the_largest_count_by_their_mean() -> None:
    """Of 80 inputs the 64 largest eigenvalues count by themselves; few probes give the same as their products."""
    size = RANK + 16
    few = torch.randn(30, size, generator=torch.Generator().manual_seed(2)).double() * torch.linspace(1, 3, size)
    for rows in (few, torch.cat([few, few, few])):
        pack = Pack(lambda: nn.Linear(size, 3), [0], DOUBLE, trusted=True)
        KroneckerFactors(pack, rows, cross_entropy, BOTH).renew(0)
        layer = pack.members[0]
        assert layer.cuts is not None and layer.cuts.inputs is not None
        values, axes = np.linalg.eigh((few.T @ few).numpy() / float(few.square().sum()) * size)
        values[:16] = values[:16].mean()
        root = (axes * ((values[0] + DAMPING) / (values + DAMPING)) ** 0.5) @ axes.T
        np.testing.assert_allclose(matrix(layer.cuts.inputs, 0, 0).numpy(), root, atol=1e-6)
    layer.cuts = None


def test_a_pass_that_is_not_finite_leaves_gradients_as_they_are() -> None:
    pack = Pack(lambda: nn.Linear(3, 3), [0], DOUBLE, trusted=True)
    rows = torch.rand(9, 3).double()
    rows[0, 0] = torch.inf
    KroneckerFactors(pack, rows, cross_entropy, BOTH).renew(0)
    layer = pack.members[0]
    assert layer.cuts is not None and layer.cuts.inputs is not None
    assert layer.cuts.outputs is not None
    assert not layer.cuts.inputs.any() and not layer.cuts.outputs.any() and bool((layer.cuts.scale == 1).all())


def test_factors_do_not_depend_on_the_scale_of_inputs() -> None:
    """Not even of inputs whose squares overflow."""
    rows = torch.rand(9, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for scale in (1.0, 1e30):
        pack = Pack(lambda: nn.Linear(3, 3), [0], Placement(torch.device("cpu"), torch.float32), trusted=True)
        KroneckerFactors(pack, rows * scale, cross_entropy, INPUTS).renew(0)
        cuts = pack.members[0].cuts
        assert cuts is not None
        found.append(matrix(cuts.inputs, 0, 3))
    torch.testing.assert_close(*found)


def made_recipe(**changes: Any) -> Recipe:
    method = {"kind": "dp-sgd", "batch_size": 20, "learning_rate": 1, "preconditioner": KFAC} | changes.pop(
        "method", {}
    )
    privacy = {"schedule": {"kind": "uniform", "initial": 2}, "delta": 1e-5}
    base = {"model": {"kind": "mlp", "hidden": [5]}, "epochs": 2, "privacy": privacy}
    return recipe(method, **{**base, **changes})


def context(made: Recipe, seeds: tuple[int, ...] = (0,), data: tuple[np.ndarray, np.ndarray] | None = None) -> Context:
    x, y = data or points()
    table = Table.load(x, y, False, DOUBLE.device, DOUBLE.dtype)
    assert isinstance(made.model, MlpModel)
    hidden = made.model.hidden[0]
    pack = Pack(
        lambda: nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2)), seeds, DOUBLE, trusted=True
    )
    plan = plan_for(made, Facts(len(table)))
    ledgers, streams = tuple(plan.ledger() for _ in seeds), tuple(map(SeededStreams, seeds))
    return Context((made,) * len(seeds), (plan,) * len(seeds), ledgers, streams, pack, table, cross_entropy, 7, None)  # type: ignore[arg-type]


def trained(made: Recipe, seeds: tuple[int, ...] = (0,), **more: Any) -> DpSgd:
    method = DpSgd(context(made, seeds, **more))
    run(method)
    return method


def test_factors_change_training_and_no_price() -> None:
    with_factors, without = made_recipe(), made_recipe(method={"preconditioner": None})
    assert plan_for(with_factors, Facts(60)) == plan_for(without, Facts(60))
    ours, plain = trained(with_factors), trained(without)
    assert ours.context.ledgers[0].entries == plain.context.ledgers[0].entries
    assert not torch.equal(ours.output, plain.output)


def test_each_trial_of_a_pack_has_factors_of_its_own() -> None:
    together = trained(made_recipe(), (0, 1))
    for seed in (0, 1):
        torch.testing.assert_close(together.output[seed], trained(made_recipe(), (seed,)).output[0])


@pytest.mark.parametrize("optimizer", [{"kind": "sgd", "momentum": 0.9}, {"kind": "adam"}])
def test_training_goes_on_from_a_checkpoint_to_the_bit(optimizer: dict[str, Any]) -> None:
    """Three steps an epoch, factors after two of them and when an epoch begins; a checkpoint holds none."""
    made = made_recipe(method={"optimizer": optimizer})
    whole = trained(made)
    first, second = DpSgd(context(made)), DpSgd(context(made))
    first.run_epoch(0)
    second.load_state(first.state())
    second.run_epoch(1)
    assert torch.equal(second.output, whole.output)


def test_factors_depend_on_released_weights_and_on_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """From equal noisy sums, other records give the same factors at every renewal."""
    seen: list[list[Tensor]] = []
    own = KroneckerFactors.renew

    def renew(self: KroneckerFactors, step: int) -> None:
        own(self, step)
        seen[-1] += [c.outputs.clone() for layer in self.layers if (c := layer.cuts) and c.outputs is not None]

    monkeypatch.setattr(KroneckerFactors, "renew", renew)
    monkeypatch.setattr(DpSgd, "privatise", lambda self, epoch, step: self.context.pack.sums.fill_(step + 1.0))
    x, y = points()
    for data in ((x, y), (x[::-1].copy(), 1 - y)):
        seen.append([])
        trained(made_recipe(), data=data)
    assert len(seen[0]) == 8 and all(map(torch.equal, *seen))
    assert not torch.equal(seen[0][0], seen[0][2])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one layer": ({"model": {"kind": "linear"}}, "use second-moment"),
    "numbers": ({"data": {"path": "a.csv", "target": "y", "task": "regression"}}, "data.task regression"),
    "one by one": ({"method": {"batching": "fixed", "batch_size": 1}}, "one by one"),
    "compiled": ({"runtime": {"compile": True}}, "would keep the first factors"),
    "rounded": ({"runtime": {"dtype": "bfloat16"}}, "proved for float32 and float64"),
    "users": ({"privacy": {"unit": {"column": "who", "most_rows": 2}, "delta": 1e-5}}, "rows of a user"),
    "not images": (
        {
            "data": {"path": "a.csv", "target": "y", "preprocess": [{"pca": {"components": 3, "public": True}}]},
            "method": {"preconditioner": {"kind": "kfac", "probes": "strokes"}},
        },
        "use uniform",
    ),
    "fitted on records": (
        {
            "data": {"path": "a.csv", "target": "y", "preprocess": [{"scale": {"by": "min-max"}}]},
            "method": {"preconditioner": {"kind": "kfac", "probes": "strokes"}},
        },
        "use uniform",
    ),
    "without a stated range": (
        {
            "data": {"name": "cifar10", "preprocess": []},
            "method": {"preconditioner": {"kind": "kfac", "probes": "strokes"}},
        },
        "use uniform",
    ),
    "no probes": ({"method": {"preconditioner": {"kind": "kfac"}}}, "probes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_with_the_reason(name: str) -> None:
    changes, reason = REFUSED[name]
    with pytest.raises(ValidationError, match=reason):
        made_recipe(**changes)


@pytest.mark.parametrize(
    ("steps", "low", "high"),
    [(None, 0, 1), ([], 0, 16), ([{"scale": {}}], 0, 1), ([{"scale": {"to": [-2, 2.4]}}], -2, 2.4)],
)
def test_probes_have_the_public_range_of_the_pixels_of_the_recipe(
    steps: list[dict[str, Any]] | None, low: float, high: float
) -> None:
    made = made_recipe(data={"path": "a.npz", "bounds": [0, 16], "classes": [0, 1, 2], "preprocess": steps})
    assert made.data.pixel_range == (low, high)
    pack = Pack(images, [0], DOUBLE, trusted=True)
    table = Table.load(np.zeros((3, 2, 7, 7)), np.zeros(3, np.int64), False, DOUBLE.device, DOUBLE.dtype)
    found = KroneckerFactors.of(replace(context(made), pack=pack, table=table), BOTH, synthetic.probes)
    drawn = synthetic.probes("uniform", found.probes.shape[1], (2, 7, 7), SEED)
    np.testing.assert_allclose(found.probes[0].numpy(), low + (high - low) * drawn.astype(float), atol=1e-6)


def test_probes_fit_the_model_or_are_refused() -> None:
    drawn = synthetic.probes("strokes", 3, (1, 14, 14), 0)
    assert drawn.shape == (3, 1, 14, 14) and 0 <= drawn.min() < drawn.max() <= 1
    rows = synthetic.probes("uniform", 2000, (3,), 0)
    assert abs(float(rows.mean())) < 0.05 and abs(float(rows.var()) - 1) < 0.05
    assert set(synthetic.probes("uniform", 90, (2,), 0, 3).ravel().tolist()) == {0, 1, 2}
    for shape, tokens in (((4,), None), ((1, 4, 5), None), ((3, 4, 4), 9)):
        with pytest.raises(DataError, match="use uniform"):
            synthetic.probes("dead-leaves", 2, shape, 0, tokens)
