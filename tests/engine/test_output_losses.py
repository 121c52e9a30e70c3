"""Losses of network outputs: values of torch for one example at a time, and no example in another's number."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpsgd_cli.data.settings import Task
from dpsgd_cli.engine.losses import LOSSES, OUTPUT_LOSSES, USUAL, LossOptions, check_apart, made, one_by_one
from dpsgd_cli.engine.settings import LOSS_TASKS, LossName, NamedLoss
from dpsgd_cli.errors import ModelError

CLASSES, PLACES, ROWS = 4, 5, 6
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(2, ROWS, PLACES, CLASSES, generator=GENERATOR)
LABELS = torch.randint(CLASSES, (2, ROWS, PLACES), generator=GENERATOR)
LABELS[:, 1, 2:] = -1  # an example with fewer places that count, and one with none
LABELS[:, 3] = -100
NUMBERS = torch.randn(2, ROWS, 3, generator=GENERATOR)
BINARY = (torch.randn(2, ROWS, CLASSES, generator=GENERATOR) > 0).long()


def of_places(outputs: Tensor, labels: Tensor, **how: float | Tensor) -> Tensor:
    """Return torch's cross-entropy of one example (L, K) with its own mean."""
    counts = int((labels >= 0).sum())
    wanted: Tensor = F.cross_entropy(outputs, labels.clamp_min(-100).where(labels >= 0, -100), reduction="sum", **how)  # type: ignore[arg-type]
    return wanted / max(1, counts)


