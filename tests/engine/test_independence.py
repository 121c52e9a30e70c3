"""Models whose gradients would not be those of the module as it was written, and models that only seem so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine import independence
from dpsgd_cli.engine.apart import _Operations
from dpsgd_cli.engine.layers import Linear
from dpsgd_cli.engine.named_inputs import NamedInputs
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.errors import ModelError
from tests.engine.conftest import Case

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


class Remembering(Model):
    """Subtracts a running mean of everything it saw."""

    mean: Any = 0.0

    def between(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean


MIXING: dict[str, Build] = {
    "centred": made(before=lambda x: x - x.mean(0)),
    "centred late": CentredLate,
    "slightly centred": made(between=lambda x: x - 1e-6 * x.detach().mean(0)),  # only outputs tell
    "rows alike: only the gradient tells": made(between=lambda x: 1 + 1e-6 * (x - 1e-6 * x.mean(0))),
    "sums from the first row on": made(between=lambda x: x.cumsum(0)),
    "recurrent": FrozenRecurrent,
    "reversed": made(before=lambda x: x.flip(0)),
    "steps at the median": made(between=lambda x: x + (x > x.median(0)[0]).to(x)),
    "remembering": Remembering,
    "divided by the number of rows": made(before=lambda x: x / len(x)),
    "softmax over examples": made(between=lambda x: torch.softmax(x, dim=0)),
    "random": made(between=nn.functional.dropout),
}


@pytest.mark.parametrize("model", MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
def test_models_that_mix_examples_are_refused(model: Build, seeds: list[int]) -> None:
    """Also a millionth of the batch's mean, and a layer that starts at zero; the weights are put back."""
    pack = Pack(model, seeds, PLACE)
    before = pack.values.clone()
    with pytest.raises(ModelError, match=r"mixes examples.*over the batch axis"):
        independence.check_model(pack, (6,), pack.values)
    assert torch.equal(pack.values, before)
    assert not pack.session.recording and not any(layer.inputs for layer in pack.members)


class MovingAverage(Model):
    """Moves a layer's weights towards what they are called with, as a codebook's moving average does, in training."""

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.last.weight.data.lerp_(x.detach().expand(2, 6), 0.01)
        return x


def test_a_weight_that_a_pass_changes_in_place_is_refused() -> None:
    with pytest.raises(ModelError, match="changes a trained parameter in place"):
        independence.check_model(Pack(MovingAverage, [0], PLACE), (6,), torch.empty(0))


class Constant(Model):
    """Decides in Python by a number of its own."""

    limit: Tensor

    def __init__(self) -> None:
        super().__init__(before=lambda x: x / 2 if self.limit > 1 else x)
        self.register_buffer("limit", torch.tensor(2.0))


