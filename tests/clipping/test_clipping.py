"""Clipped sums: bounds, masks, pieces, examples that are not finite, and the diagnostics."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpsgd_cli.clipping.run import SHORTEST, Clipping, at_most, automatic, normalised
from dpsgd_cli.engine.losses import cross_entropy
from tests.engine.conftest import Case, linear_loss, numbers


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


class Both(nn.Module):
    """A layer of every kind on 1 x 6 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.wide = nn.Conv1d(1, 2, 5), nn.Conv1d(2, 8, 1)
        self.norm, self.gate, self.mix = nn.LayerNorm(2), nn.PReLU(8), nn.Linear(2, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(self.wide(self.small(x)))
        z: Tensor = self.head(self.mix(self.norm(y)).flatten(1))
        return z


def total_norm(sums: dict[str, Tensor], trial: int = 0) -> float:
    return math.sqrt(sum(float(value[trial].double().square().sum()) for value in sums.values()))


def test_each_layer_has_its_own_bound() -> None:
    made = Case(mlp, numbers(2, 4, 3), torch.zeros(2, 4), norms=(0.01, 0.3), flat=False, seeds=(0, 1))
    made.check()
    one = Case(mlp, numbers(2, 1, 3), torch.zeros(2, 1), norms=(0.01, 0.3), flat=False, seeds=(0, 1)).fast()
    for trial in range(2):
        for name, bound in (("0", 0.01), ("2", 0.3)):
            own = {key: value for key, value in one.items() if key.startswith(name)}
            assert total_norm(own, trial) == pytest.approx(bound * (1 + trial))


LENGTHS: dict[str, tuple[Any, Any]] = {
    "at most": (at_most, min),
    "automatic": (partial(automatic, stability=0.1), lambda norm, bound: bound * norm / (norm + 0.1)),
    "normalised": (normalised, lambda norm, bound: bound),
}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", LENGTHS)
def test_gradients_become_as_long_as_their_kind_says(kind: str, flat: bool) -> None:
    """Against one example at a time; the gradient of the label -1 is 0, and stays so."""
    labels = torch.tensor([[-1.0, 0.0, 1.0, 30.0], [-1.0] * 4])
    mask = torch.tensor([[True, True, False, True], [True] * 4])
    factors, length = LENGTHS[kind]
    made = Case(mlp, numbers(2, 4, 3), labels, (0.5,), mask, flat, seeds=(0, 1), factors=factors, length=length)
    sums = made.check()
    assert total_norm(sums, 0) > 0 and total_norm(sums, 1) == 0


def test_sensitivities_are_those_of_the_stacked_layers() -> None:
    assert Clipping(torch.tensor([[2.0, 3.0]])).sensitivities == [2.0, 3.0]
    assert Clipping(torch.tensor([[3.0, 1.0], [4.0, 1.0]]), flat=False).sensitivities == pytest.approx(
        [5, math.sqrt(2)]
    )


@settings(max_examples=20)
@given(rows=st.integers(0, 7), most=st.integers(1, 8), masked=st.booleans(), flat=st.booleans())
def test_pieces_of_a_batch_give_the_same_sums(rows: int, most: int, masked: bool, flat: bool) -> None:
    mask = numbers(2, rows, seed=1) > 0 if masked else None
    y = torch.arange(2 * rows).view(2, rows)
    made = Case(mlp, numbers(2, rows, 3), y, mask=mask, flat=flat, norms=(0.5,), seeds=(0, 1))
    whole, pieces = made.fast(), made.fast(most=most)
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-10, atol=1e-12)


def test_without_clipping_gradients_are_summed_as_they_are() -> None:
    mask = torch.tensor([[True, False, True]])
    Case(mlp, 100 * numbers(1, 3, 3), torch.ones(1, 3), mask=mask, clips=False).check()


