"""Models that let one example touch another between their layers, and models that only seem to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.engine import independence
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.errors import ModelError

PLACE = Placement(torch.device("cpu"))


Build = Callable[[], nn.Module]


class Model(nn.Module):
    """Two dense layers; `before` and `between`, methods or given functions, do something to the rows."""

    def __init__(self, **parts: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        for name, part in parts.items():
            setattr(self, name, part)

    def before(self, x: Tensor) -> Tensor:
        return x

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.between(torch.tanh(self.first(self.before(x)))))
        return y


def made(**parts: Any) -> Build:
    return lambda: Model(**parts)


class CentredLate(Model):
    """Centres what a layer gives, in front of a layer that starts at zero."""

    def __init__(self) -> None:
        super().__init__(between=lambda x: x - x.mean(0))
        nn.init.zeros_(self.last.weight)


class FrozenRecurrent(Model):
    """A recurrent network that takes the batch for time."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.core = nn.GRU(6, 6).requires_grad_(False)

    def between(self, x: Tensor) -> Tensor:
        y: Tensor = self.core(x)[0]
        return y


class SortedByLength(Model):
    """Sorts rows by their sum, runs a layer, and puts them back: every output is right, every layer's rows are not."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort(descending=True)
        y: Tensor = self.last(torch.tanh(self.first(x[order]))[order.argsort()])
        return y


class Remembering(Model):
    """Subtracts a running mean of everything it saw."""

    mean: Any = 0.0

    def between(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean


class OtherCalls(Model):
    """Uses a layer once more when rows are many."""

    def between(self, x: Tensor) -> Tensor:
        return self.first(x) if len(x) > 3 else x


MIXING: dict[str, Build] = {
    "centred": made(before=lambda x: x - x.mean(0)),
    "centred late": CentredLate,
    "slightly centred": made(between=lambda x: x - 1e-6 * x.mean(0)),
    "sums from the first row on": made(between=lambda x: x.cumsum(0)),
    "recurrent": FrozenRecurrent,
    "sorted": SortedByLength,
    "reversed": made(before=lambda x: x.flip(0), between=lambda x: x.flip(0)),
    "steps at the median": made(between=lambda x: x + (x > x.median(0)[0]).to(x)),
    "remembering": Remembering,
    "divided by the number of rows": made(before=lambda x: x / len(x)),
    "softmax over examples": made(between=lambda x: torch.softmax(x, dim=0)),
    "random": made(between=nn.functional.dropout),
    "other calls": OtherCalls,
}


@pytest.mark.parametrize("model", MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
def test_models_that_mix_examples_are_refused(model: Build, seeds: list[int]) -> None:
    pack = Pack(model, seeds, PLACE)
    before = pack.values.clone()
    with pytest.raises(ModelError, match=r"mixes examples.*over the batch axis"):
        independence.check_examples_stay_apart(pack, independence.stand_in_rows((6,), pack.values))
    assert torch.equal(pack.values, before), "the weights are put back"
    assert not pack.session.recording and not any(layer.inputs for layer in pack.members)


class GradientsByNorm(Model):
    """Clips what flows back, of all examples together."""

    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda d: d * (1 / d.norm()).clamp(max=1))
        return x


class Observed(Model):
    """Divides by the largest number that it ever saw: it has seen it before it is looked at."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0.0))

    def before(self, x: Tensor) -> Tensor:
        self.seen = torch.maximum(self.seen, x.detach().abs().max())
        return x / self.seen.clamp_min(1e-6)


class Averaging(Observed):
    """Keeps a mean for later and uses it nowhere yet."""

    def before(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(), alpha=0.1)
        return x


BY_SIZE: dict[str, Build] = {
    "by the largest": made(before=lambda x: x / (x.abs().max() + 1e-8)),
    "by the largest of columns": made(before=lambda x: x / x.amax(0)),
    "by the range": made(before=lambda x: (x - x.min()) / (x.max() - x.min())),
    "without outliers": made(before=lambda x: x.clamp(max=x.quantile(0.9))),
    "quantised": made(before=lambda x: (x / x.abs().max() * 127).round()),
    "numbers up to 255 or fractions, as the batch looks": made(before=lambda x: torch.where(x.max() > 1.5, x / 255, x)),
    "nothing outside of [0, 1]: the table has as many rows": made(
        before=lambda x: x / x.max() + torch.zeros(2).index_select(0, x.flatten().ceil().long())[0]
    ),
    "scaled where far": made(before=lambda x: torch.where(x.abs().max() > 1000, x / 1000, x)),
    "the mean where a number is missing": made(before=lambda x: torch.where(x.isnan(), x.nanmean(0), x)),
    "gradients by their norm": GradientsByNorm,
    "observed": Observed,
    "averaging": Averaging,
}


def check_all(pack: Pack, shape: tuple[int, ...]) -> independence.ModelTests:
    """What a user's model is put to (`training/build_models.py`), with time enough for all tests."""
    return independence.examine(pack, shape, pack.values, 20, 1e9, lambda told: None)