GIVEN: dict[str, tuple[Tensor, Tensor, LossOptions, Callable[[Tensor, Tensor], Tensor]]] = {
    "cross-entropy": (LOGITS, LABELS, LossOptions(), of_places),
    "next-token": (
        LOGITS, LABELS, LossOptions(smoothing=0.2), lambda o, y: of_places(o, y, label_smoothing=0.2),
    ),
    "bce": (
        LOGITS[:, :, 0], BINARY, LossOptions(), lambda o, y: F.binary_cross_entropy_with_logits(o, y.float()),
    ),
    "squared": (NUMBERS[..., :1], NUMBERS[..., 0].flip(1), LossOptions(), lambda o, y: (o[0] - y).square() / 2),
    "huber": (
        NUMBERS[..., :1], NUMBERS[..., 0].flip(1), LossOptions(width=0.3),
        lambda o, y: F.huber_loss(o[0], y, delta=0.3),
    ),
    "poisson": (
        NUMBERS[..., :1].abs().clamp(max=0.9), NUMBERS[..., 0].flip(1).clamp(-1, 1),
        LossOptions(low=0.0, high=8.0),
        lambda o, y: F.poisson_nll_loss(4 * o[0] + 4, 4 * y + 4, log_input=False, eps=0.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OUTPUT_LOSSES)
def test_a_loss_is_that_of_torch_for_one_example_and_mixes_none(kind: LossName) -> None:
    outputs, labels, options, alone = GIVEN[kind]
    loss = made(NamedLoss(kind=kind), LOSS_TASKS[kind][0], options, labels.dim() > 2, False, Path())
    found = loss(outputs, labels)
    flat = [alone(o, y) for o, y in zip(outputs.flatten(0, 1), labels.flatten(0, 1), strict=True)]
    torch.testing.assert_close(found, torch.stack(flat).view_as(found))
    check_apart(loss, outputs, labels)


def test_each_loss_says_why_examples_stay_apart_and_each_task_has_one() -> None:
    assert all(known.apart for known in OUTPUT_LOSSES.values())
    assert OUTPUT_LOSSES.keys() == LOSS_TASKS.keys() == {*get_args(LossName)}
    assert {*USUAL} == {task for tasks in LOSS_TASKS.values() for task in tasks} == {*get_args(Task)}
    assert {*LOSSES} < {*USUAL}
    for task, kind in USUAL.items():
        assert task in LOSS_TASKS[kind]


def test_an_ignored_class_weights_and_padding_count_as_they_should() -> None:
    """By hand: two places of class 0 and 1 with even logits; class 1 ignored, or of weight 1/4."""
    even, labels = torch.zeros(1, 1, 3, 2), torch.tensor([[[0, 1, -7]]])
    two = torch.log(torch.tensor(2.0))
    for options, wanted in (
        (LossOptions(), two),
        (LossOptions(ignored=1), two),
        (LossOptions(weights=(1.0, 0.25)), two * 5 / 8),
    ):
        loss = made(None, "token-classification", options, True, False, Path())
        torch.testing.assert_close(loss(even, labels)[0, 0], wanted)


def test_a_sequence_is_divided_by_its_own_places_whatever_is_in_the_batch() -> None:
    loss = made("cross-entropy", "token-classification", LossOptions(), True, False, Path())
    both, one = loss(LOGITS, LABELS), loss(LOGITS[:, [1]], LABELS[:, [1]])
    torch.testing.assert_close(both[:, [1]], one)
    assert both[:, 3].eq(0).all(), "no place counts, and nothing is divided by 0"


def test_the_poisson_loss_is_finite_and_falls_towards_the_edge() -> None:
    loss = made("poisson", "regression", LossOptions(low=0.0, high=8.0), False, False, Path())
    outputs = torch.tensor([[[-3.0], [-1.0], [-0.9]]], requires_grad=True)
    found = loss(outputs, torch.zeros(1, 3))
    assert found.isfinite().all()
    assert loss(outputs, torch.ones(1, 3))[0].diff().lt(0).all()


def user(code: str) -> Callable[[Tensor, Tensor], Tensor]:
    names: dict[str, object] = {"torch": torch, "F": F}
    exec(compile(ast.parse(code), "loss.py", "exec"), names)
    return one_by_one(names["loss"], "loss.py")


def test_a_loss_of_the_users_own_sees_one_example() -> None:
    own = user("def loss(y, t):\n    return F.cross_entropy(y, t)")
    torch.testing.assert_close(
        own(LOGITS[:, :, 0], LABELS[:, :, 0].abs() % CLASSES),
        F.cross_entropy(
            LOGITS[:, :, 0].flatten(0, 1), (LABELS[:, :, 0].abs() % CLASSES).flatten(), reduction="none"
        ).view(2, ROWS),
    )
    # what is written as a mean over the batch is a mean over one example's numbers
    check_apart(user("def loss(y, t):\n    return (y - y.mean()).square().mean()"), NUMBERS, NUMBERS[..., 0])


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("seen = []\ndef loss(y, t):\n    seen.append(1)\n    return y.mean() * len(seen)", "is another one"),
        ("def loss(y, t):\n    return (y - 1).square()", "shape"),
        ("def loss(y, t):\n    return 1.0", "type float"),
        ("def loss(y, t):\n    return y.sum() if y.sum() > 0 else -y.sum()", "for one example alone"),
        ("def loss(y, t):\n    return y.sum() * torch.rand(())", "for one example alone"),
        ("def loss(y, t):\n    return t.sum().float()", "does not depend on the model's outputs"),
        ("loss = 3", "no function"),
    ],
)  # fmt: skip
def test_a_loss_that_is_no_number_of_one_example_is_refused(code: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        check_apart(user(code), NUMBERS, NUMBERS[..., 0])


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: y.mean(-1) - 1e-3 * y.mean(),
        lambda y, t: (y.mean(-1) - t) / y.shape[1],
        lambda y, t: y.mean(-1) * torch.arange(y.shape[1]),
    ],
    ids=["a mean over the batch", "a number of the batch", "a place in the batch"],
)
def test_a_loss_that_mixes_is_found(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match=r"model\.loss"):
        check_apart(loss, NUMBERS, NUMBERS[..., 0])


def test_a_gradient_that_crosses_is_found_though_the_numbers_agree() -> None:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        return y.mean(-1) + 1e-3 * (y - y.detach()).mean()

    with pytest.raises(ModelError, match="has a gradient in the outputs of another"):
        check_apart(loss, NUMBERS, NUMBERS[..., 0])