ASKING: dict[str, Build] = {
    "if": made(before=lambda x: x / 255 if x.max() > 1e6 else x),
    "equal": made(between=lambda x: x if torch.equal(x, x.sort(1)[0]) else 2 * x),
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
        independence.check_model(pack, (6,), pack.values)


ONE_HOT = made(between=lambda x: nn.functional.one_hot(x.argmax(-1), 6).to(x))


@pytest.mark.parametrize("model", [Constant, ONE_HOT])
def test_a_model_may_ask_for_its_own_numbers(model: Build) -> None:
    independence.check_model(Pack(model, [0], PLACE), (6,), torch.empty(0))


class SortedByLength(Model):
    """Sorts rows by their sum, runs a layer, and puts them back: every example alone is itself."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort(descending=True)
        y: Tensor = self.last(torch.tanh(self.first(x[order]))[order.argsort()])
        return y


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


@pytest.mark.parametrize("build", [Model, Attention, cnn, SortedByLength])
@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_that_keep_examples_apart_pass(build: Any, seeds: list[int], dtype: torch.dtype) -> None:
    pack = Pack(build, seeds, Placement(torch.device("cpu"), dtype))
    rows = independence.stand_in_rows((6,), pack.values)
    independence.check_outputs(pack, rows, (2,))
    independence.check_model(pack, (6,), pack.values)


def test_a_wide_deep_network_passes_in_float32() -> None:
    """Rounding is not taken for mixing."""

    def build() -> nn.Module:
        hidden = [module for _ in range(6) for module in (nn.Linear(300, 300), nn.ReLU())]
        return nn.Sequential(nn.Linear(200, 300), *hidden, nn.Linear(300, 10))

    pack = Pack(build, [0, 1], PLACE, trusted=True)
    independence.check_model(pack, (200,), pack.values)


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (60,), (3, 32, 32)])
def test_stand_in_rows_are_zeros_and_ones_that_differ(shape: tuple[int, ...]) -> None:
    rows = independence.stand_in_rows(shape, torch.zeros((), dtype=torch.float64))
    assert rows.shape == (4, *shape) and rows.dtype == torch.float64
    assert set(rows.unique().tolist()) == {0.0, 1.0}
    sums = rows.flatten(1).sum(1).tolist()
    assert sums == sorted(sums) and len(set(sums)) >= min(4, 1 + rows[0].numel())


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
    independence.check_model(pack, (size,), pack.values)


def test_a_parameter_that_a_closure_keeps_is_refused() -> None:
    def build() -> nn.Module:
        made = Model()
        weight = made.last.weight
        made.between = lambda x: x + weight.sum()  # type: ignore[method-assign]
        return made

    with pytest.raises(ModelError, match="used outside of the module that holds it"):
        independence.check_model(Pack(build, [0], PLACE), (6,), torch.empty(0))


def masked(x: Tensor) -> Tensor:
    """Takes a way of its own for rows without a zero; both give the same."""
    mask = x != 0
    return x if mask.all() else torch.where(mask, x, 0.0)


def test_a_question_whose_answer_does_not_matter_is_allowed() -> None:
    pack = Pack(made(before=masked), [0], PLACE)
    independence.check_model(pack, (6,), pack.values)
    (line,) = pack.session.passes.asked
    assert line.endswith("test_independence.py (`return x if mask.all() else torch.where(mask, x, 0.0)`)")


def hooked(change: Callable[[Any], object]) -> Build:
    def build() -> nn.Module:
        made = Model()
        change(made)
        return made

    return build


def reversing(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda d: -d)
    return x


def through_the_graph(x: Tensor) -> Tensor:
    if x.grad_fn is not None:
        x.grad_fn.register_hook(lambda given, found: (-given[0],))
    return x


HOOKS: dict[str, tuple[Build, str]] = {
    "of a parameter": (hooked(lambda m: m.first.weight.register_hook(lambda d: d * 0)), "'first': weight has a hook"),
    "after a parameter's sum": (
        hooked(lambda m: m.first.bias.register_post_accumulate_grad_hook(lambda p: None)), "'first': bias has a hook"),
    "of a module": (hooked(lambda m: m.last.register_full_backward_hook(lambda m, d, e: None)), "layer 'last': a hook"),
    "before a module": (hooked(lambda m: m.register_full_backward_pre_hook(lambda m, d: None)), "the model: a hook"),
    "of a tensor": (made(between=reversing), r"line \d+ of test_independence.py \(`x.register_hook"),
    "of the graph": (made(between=through_the_graph), r"line \d+ of test_independence.py \(`if x.grad_fn"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "named"), HOOKS.values(), ids=HOOKS)
def test_hooks_of_gradients_are_refused_by_name(build: Build, named: str) -> None:
    with pytest.raises(ModelError, match=rf"{named}.*changes gradients after they were computed"):
        independence.check_model(Pack(build, [0], PLACE), (6,), torch.empty(0))


def test_hooks_of_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda m, d, e: None)
    try:
        with pytest.raises(ModelError, match="a hook changes gradients"):
            Pack(Model, [0], PLACE)
    finally:
        handle.remove()


def test_complex_parameters_are_refused() -> None:
    def build() -> nn.Module:
        made = Model()
        made.phase = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        return made

    with pytest.raises(ModelError, match=r"phase is complex; .* torch.view_as_complex"):
        Pack(build, [0], PLACE)


class Halved(torch.autograd.Function):
    """Half of a gradient where code runs under vmap, and all of it elsewhere: an operation with a false gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.share = 0.5 if torch._C._functorch.maybe_current_level() is not None else 1.0

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        return d * ctx.share


def test_a_gradient_that_is_not_the_modules_is_refused() -> None:
    pack = Pack(made(between=Halved.apply), [0], PLACE)
    with pytest.raises(ModelError, match=r"first.weight: one example's gradient is 50.0% off"):
        independence.check_model(pack, (6,), pack.values)


def test_a_norm_below_the_truth_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Linear.square_norms
    monkeypatch.setattr(Linear, "square_norms", lambda layer: true(layer) * 0.9)
    pack = Pack(Model, [0], PLACE)
    with pytest.raises(ModelError, match="and clipping would take it for"):
        independence.check_model(pack, (6,), pack.values)


def test_rounding_is_no_reason_to_refuse_but_for_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 outputs are a hundredth off; a norm that is short in float32 alone is refused all the same."""
    build = made(between=lambda x: (x + 3e5) - 3e5)
    independence.check_model(Pack(build, [0], PLACE), (6,), torch.empty(0))
    true = Linear.square_norms
    monkeypatch.setattr(
        Linear, "square_norms", lambda layer: true(layer) * (0.9 if layer.session.exact == torch.float32 else 1)
    )
    with pytest.raises(ModelError, match="and clipping would take it for"):
        independence.check_model(Pack(build, [0], PLACE), (6,), torch.empty(0))


@pytest.mark.parametrize("short_in_training", [True, False])
def test_a_norm_is_compared_with_and_without_the_noise_of_training(
    monkeypatch: pytest.MonkeyPatch, short_in_training: bool
) -> None:
    true = Linear.square_norms
    monkeypatch.setattr(
        Linear, "square_norms", lambda layer: true(layer) * (0.9 if layer.training == short_in_training else 1)
    )
    pack = Pack(made(between=lambda x: x + torch.randn_like(x)), [0], PLACE)
    with pytest.raises(ModelError, match="and clipping would take it for"):
        independence.check_model(pack, (6,), pack.values)


class Table(nn.Module):
    """Looks tokens up in `table(self)`, a table that it computes from its own, with `options`."""

    def __init__(self, table: Callable[[Any], Tensor], height: int, **options: Any) -> None:
        super().__init__()
        self.table, self.options = table, options
        self.weight, self.low = nn.Parameter(torch.randn(height, 3)), nn.Parameter(torch.randn(height, 1))
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(F.embedding(x.long(), self.table(self), **self.options)).sum(1))
        return y


class Own(nn.Embedding):
    """An embedding whose code looks up with options of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x.long(), self.weight, padding_idx=2)