def test_sums_are_added_to_what_is_there() -> None:
    made = Case(mlp, numbers(1, 4, 3), torch.zeros(1, 4), norms=(0.5,))
    pack = made.pack()
    once = made.fast(pack)
    made.x, made.y = made.x[:, :0], made.y[:, :0]
    assert all(not value.any() for value in made.fast(pack).values()), "an empty batch adds nothing"
    assert total_norm(once) > 0


FEATURES = st.sampled_from([0.0, 1e-30, -1.0, 3.0, 1e10, -1e19, 1e25, 3e38, math.inf, -math.inf, math.nan])


@settings(max_examples=150)
@given(
    record=st.lists(FEATURES, min_size=6, max_size=6),
    label=st.sampled_from([0.0, 1.0, 1e20, 1e38, math.inf, math.nan]),
    flat=st.booleans(),
    seed=st.integers(0, 3),
    kind=st.sampled_from(sorted(LENGTHS)),
)
def test_no_record_moves_the_sum_beyond_its_bound(
    record: list[float], label: float, flat: bool, seed: int, kind: str
) -> None:
    """In float32, whatever its features and label are; and it never makes the sum infinite or undefined."""
    others = numbers(1, 3, 1, 6, seed=seed).float()
    joined = torch.cat([others, torch.tensor(record).view(1, 1, 1, 6)], dim=1)
    labels = torch.tensor([[1.0, 0.0, 2.0, label]])
    bound = 0.7 * (1.0 if flat else math.sqrt(6))
    factors = LENGTHS[kind][0]
    made = Case(Both, joined, labels, dtype=torch.float32, norms=(0.7,), flat=flat, seeds=(seed,), factors=factors)
    pack = made.pack()
    with_record = made.fast(pack)
    made.x, made.y = others, labels[:, :3]
    without = made.fast(pack)
    moved = total_norm({name: with_record[name] - without[name] for name in without})
    assert moved <= bound * (1 + 1e-4)


@pytest.mark.parametrize("size", [1e-21, 1e-23, 3e-30, SHORTEST / 4])
def test_a_gradient_too_short_to_tell_its_norm_is_not_lengthened_beyond_its_bound(size: float) -> None:
    """In float32 the squares of its 10,000 numbers vanish, and with them the norm that it would be divided by."""
    layer = nn.Linear(10_000, 1, bias=False)
    x = torch.full((1, 1, 10_000), size)
    made = Case(lambda: layer, x, torch.zeros(1, 1), dtype=torch.float32, factors=normalised, loss=linear_loss)
    moved = total_norm(made.fast())
    assert 0 < moved <= 1 + 1e-5 and moved == pytest.approx(min(1.0, 100 * size / SHORTEST), rel=1e-4)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_an_example_that_is_not_finite_adds_exactly_zero(bad: float, flat: bool) -> None:
    """It is as if it were masked, for its own trial and for the others, bit by bit."""
    x = numbers(3, 4, 1, 6)
    x[1, 2, 0, 3] = bad
    present = torch.ones(3, 4, dtype=torch.bool)
    present[1, 2] = False
    made = Case(Both, x, torch.zeros(3, 4), norms=(0.5,), seeds=(0, 1, 2), flat=flat)
    found = made.fast()
    assert made.seen.sums()["nonfinite"] == [0, 1, 0]
    x[1, 2] = 0.0
    masked = Case(Both, x, torch.zeros(3, 4), norms=(0.5,), seeds=(0, 1, 2), flat=flat, mask=present).fast()
    for name in found:
        torch.testing.assert_close(found[name], masked[name], rtol=0, atol=1e-15)


def test_a_masked_row_that_is_not_finite_adds_zero_and_is_not_counted() -> None:
    """The padding of a Poisson batch is a record of the data, which this batch did not draw."""
    x = numbers(2, 3, 1, 6)
    x[0, 0] = math.nan
    mask = torch.tensor([[False, True, True], [True, True, True]])
    made = Case(Both, x, torch.zeros(2, 3), norms=(0.5,), seeds=(0, 1), mask=mask)
    found = made.check()
    assert all(bool(value.isfinite().all()) for value in found.values())
    assert made.seen.sums()["nonfinite"] == [0, 0]
    assert made.seen.sums()["examples"] == [2, 3]