@pytest.mark.parametrize("model", BY_SIZE.values(), ids=BY_SIZE)
def test_models_that_look_at_sizes_across_a_batch_are_refused(model: Build) -> None:
    """Zeros and ones alone do not show it: all their rows have one largest number."""
    with pytest.raises(ModelError, match="mixes examples"):
        check_all(Pack(model, [0, 1], PLACE), (6,))


def ghost(group: int, part: float = 1.0) -> Build:
    """Normalises whole groups of examples, as ghost normalisation does; what is left over is let through."""

    def between(x: Tensor) -> Tensor:
        whole = x[: len(x) // group * group].view(-1, group, 6)
        return torch.cat([(whole - part * whole.mean(1, keepdim=True)).view(-1, 6), x[whole.shape[0] * group :]])

    return made(between=between)


GROUPS: dict[str, Build] = {
    **{f"groups of {size}": ghost(size) for size in (8, 16, 61, 128)},
    "groups of 8, less than rounding: only the gradient tells": ghost(8, 1e-6),
    "only in the recipe's batch": made(before=lambda x: x - x.mean(0) if len(x) == 600 else x),
    "by place among four": made(before=lambda x: x * (1 + (torch.arange(len(x)) % 4 == 3).to(x)).unsqueeze(1)),
    "the last of at least 30 reaches the first, without a gradient": made(
        between=lambda x: torch.cat([x[:1] + x.detach()[-1:] * 1e-3 * (len(x) >= 30), x[1:]])
    ),
}


@pytest.mark.parametrize("model", GROUPS.values(), ids=GROUPS)
def test_models_that_mix_groups_of_a_batch_are_refused(model: Build) -> None:
    pack = Pack(model, [0], PLACE)
    before = pack.values.clone()
    with pytest.raises(ModelError, match="mixes examples"):
        independence.check_batches(pack, independence.stand_in_rows((6,), pack.values), 600)
    assert torch.equal(pack.values, before)


def test_every_two_places_of_a_small_batch_are_separated_either_way() -> None:
    parts = torch.stack(list(independence._parts(61, torch.Generator())))
    for one in range(61):
        apart = (parts[:, [one]] & ~parts).any(dim=0)
        assert apart.sum() == 60 and not apart[one]


class Constant(Model):
    """Decides in Python by a number of its own."""

    limit: Tensor

    def __init__(self) -> None:
        super().__init__(before=lambda x: x / 2 if self.limit > 1 else x)
        self.register_buffer("limit", torch.tensor(2.0))


ASKING: dict[str, Build] = {
    "if": made(before=lambda x: x / 255 if x.max() > 1e6 else x),
    "equal": made(between=lambda x: x if torch.equal(x, x.sort(0)[0]) else 2 * x),
    "array": made(before=lambda x: x / 255 if x.detach().cpu().numpy().max() > 1e6 else x),
    "data": made(before=lambda x: x / 255 if x.data.max() > 1e6 else x),
    "allclose": made(between=lambda x: 2 * x if torch.allclose(x, torch.zeros_like(x)) else x),
    "as many classes": made(between=lambda x: x * nn.functional.one_hot(x.argmax(-1)).shape[-1]),
}


@pytest.mark.parametrize("model", ASKING.values(), ids=ASKING)
def test_a_model_that_asks_for_a_number_of_its_input_is_refused(model: Build) -> None:
    """On all of these rows it decides the same."""
    pack = Pack(model, [0], PLACE)
    with pytest.raises(
        ModelError, match=r"line \d+ of test_independence.py \(`.*asks for a number of its input.*torch\.where"
    ):
        independence.examine(pack, (6,), pack.values, 20, 0.0, lambda told: None)


ONE_HOT = made(between=lambda x: nn.functional.one_hot(x.argmax(-1), 6).to(x))


@pytest.mark.parametrize("model", [Constant, ONE_HOT])
def test_a_model_may_ask_for_its_own_numbers(model: Build) -> None:
    check_all(Pack(model, [0], PLACE), (6,))


def test_whole_numbers_are_not_spread() -> None:
    assert independence.spread_rows((3,), torch.zeros(1, dtype=torch.long)) == []


class Attention(nn.Module):
    """Mixes positions of one example only; ranks, normalises and reverses along its axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.view(-1, 3, 2))
        y = self.norm(torch.softmax(y @ y.transpose(1, 2), -1) @ y).sort(1)[0].flip(1)
        z: Tensor = self.last(y.max(1)[0])
        return z


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.MaxPool1d(2), nn.Flatten(), nn.PReLU(8), nn.Linear(8, 2),
    )  # fmt: skip


@pytest.mark.parametrize("build", [Model, Attention, cnn])
@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_that_keep_examples_apart_pass(build: Any, seeds: list[int], dtype: torch.dtype) -> None:
    pack = Pack(build, seeds, Placement(torch.device("cpu"), dtype))
    rows = independence.stand_in_rows((6,), pack.values)
    independence.check_outputs(pack, rows, (2,))
    check_all(pack, (6,))


def test_a_wide_deep_network_passes_in_float32() -> None:
    """Rounding is not taken for mixing."""

    def build() -> nn.Module:
        hidden = [module for _ in range(6) for module in (nn.Linear(300, 300), nn.ReLU())]
        return nn.Sequential(nn.Linear(200, 300), *hidden, nn.Linear(300, 10))

    pack = Pack(build, [0, 1], PLACE, trusted=True)
    check_all(pack, (200,))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.table(x.long()).mean(1))
        return y


def test_a_model_of_tokens_passes() -> None:
    check_all(Pack(Tokens, [0, 1], PLACE), (5,))


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (60,), (3, 32, 32)])
def test_stand_in_rows_are_zeros_and_ones_that_differ(shape: tuple[int, ...]) -> None:
    rows = independence.stand_in_rows(shape, torch.zeros((), dtype=torch.float64))
    assert rows.shape == (4, *shape) and rows.dtype == torch.float64
    assert set(rows.unique().tolist()) == {0.0, 1.0}
    sums = rows.flatten(1).sum(1).tolist()
    assert sums == sorted(sums) and len(set(sums)) >= min(4, 1 + rows[0].numel())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(6, 3), r"outputs of shape \(3,\) for one example; the data needs \(2,\)"),
        (lambda: nn.Sequential(nn.Linear(6, 2), nn.Unflatten(1, (2, 1))), r"outputs of shape \(2, 1\)"),
        (lambda: nn.Linear(5, 2), r"does not run on inputs of shape \(6,\), one at a time"),
        (
            lambda: nn.Sequential(nn.Linear(6, 2), nn.Flatten(0)),
            "for a batch of one example, the model gives outputs of shape",
        ),
    ],
)
def test_models_that_do_not_fit_the_data_are_refused(build: Build, message: str) -> None:
    pack = Pack(build, [0, 1], PLACE)
    with pytest.raises(ModelError, match=message):
        independence.check_outputs(pack, independence.stand_in_rows((6,), pack.values), (2,))


class Positions(Model):
    """Learns an embedding of positions, looked up once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(4, 6)

    def between(self, x: Tensor) -> Tensor:
        return x + self.place(torch.arange(4)).mean(0)


class TimeFirst(Model):
    """Puts time before the batch, so that a layer's first axis is no longer the examples."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x.view(len(x), -1, 6).transpose(0, 1)).mean(0))
        return y


@pytest.mark.parametrize("build", [Positions, TimeFirst])
@pytest.mark.parametrize("trials", [1, 4])
def test_a_layer_whose_first_axis_is_not_the_batch_passes(build: Build, trials: int) -> None:
    """Also where that axis happens to be as long as the batch: 4 positions, 4 rows."""
    pack = Pack(build, list(range(trials)), PLACE)
    size = 24 if build is TimeFirst else 6
    independence.check_examples_stay_apart(pack, independence.stand_in_rows((size,), pack.values))


def test_a_parameter_that_a_closure_keeps_is_refused() -> None:
    def build() -> nn.Module:
        made = Model()
        weight = made.last.weight
        made.between = lambda x: x + weight.sum()  # type: ignore[method-assign]
        return made

    with pytest.raises(ModelError, match="used outside of the module that holds it"):
        independence.check_first(Pack(build, [0], PLACE), independence.stand_in_rows((6,), torch.empty(0)))


def test_the_least_test_finds_a_millionth_of_a_mean() -> None:
    pack = Pack(made(between=lambda x: x - 1e-6 * x.mean(0)), [0], PLACE)
    with pytest.raises(ModelError, match="the loss of one example has a gradient in the rows of others"):
        independence.check_first(pack, independence.stand_in_rows((6,), torch.empty(0)))


def masked(x: Tensor) -> Tensor:
    """Takes a way of its own for rows without a zero; both give the same."""
    mask = x != 0
    return x if mask.all() else torch.where(mask, x, 0.0)


def test_a_question_whose_answer_does_not_matter_is_allowed() -> None:
    pack = Pack(made(before=masked), [0], PLACE)
    assert check_all(pack, (6,)).left == []
    (line,) = pack.session.passes.asked
    assert line.endswith("test_independence.py (`return x if mask.all() else torch.where(mask, x, 0.0)`)")


def test_tests_end_in_time_and_say_what_they_left_out() -> None:
    """The first test is made however short the time is."""
    pack, told = Pack(Model, [0], PLACE), list[str]()
    found = independence.examine(pack, (6,), pack.values, 20, 0.0, told.append)
    assert found.tried == told == ["two rows, alone and together"]
    assert "every row replaced" in found.left and "a batch of 20" in found.left
    assert check_all(pack, (6,)).tried == [*found.tried, *found.left]


def test_a_busy_machine_tries_as_much_as_an_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock on the wall runs on, by an hour between two looks at it, and the limit is a minute."""
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(hours))
    found = independence.examine(Pack(Model, [0], PLACE), (6,), torch.zeros(1), 20, 60.0, lambda told: None)
    assert not found.left and "batches of 8" in found.tried and found.seconds < 60


def test_rows_that_a_model_does_not_run_on_are_not_said_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independence, "runs_on", lambda pack, rows: False)
    found = check_all(Pack(Model, [0], PLACE), (6,))
    assert "batches of 8" in found.tried and "rows of fractions" not in [*found.tried, *found.left]