TABLES: dict[str, Callable[[Any], Tensor]] = {
    "own": lambda m: m.weight,
    "scaled": lambda m: 2 * m.weight,
    "normalised": lambda m: F.normalize(m.weight, dim=1),
    "low rank added": lambda m: m.weight + m.low.expand(-1, 3),
}


@pytest.mark.parametrize("padding", [None, 0, 2, 5, -1])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_tables_that_a_model_computes_leave_padding_out_for_every_example(table: Any, padding: int | None) -> None:
    """The first row has no padding token 2, 5 or 6, the others have; torch's vmap masks the first row's only."""
    x = torch.tensor([[[0, 1, 3], [5, 2, 6], [6, 0, 2], [2, 2, 5]]])
    torch.manual_seed(0)
    model = Table(table, 7, padding_idx=padding)
    Case(lambda: copy.deepcopy(model), x, torch.zeros(1, 4), norms=(0.5,)).check()
    independence.check_model(Pack(lambda: copy.deepcopy(model), [0], PLACE), (3,), x)


def test_a_subclass_of_an_embedding_has_the_options_of_its_code() -> None:
    x = torch.tensor([[[0, 1, 3], [2, 2, 1]]])
    model = nn.Sequential(Own(4, 3, padding_idx=1), nn.Flatten(), nn.Linear(9, 2))
    Case(lambda: copy.deepcopy(model), x, torch.zeros(1, 2), norms=(0.5,)).check()


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_lookups_that_depend_on_the_batch_are_refused(option: Any) -> None:
    with pytest.raises(ModelError, match="max_norm and scale_grad_by_freq have no private rule"):
        Pack(lambda: Table(TABLES["own"], 4, **option), [0], PLACE)(torch.zeros(1, 2, 3, dtype=torch.long))


