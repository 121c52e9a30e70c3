"""Augmented copies are crops of their own image, drawn alike everywhere, and count as one example when clipped."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.data.augmentation import Augmentation
from dpsgd_cli.data.settings import Augment
from dpsgd_cli.engine.layers import WeightStandardisedConv2d
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams
from dpsgd_cli.engine.tensors import Batch, Table
from dpsgd_cli.errors import ModelError
from tests.engine.conftest import numbers

CPU = torch.device("cpu")
SHAPE = (2, 5, 4)


def make(seeds: list[int], **settings: Any) -> Augmentation:
    return Augmentation(Augment(**{"crop": 2, **settings}), [SeededStreams(seed) for seed in seeds], SHAPE)


def crops(image: Tensor, crop: int, mode: str) -> list[Tensor]:
    """Every crop of one image (C, H, W), and every crop mirrored."""
    wide = nn.functional.pad(image[None], (crop,) * 4, mode=mode)[0]
    height, width = image.shape[1:]
    plain = [
        wide[:, down : down + height, right : right + width]
        for down in range(2 * crop + 1)
        for right in range(2 * crop + 1)
    ]
    return plain + [one.flip(2) for one in plain]


@pytest.mark.parametrize("padding", ["reflect", "zero"])
def test_every_copy_is_a_crop_of_its_own_image_and_every_crop_occurs(padding: Any) -> None:
    """18 crops of one pixel, 900 copies each: a crop is missing by chance with probability below 1e-20."""
    x, augment = numbers(2, 3, *SHAPE), make([0, 1], copies=900, crop=1, padding=padding)
    found = augment(x, step=3).view(2, 900, 3, *SHAPE)
    for trial in range(2):
        for row in range(3):
            options = torch.stack(crops(x[trial, row], 1, "reflect" if padding == "reflect" else "constant"))
            same = (found[trial, :, row, None] == options).flatten(2).all(dim=2)
            assert bool((same.sum(dim=1) == 1).all())
            counts = same.sum(dim=0)
            # 900 copies on 18 crops: the chi-square with 17 degrees of freedom passes 55 with probability 6e-6
            assert float(((counts - 50.0) ** 2 / 50).sum()) < 55
    assert not torch.equal(found[:, :, 0] == x[:, None, 0], found[:, :, 1] == x[:, None, 1])


def test_crop_and_flip_can_be_left_out() -> None:
    x = numbers(1, 2, *SHAPE)
    assert torch.equal(make([0], copies=2, crop=0, flip=False)(x, 0), x.repeat(1, 2, 1, 1, 1))
    unflipped = make([0], copies=200, crop=1, flip=False)(x[:, :1], 0)[0]
    options = torch.stack(crops(x[0, 0], 1, "reflect"))
    assert (unflipped[:, None] == options).flatten(2).all(dim=2).nonzero()[:, 1].max() < 9


def test_a_trial_sees_the_same_alone_in_any_batch_and_nothing_else_is_the_same() -> None:
    x = numbers(1, 6, *SHAPE)
    both = make([5, 9], copies=4)(x, 7).view(2, 4, 6, *SHAPE)
    assert torch.equal(make([9], copies=4)(x, 7).view(4, 6, *SHAPE), both[1])
    part = make([5, 9], copies=4)(x[:, 2:4], 7).view(2, 4, 2, *SHAPE)
    assert torch.equal(part, both[:, :, 2:4])
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(make([5, 9], copies=4)(x, 8).view_as(both), both)


def test_no_other_records_copies_move_when_a_record_comes_goes_or_is_replaced() -> None:
    """The crops of a record follow its content: never its place among the others, whatever the key."""
    x, augment = numbers(1, 6, *SHAPE), make([5], copies=4)
    whole = augment(x, 7).view(4, 6, *SHAPE)
    assert torch.equal(augment(x[:, 1:], 7).view(4, 5, *SHAPE), whole[:, 1:])
    changed = x.clone()
    changed[0, 0] = 0.5
    assert torch.equal(augment(changed, 7).view(4, 6, *SHAPE)[:, 1:], whole[:, 1:])
    assert torch.equal(augment(x.flip(1), 7).view(4, 6, *SHAPE), whole.flip(1))


def test_the_sum_over_a_table_moves_by_one_record_alone() -> None:
    """Through the batches of a training, from tables with and without their first row."""
    x = numbers(1, 6, *SHAPE)[0].float()

    def copies(rows: Tensor) -> Tensor:
        table = Table.load(rows.numpy(), np.zeros(len(rows)), False, CPU, torch.float32)
        augment = Augmentation(Augment(crop=2, copies=3), [SeededStreams(1)], SHAPE)
        pieces = [augment(x, 4).view(3, -1, *SHAPE) for x, _, _ in table.chunks(Batch(None, None), 4)]
        return torch.cat(pieces, 1)

    assert torch.equal(copies(x)[:, 1:], copies(x[1:]))


def test_unseeded_trials_differ() -> None:
    """Two equal sets of 24 crops out of 50 have probability 50^-24."""
    x = numbers(1, 6, *SHAPE)
    augment = Augmentation(Augment(copies=4, crop=2), [SecureStreams(), SecureStreams()], SHAPE)
    one, other = augment(x, 0)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [((20,), {}, "needs images"), ((1, 4, 9), {"crop": 4}, "data.augment.crop: 4 pixels cannot be reflected")],
)
def test_what_cannot_be_cropped_is_refused(shape: tuple[int, ...], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Augmentation(Augment(**settings), [SeededStreams(0)], shape)


def network() -> nn.Module:
    """Every rule that the image models use, and one layer with none."""
    return nn.Sequential(
        WeightStandardisedConv2d(2, 4, 3, 1, 1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.PReLU(),
        nn.Flatten(2), nn.Linear(12, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.sin() * torch.arange(1.0, 4.0).to(outputs)).sum(dim=2) * (1 + labels)


def slow(x: Tensor, y: Tensor, mask: Tensor, bound: float) -> Tensor:
    """(R, P): one example at a time, its gradient the mean over its copies (R, K, B, ...), then clipped and added."""
    sums = []
    for trial in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(trial)
            module = network().double()
        total = torch.zeros(sum(p.numel() for p in module.parameters()), dtype=torch.float64)
        for row in range(x.shape[2]):
            if not mask[trial, row]:
                continue
            mean = torch.zeros_like(total)
            for copy in x[trial, :, row]:
                one = loss(module(copy[None])[None], y[trial, row].view(1, 1)).sum()
                found = torch.autograd.grad(one, list(module.parameters()))
                mean += torch.cat([g.flatten() for g in found]) / x.shape[1]
            total += mean * min(1.0, bound / float(mean.norm()))
        sums.append(total)
    return torch.stack(sums)


@pytest.mark.parametrize("bound", [0.03, 1e6])
@pytest.mark.parametrize("copies", [1, 3])
def test_the_mean_over_copies_is_clipped(bound: float, copies: int) -> None:
    images, y = numbers(2, 4, *SHAPE), torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]])
    mask = torch.tensor([[True, True, False, True], [True] * 4])
    x = make([0, 1], copies=copies, crop=2)(images, 0)
    pack = Pack(network, [0, 1], Placement(CPU, torch.float64))
    seen = Diagnostics(2, CPU)
    clipping = Clipping(torch.full((1, 2), bound, dtype=torch.float64))
    add_clipped_sums(pack, (x, y, mask), loss, clipping, seen)
    expected = slow(x.view(2, copies, 4, *SHAPE), y, mask, bound)
    torch.testing.assert_close(pack.sums, expected, rtol=1e-9, atol=1e-10)
    assert seen.sums()["examples"] == [3, 4]


def test_an_example_with_one_bad_copy_adds_nothing() -> None:
    x, y = numbers(2, 6, *SHAPE), torch.zeros(2, 2).long()
    x[0, 3, 0, 0, 0] = math.inf  # the second copy of the first trial's second example
    pack = Pack(network, [0, 1], Placement(CPU, torch.float64))
    clipping = Clipping(torch.ones(1, 2, dtype=torch.float64))
    add_clipped_sums(pack, (x, y, None), loss, clipping, Diagnostics(2, CPU))
    mask = torch.tensor([[True, False], [True, True]])
    torch.testing.assert_close(pack.sums, slow(x.view(2, 3, 2, *SHAPE), y, mask, 1.0), rtol=1e-9, atol=1e-10)