@pytest.mark.parametrize("label", [math.inf, math.nan])
def test_an_infinite_loss_adds_zero(label: float) -> None:
    """Even in front of layers whose inputs are finite; tokens, which cannot be erased, included."""
    labels = torch.tensor([[0.0, label, 1.0]])

    def tokens() -> nn.Module:
        return nn.Sequential(nn.Embedding(3, 2, padding_idx=0), nn.Flatten(), nn.Linear(4, 2))

    x = torch.tensor([[[1, 1], [0, 2], [2, 1]]])
    for build, inputs in ((tokens, x), (Both, numbers(1, 3, 1, 6))):
        found = Case(build, inputs, labels, norms=(0.5,)).fast()
        rest = Case(build, inputs[:, [0, 2]], labels[:, [0, 2]], norms=(0.5,)).fast()
        for name in rest:
            torch.testing.assert_close(found[name], rest[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shares_input", [True, False])
def test_a_trial_that_diverged_does_not_disturb_the_others(shares_input: bool) -> None:
    made = Case(mlp, numbers(1, 3, 3), torch.zeros(3, 3), seeds=(0, 1, 2), shares_input=shares_input)
    pack = made.pack()
    before = made.fast(pack)
    pack.values[1] = math.inf
    after = made.fast(pack)
    for name in before:
        torch.testing.assert_close(after[name][[0, 2]], before[name][[0, 2]], rtol=0, atol=1e-15)
        assert not after[name][1].any()


def test_a_shared_record_that_is_not_finite_is_zero_in_every_trial() -> None:
    x = numbers(1, 3, 3)
    x[0, 1, 2] = math.nan
    Case(mlp, x, torch.zeros(3, 3), seeds=(0, 1, 2), shares_input=True, norms=(0.2,)).check()


def test_float32_rounding_of_the_factors_stays_below_one_in_100000() -> None:
    """500 trials of one example each: the norm of what each adds."""
    scale = torch.logspace(-3, 6, 500, dtype=torch.float64).view(500, 1, 1)
    x = (numbers(500, 1, 3) * scale).float()
    y = torch.arange(500).view(500, 1) % 2
    made = Case(mlp, x, y, dtype=torch.float32, seeds=[0] * 500, loss=cross_entropy)
    pack = made.pack()
    made.fast(pack)
    bounds = torch.arange(1, 501, dtype=torch.float64)
    norms = pack.sums.double().norm(dim=1) / bounds
    assert float(norms.max()) <= 1 + 1e-5
    assert float(norms.max()) >= 1 - 1e-5, "some are clipped"


def test_diagnostics_count_what_the_slow_way_counts() -> None:
    x = numbers(2, 5, 3)
    x[0, 0, 0] = math.nan
    mask = torch.tensor([[True, True, False, True, True], [True, True, True, True, False]])
    made = Case(mlp, x, torch.ones(2, 5), mask=mask, norms=(5.0,), seeds=(0, 1))
    made.fast(most=2)
    seen = made.seen.sums()
    norms: list[list[float]] = [[], []]
    for trial in range(2):
        for row in range(5):
            if mask[trial, row] and bool(x[trial, row].isfinite().all()):
                alone = torch.zeros(2, 5, dtype=torch.bool)
                alone[trial, row] = True
                sums = Case(mlp, x, torch.ones(2, 5), mask=alone, seeds=(0, 1), clips=False).slow()
                norms[trial].append(total_norm(sums, trial))
    assert seen["examples"] == [4, 4]
    assert seen["nonfinite"] == [1, 0]
    assert seen["norm"] == pytest.approx([sum(own) for own in norms])
    assert seen["clipped"] == [sum(norm > 5.0 * (1 + trial) for norm in norms[trial]) for trial in range(2)]
    assert sum(seen["clipped"]) > 0
