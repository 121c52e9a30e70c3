"""Dropout: each example's mask is a function of trial, step and its own input; its rate and its gradients are right."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.engine.dropout import Masks, Still, bits, content, mixed
from dpsgd_cli.engine.independence import check_model
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.errors import ModelError
from tests.engine.conftest import CPU, Of, linear_loss, numbers

PLACE = Placement(CPU, torch.float64)


def test_numbers_are_those_of_splitmix64() -> None:
    """The first three outputs for seed 1234567, as published with the reference implementation."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + n * golden) % 2**64 for n in range(3)]
    found = mixed(torch.tensor([state - 2**64 * (state >= 2**63) for state in states]))
    assert [int(one) % 2**64 for one in found] == known


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_numbers_are_dropped_at_the_stated_rate_and_the_rest_keeps_the_mean(p: float) -> None:
    """False-failure rate below 1e-8: six standard deviations of 200,000 coins."""
    masks = Masks()
    masks.begin([7], 3)
    with masks.pass_of(torch.arange(20).view(20, 1), 1, 1, True):
        kept = masks.dropped(torch.ones(20, 10_000, dtype=torch.float64), p, 2)
    gap = 6 * math.sqrt(p * (1 - p) / 200_000)
    assert float((kept == 0).double().mean()) == pytest.approx(p, abs=gap)
    assert float(kept.max()) == pytest.approx(1 / (1 - p), rel=1e-4)
    control = (kept == 0).double().mean() - (1 - p if p != 0.5 else 0.4)
    assert abs(float(control)) > gap


def test_bits_of_different_keys_are_unrelated() -> None:
    found = bits(mixed(torch.arange(2)), 40_000) >= 1 << 15
    assert float((found[0] == found[1]).double().mean()) == pytest.approx(0.5, abs=6 / 400)
    assert float((found[0, 1:] == found[0, :-1]).double().mean()) == pytest.approx(0.5, abs=6 / 400)


def test_content_tells_rows_apart_in_every_dtype() -> None:
    for rows in (numbers(5, 3, 2), numbers(5, 3).float(), torch.arange(15).view(5, 3), torch.eye(5) > 0):
        keys = content(rows)
        assert len(keys.unique()) == 5
        assert torch.equal(content(rows[[3, 1]]), keys[[3, 1]])


def net(p: float = 0.5) -> nn.Module:
    """Dropout as a module, as a function, of attention weights and of channels."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.dropout(m.drop(m.first(x)), p, m.training)
        y = F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], dropout_p=p if m.training else 0.0)
        z: Tensor = m.last(m.planes(y.view(len(x), -1, 2, 2)).flatten(1))
        return z

    return Of(run, first=nn.Linear(3, 4), drop=nn.Dropout(p), planes=nn.Dropout2d(p), last=nn.Linear(20, 2))


def noisy() -> nn.Module:
    """Normal noise on what a layer gives, as in a VAE, and a path that is dropped for whole examples, in training."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        y = y + torch.randn_like(y)
        if m.training:
            y = y / 0.8 * (torch.rand((len(y), 1, 1), dtype=y.dtype) + 0.8).floor()
        z: Tensor = m.last(y.flatten(1))
        return z

    return Of(run, first=nn.Linear(3, 4), last=nn.Linear(20, 2))


RANDOM = pytest.mark.parametrize("net", [net, noisy])


@pytest.mark.parametrize("normal", [False, True])
def test_noise_has_the_law_of_torch(normal: bool) -> None:
    """False-failure rate 1e-6, of numbers that are those of one record each."""
    masks = Masks()
    masks.begin([7], 3)
    with masks.pass_of(torch.arange(20).view(20, 1), 1, 1, True):
        drawn = masks.noise(normal, 5_000)
    law = stats.norm if normal else stats.uniform
    assert stats.kstest(drawn.flatten().numpy(), law.cdf).pvalue > 1e-6
    assert stats.kstest(drawn.flatten().numpy() + 0.02, law.cdf).pvalue < 1e-6
    assert len(drawn.unique()) > 99_000 and (normal or 0 <= float(drawn.min()) <= float(drawn.max()) < 1)


def test_noise_is_its_mean_in_tests_and_predictions() -> None:
    check_model(Pack(noisy, [0], PLACE), (5, 3), torch.empty(0, dtype=torch.float64))
    pack = Pack(noisy, [0], PLACE)
    pack.template.eval()
    with torch.random.fork_rng(devices=[]), Still():
        torch.manual_seed(0)
        torch.testing.assert_close(pack(X)[0], noisy().double().eval()(X[0]))