@pytest.mark.parametrize("padding", [2, 5, -1])
def test_a_false_gradient_of_some_tokens_is_found(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    """With torch's own rule for `padding_idx`, rows with tokens 0 and 1 are right, and those with padding are not."""
    monkeypatch.setattr(_Operations, "_embedding", lambda self, *given, **options: F.embedding(*given, **options))
    pack = Pack(lambda: Table(TABLES["scaled"], 7, padding_idx=padding), [0], PLACE)
    with pytest.raises(ModelError, match=r"weight: one example's gradient is .* off"):
        independence.check_model(pack, (12,), torch.empty(0))


@pytest.mark.parametrize("like", [torch.empty(0), torch.empty(0, dtype=torch.long)])
def test_rows_are_of_the_whole_vocabulary(like: Tensor) -> None:
    pack = Pack(lambda: Table(TABLES["own"], 9, padding_idx=7), [0], PLACE)
    rows = independence.Written(pack).rows((40,), like)
    assert set(rows.unique().tolist()) == set(range(9))


def test_a_padding_token_of_a_large_vocabulary_is_in_more_than_the_first_row() -> None:
    """It would be in a row of 16 random tokens with probability 2e-4."""
    pack = Pack(lambda: Table(TABLES["own"], 90_000, padding_idx=70_000), [0], PLACE)
    rows = independence.Written(pack).rows((16,), torch.empty(0))
    assert bool((rows == 70_000).any(dim=1).all())


def test_named_arrays_have_tokens_of_their_own() -> None:
    """A mask stays a mask, where a larger number would do no harm; words are of the whole vocabulary."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(11, 3), nn.Linear(3, 2)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.last((self.table(words) * mask.unsqueeze(-1)).sum(1))
            return y

    shapes = {"mask": (30,), "words": (30,)}
    pack = Pack(lambda: NamedInputs(Words(), shapes, frozenset(shapes)), [0], PLACE)
    mask, words = independence.Written(pack).rows((60,), torch.empty(0)).split(30, dim=1)
    assert set(mask.unique().tolist()) == {0.0, 1.0} and set(words.unique().tolist()) == set(range(11))
    independence.check_model(pack, (60,), torch.empty(0))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (lambda x: torch.select_scatter(x, x[:, 0], 1, 1), "select_scatter has no gradient of one example"),
        (lambda x: x.select_scatter(2 * x[:, 0], 1, 1), "select_scatter has no gradient of one example"),
    ],
)
def test_functions_with_a_wrong_gradient_are_refused(code: Any, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        independence.check_model(Pack(made(between=code), [0], PLACE), (6,), torch.empty(0))


def test_a_model_that_names_float32_is_tested_in_float64() -> None:
    """Otherwise a millionth of a mean could not be told from rounding."""
    pack = Pack(made(between=lambda x: x.float() - 1e-6 * x.mean(0).float()), [0], PLACE)
    with pytest.raises(ModelError, match="an example's outputs change with the batch around it"):
        independence.check_model(pack, (6,), pack.values)


def test_a_model_that_does_not_run_in_float64_is_tested_in_float32() -> None:
    def failing(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no float64")
        return x

    pack = Pack(made(between=failing), [0], PLACE)
    independence.check_model(pack, (6,), pack.values)


BANK: list[Tensor] = []


def keeping() -> Build:
    held: list[Tensor] = []

    def between(x: Tensor) -> Tensor:
        held.append(x.detach())
        return x

    return made(between=between)


def kept_raw(x: Tensor) -> Tensor:
    BANK.append(x)
    return x


@pytest.mark.parametrize("build", [keeping(), made(before=kept_raw)], ids=["closure", "global"])
def test_a_tensor_that_is_kept_anywhere_is_refused(build: Build) -> None:
    """Nothing of it changes an output, now; torch would take it for the next pass's examples."""
    with pytest.raises(ModelError, match="a tensor is kept after the pass that computed it"):
        independence.check_model(Pack(build, [0], PLACE), (6,), torch.empty(0))
    BANK.clear()