@pytest.mark.parametrize(("shape", "refused"), [((), False), ((1,), True)])
def test_a_layer_is_dropped_for_no_example_alone(shape: tuple[int, ...], refused: bool) -> None:
    """A step goes one way for all examples: a coin for a whole batch is its mean, and an `if` on others is refused."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        z: Tensor = m.last(y if m.training and torch.rand(shape) < 0.1 else y.tanh())
        return z

    pack = Pack(lambda: Of(run, first=nn.Linear(3, 4), last=nn.Linear(4, 2)), [0], PLACE)
    with pytest.raises(ModelError, match="asks for a number") if refused else contextlib.nullcontext():
        check_model(pack, (3,), torch.empty(0, dtype=torch.float64))


X = numbers(1, 6, 5, 3)
BIG = 1e9


def sums(pack: Pack, rows: list[int], step: int = 0, keys: tuple[int, ...] | None = None, most: int = 6) -> Tensor:
    """The sums of examples `rows` of X at a step, in pieces of `most`."""
    pack.sums.zero_()
    pack.session.passes.masks.begin(keys or tuple(11 + trial for trial in range(pack.trials)), step)
    for start in range(0, len(rows), most):
        part = rows[start : start + most]
        clipping = Clipping(torch.full((1, pack.trials), 0.3, dtype=torch.float64))
        labels = torch.tensor(part)[None]
        add_clipped_sums(pack, (X[:, part], labels, None), linear_loss, clipping, Diagnostics(pack.trials, CPU))
    return pack.sums.clone()


@RANDOM
def test_an_example_adds_the_same_with_any_other_examples_in_any_pieces_and_packs(net: Callable[[], nn.Module]) -> None:
    pack = Pack(net, [0, 1], PLACE)
    alone = [sums(pack, [row]) for row in range(6)]
    together = sums(pack, list(range(6)))
    torch.testing.assert_close(together, torch.stack(alone).sum(0))
    torch.testing.assert_close(sums(pack, [4, 2, 5, 0, 3, 1], most=2), together)
    torch.testing.assert_close(together - sums(pack, [0, 1, 3, 4, 5]), alone[2], rtol=1e-9, atol=1e-12)
    single = Pack(net, [1], PLACE)
    torch.testing.assert_close(sums(single, list(range(6)), keys=(12,)), together[1:])


@RANDOM
def test_steps_trials_and_calls_have_masks_of_their_own(net: Callable[[], nn.Module]) -> None:
    pack = Pack(net, [0, 0], PLACE)
    first, second = sums(pack, [0], 0), sums(pack, [0], 1)
    assert not torch.allclose(first, second) and not torch.allclose(first[0], first[1])
    torch.testing.assert_close(sums(pack, [0], 0), first)
    same = sums(pack, [0], keys=(11, 11))
    torch.testing.assert_close(same[0], same[1])
    masks = Masks()
    masks.begin([1], 0)
    with masks.pass_of(X[0], 1, 1, True):
        one, two = (masks.dropped(torch.ones(6, 50), 0.5, 2) for _ in range(2))
    assert not torch.equal(one, two)


def test_copies_of_one_example_have_masks_of_their_own() -> None:
    masks = Masks()
    masks.begin([1], 0)
    with masks.pass_of(torch.zeros(4, 3), 1, 2, True):
        kept = masks.dropped(torch.ones(4, 50), 0.5, 2)
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[2], kept[3]) and not torch.equal(kept[0], kept[2])


def test_gradients_are_those_of_autograd_with_the_same_masks() -> None:
    """The module by hand, with the masks that the pass draws, one example at a time."""

    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 2))

    pack = Pack(small, [0], PLACE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: Any = small().double()
    clipping = Clipping(torch.full((1, 1), BIG, dtype=torch.float64))
    masks = pack.session.passes.masks
    for row in range(3):
        x = X[0, row, :1]
        masks.begin([5], 9)
        pack.sums.zero_()
        add_clipped_sums(pack, (x[None], torch.zeros(1, 1), None), linear_loss, clipping, Diagnostics(1, CPU))
        with masks.pass_of(x, 1, 1, True):
            mask = masks.dropped(torch.ones(1, 40, dtype=torch.float64), 0.5, 2)
        loss = linear_loss((module[2](module[0](x) * mask))[None], torch.zeros(1, 1)).sum()
        true = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        torch.testing.assert_close(pack.sums[0], true)


def test_nothing_is_dropped_outside_of_training_passes() -> None:
    pack = Pack(net, [0], PLACE)
    pack.session.passes.masks.begin([1], 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = net().double().eval()
    torch.testing.assert_close(pack(X)[0], plain(X[0]))


def test_a_training_that_names_no_step_is_refused() -> None:
    pack = Pack(net, [0], PLACE)
    clipping = Clipping(torch.ones(1, 1, dtype=torch.float64))
    with pytest.raises(ModelError, match="dropout needs the number of the step"):
        add_clipped_sums(pack, (X, torch.zeros(1, 6), None), linear_loss, clipping, Diagnostics(1, CPU))


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)])
def test_other_kinds_of_dropout_are_refused(layer: nn.Module) -> None:
    pack = Pack(lambda: nn.Sequential(nn.Linear(3, 4), layer), [0], PLACE)
    pack.session.begin()
    with pytest.raises(ModelError, match="random numbers are drawn"):
        pack(X)
