"""Sums of compiled programs are those of `sum_clipped`, for every kind of layer, mask, bound and batch.

Most tests run the list of operations as it was written down (torch.compile's backend `eager`), which is our part of the
work; a few use the real compiler, which is slow to start.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpsgd_cli.clipping import compiling, run
from dpsgd_cli.clipping.compiling import Captured, Compiled
from dpsgd_cli.clipping.run import Clipping, Diagnostics, SumClipped, add_clipped_sums, sum_clipped
from dpsgd_cli.engine import models
from dpsgd_cli.engine.layers import WeightStandardisedConv2d, base
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import CnnModel, MlpModel
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.engine.tensors import Examples
from dpsgd_cli.errors import ModelError, RecipeError
from dpsgd_cli.methods.dp_sgd.batches import compiles
from dpsgd_cli.noise.run import NoiseSource
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from tests.engine.conftest import Build, Of

CPU = torch.device("cpu")

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler, as runtime.compile does"
)


def built(settings: Any, shape: tuple[int, ...]) -> Build:
    return lambda: models.builder(settings, shape, 3, Path())()


def residual() -> nn.Module:
    """A block of a wide residual network, whose two layers see the same input."""
    block = Of(
        lambda m, x: m.skip(y := m.norm(x).relu()) + m.conv(y),
        norm=nn.GroupNorm(2, 4), conv=WeightStandardisedConv2d(4, 4, 3, padding=1),
        skip=WeightStandardisedConv2d(4, 4, 1),
    )  # fmt: skip
    return nn.Sequential(block, nn.Flatten(), nn.Linear(64, 3))


NETWORKS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "mlp": (built(MlpModel(hidden=[5]), (4,)), (4,)),
    "cnn": (built(CnnModel(), (1, 14, 14)), (1, 14, 14)),
    "pools": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2, 1), nn.ReLU(inplace=True), nn.Flatten(),
                                    nn.Linear(27, 3)), (2, 6, 6)),
    "residual": (residual, (4, 4, 4)),
    "sequence": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Flatten(), nn.Linear(20, 3)),
                 (5, 3)),
    "fallback": (lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 3)), (4,)),
}  # fmt: skip


def pack_of(build: Build, dtype: torch.dtype = torch.float64) -> Pack:
    return Pack(build, [0, 1], Placement(CPU, dtype))


def batch_of(shape: tuple[int, ...], count: int, seed: int, masked: bool = False) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, count, *shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, count, generator=generator) < 0.6 if masked else None
    return x, torch.randint(0, 3, (2, count), generator=generator), mask


def bounds(layers: int, flat: bool) -> Clipping:
    return Clipping(torch.tensor([[0.3, 0.05]] * (1 if flat else layers), dtype=torch.float64), flat)


@pytest.mark.parametrize(
    ("name", "clips"),
    [
        (name, clips)
        for name in NETWORKS
        for clips in ("flat", "per-layer", "none")
        if clips == "flat" or name != "residual"
    ],
)
def test_programs_follow_new_batches_and_new_weights(name: str, clips: str) -> None:
    build, shape = NETWORKS[name]
    fast, slow, compiled = pack_of(build), pack_of(build), Compiled("eager")
    clipping = None if clips == "none" else bounds(len(fast.layers), clips == "flat")
    for seed, masked in enumerate([False, True, False, True]):
        batch = batch_of(shape, 4, seed, masked)
        losses, squares = compiled(fast, batch, cross_entropy, clipping)
        wanted, norms = sum_clipped(slow, batch, cross_entropy, clipping)
        torch.testing.assert_close(fast.sums, slow.sums, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(losses, wanted)
        assert (squares is None) == (norms is None)
        if squares is not None and norms is not None:
            torch.testing.assert_close(squares, norms)
        for pack in (fast, slow):
            pack.values.sub_(0.5 * pack.sums)
        assert bool(slow.sums.any())


def test_copies_of_an_example_are_one_example() -> None:
    build, shape = NETWORKS["cnn"]
    fast, slow = pack_of(build), pack_of(build)
    x, y, _ = batch_of(shape, 6, 0)
    batch = (x, y[:, :2], torch.tensor([[True, True], [True, False]]))
    Compiled("eager")(fast, batch, cross_entropy, bounds(len(fast.layers), True))
    sum_clipped(slow, batch, cross_entropy, bounds(len(slow.layers), True))
    torch.testing.assert_close(fast.sums, slow.sums, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_compiler)])
def test_examples_that_are_not_finite_add_nothing(backend: str, clips: bool) -> None:
    """The program is written down on finite rows; what it meets later is not. Unclipped, masked rows are erased."""
    build, shape = NETWORKS["cnn" if backend == "eager" else "sequence"]
    pack, alone, compiled = pack_of(build), pack_of(build), Compiled(backend)
    clipping = bounds(len(pack.layers), True) if clips else None
    x, y, _ = batch_of(shape, 3, 0)
    mask = torch.tensor([[True, True, True], [True, True, True]])
    compiled(pack, (x, y, mask), cross_entropy, clipping)
    pack.sums.zero_()
    bad = x.clone()
    bad[0, 1, 0, 0], bad[1, 1, -1, -1] = torch.inf, torch.nan
    kept = mask.clone()
    kept[:, 1] = False
    compiled(pack, (bad, y, mask if clips else kept), cross_entropy, clipping)
    sum_clipped(alone, (x, y, kept), cross_entropy, clipping)
    assert bool(pack.sums.isfinite().all())
    torch.testing.assert_close(pack.sums, alone.sums, rtol=1e-9, atol=1e-12)


@needs_compiler
def test_noise_is_new_at_every_step() -> None:
    """Equal batches and weights: what differs between steps is the noise, and it is that of the step."""
    build, shape = NETWORKS["mlp"]
    pack, compiled, batch = pack_of(build), Compiled(), batch_of(shape, 4, 0)
    streams = [SeededStreams(0), SeededStreams(1)]
    noise, alone = (NoiseSource(streams, pack.size, CPU, torch.float64) for _ in range(2))
    clipping = bounds(len(pack.layers), True)
    compiled(pack, batch, cross_entropy, clipping)
    exact, released = pack.sums.clone(), []
    for step in range(80):
        pack.sums.zero_()
        compiled(pack, batch, cross_entropy, clipping)
        pack.sums.add_(noise.draw(step))
        torch.testing.assert_close(pack.sums - exact, alone.draw(step))
        released.append(pack.sums.clone())
    drawn = torch.stack(released) - exact
    assert len({float(value) for value in drawn.flatten()}) == drawn.numel()


def repeated(layer: nn.Module) -> nn.Module:
    """One layer called on two halves of the input, whose outputs are subtracted: the gradients nearly cancel."""

    def run(model: Any, x: Tensor) -> Tensor:
        one, two = x.tanh().chunk(2, dim=1)
        y: Tensor = model.layer(one * 1e4) - model.layer(two * 1e4)
        return y

    return Of(run, layer=layer)


@needs_compiler
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: repeated(nn.Conv2d(4, 12, 3)), (4, 6, 6)),
        (lambda: repeated(WeightStandardisedConv2d(4, 8, 3)), (4, 6, 6)),
        (lambda: repeated(shift(4, 8)), (4, 8)),
    ],
    ids=["conv2d", "standardised", "own"],
)
def test_what_is_added_keeps_the_bound_where_terms_cancel(build: Build, shape: tuple[int, ...]) -> None:
    """A compiler may order additions anew, in the norm and in the sum."""
    pack, compiled = Pack(build, [0], Placement(CPU)), Compiled()

    def total(y: Tensor, labels: Tensor) -> Tensor:
        return y.flatten(2).sum(dim=2)

    for seed in range(20):
        half = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        rows = (torch.cat([half, half * (1 + 1e-7)])[None, None], torch.zeros(1, 1), None)
        pack.sums.zero_()
        compiled(pack, rows, total, Clipping(torch.ones(1, 1)))
        assert float(pack.sums.double().norm()) <= 1 + 1e-4


@needs_compiler
def test_norms_and_sums_are_of_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sine and its derivative are computed once, and read where norms are taken and where sums are.

    Two kernels that compute them may differ in the last bit, by a fused multiply-add or by another library function,
    and that bit is all there is of a derivative near zero. Left to itself the compiler computes each several times.
    """
    from torch._inductor.utils import run_and_get_code

    def kernels() -> list[int]:
        pack = Pack(
            lambda: nn.Sequential(nn.Linear(20, 33), Of(lambda m, x: x.sin()), nn.Linear(33, 3)), [0], Placement(CPU)
        )
        x, y, _ = batch_of((20,), 9, 0)
        rows = (x[:1].float(), y[:1], None)
        torch._dynamo.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(Compiled(), pack, rows, cross_entropy, Clipping(torch.ones(1, 1)))
        # a loop is written twice, for whole vectors and for the rest
        loops = [part for code in codes for part in code.split("for(int64_t x0=")]
        return [sum(f"{function}(" in part for part in loops) for function in ("sin", "cos")]

    assert kernels() == [1, 1]
    monkeypatch.setattr(base, "stored", lambda x: x)
    assert kernels()[1] > 1


@needs_compiler
def test_rounded_numbers_are_the_same_in_norms_and_sums() -> None:
    """Where a compiler took a number before it was rounded, the two would differ by some 2^-9."""
    pack, compiled = Pack(wide, [0], Placement(CPU)), Compiled()
    pack.work_in(torch.bfloat16)
    x = torch.randn(20, 1, 1, 20, generator=torch.Generator().manual_seed(0))
    for row in x:
        pack.sums.zero_()
        compiled(
            pack, (row, torch.zeros(1, 1, dtype=torch.long), None), cross_entropy, Clipping(torch.full((1, 1), 0.01))
        )
        assert 0.01 * (1 - 1e-4) <= float(pack.sums.norm()) <= 0.01 * (1 + 1e-6)


def shift(*shape: int) -> nn.Module:
    """A parameter that a module adds by itself."""
    return Of(lambda m, x: x + m.value, value=nn.Parameter(torch.rand(shape)))


def wide() -> nn.Module:
    """Layers whose inputs and gradients are made by single numbers, which a compiler fuses with what reads them."""
    first, last = nn.Linear(20, 33), nn.Linear(33, 3)
    return nn.Sequential(first, nn.Tanh(), shift(33), nn.GELU(), last)


def test_an_epoch_afterwards_finds_the_pack_as_it_was() -> None:
    """Tracing binds layers to other tensors for a while."""
    build, shape = NETWORKS["residual"]
    pack, other = pack_of(build), pack_of(build)
    Compiled("eager")(pack, batch_of(shape, 4, 0), cross_entropy, None)
    assert not any(layer.inputs or layer.gradients for layer in pack.members)
    for one in (pack, other):
        one.sums.zero_()
        add_clipped_sums(one, batch_of(shape, 3, 1), cross_entropy, None, Diagnostics(2, CPU))
    assert torch.equal(pack.sums, other.sums)


def test_shapes_beyond_the_most_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_MOST_PROGRAMS", 2)
    build, shape = NETWORKS["mlp"]
    pack, other, compiled = pack_of(build), pack_of(build), Compiled("eager")
    for count in (1, 2, 3, 4, 3):
        compiled(pack, batch_of(shape, count, count), cross_entropy, None)
        sum_clipped(other, batch_of(shape, count, count), cross_entropy, None)
    torch.testing.assert_close(pack.sums, other.sums)
    assert len(compiled._programs) == 2


ASKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "decides by a number of the batch": lambda m, x: x if float(x.detach().abs().max()) > 1e-9 else 2 * x,
    "scales by the largest number, by way of Python": lambda m, x: torch.stack(
        [row * max(values) for row, values in zip(x, x.tolist(), strict=True)]
    ),
    "scales by how many numbers are positive": lambda m, x: torch.stack([r * len(torch.nonzero(r > 0)) for r in x]),
    "scales by the largest number, by way of NumPy": lambda m, x: (
        x * torch.from_numpy(x.detach().numpy().max(axis=1, keepdims=True).copy())
    ),
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_what_cannot_be_compiled_is_refused_and_nothing_is_added(asks: Callable[[Any, Tensor], Tensor]) -> None:
    """Were it not, numbers of the first batch would decide how later ones are treated, and no bound would hold."""
    build, shape = (lambda: nn.Sequential(nn.Linear(4, 3), Of(asks))), (4,)
    pack = pack_of(build)
    with pytest.raises(ModelError, match=r"asks for a number of its input|depends on the input"):
        Compiled("eager")(pack, batch_of(shape, 2, 0), cross_entropy, None)
    assert not pack.sums.any()


@pytest.mark.parametrize("trials", [1, 2])
def test_one_program_serves_pieces_of_batches_of_any_width(trials: int) -> None:
    """The first 4 columns of masks drawn ahead: as wide as the largest batch, which changes from epoch to epoch."""
    build, shape = NETWORKS["cnn"]
    pack, other = (Pack(build, list(range(trials)), Placement(CPU, torch.float64)) for _ in range(2))
    compiled = Compiled("eager")
    for width in range(4, 16):
        x, y, mask = (part[:trials] for part in batch_of(shape, width, width, masked=True) if part is not None)
        piece = (x[:, :4], y[:, :4], mask[:, :4])
        compiled(pack, piece, cross_entropy, None)
        sum_clipped(other, piece, cross_entropy, None)
    torch.testing.assert_close(pack.sums, other.sums)


def test_what_a_model_keeps_is_there_afterwards() -> None:
    """What it needs for a shape is made when it first meets it."""
    kept: dict[int, Tensor] = {}

    def run(model: Any, x: Tensor) -> Tensor:
        return x + kept.setdefault(len(x), torch.arange(x.shape[1], dtype=x.dtype))

    pack = pack_of(lambda: nn.Sequential(nn.Linear(4, 3), Of(run)))
    batch = batch_of((4,), 5, 0)
    Compiled("eager")(pack, batch, cross_entropy, None)
    assert bool(pack(batch[0]).isfinite().all())


def test_bounds_of_another_kind_get_a_program_of_their_own() -> None:
    build, shape = NETWORKS["mlp"]
    pack, other, compiled = pack_of(build), pack_of(build), Compiled("eager")
    for flat in (False, True):
        clipping = Clipping(torch.tensor([[0.3, 0.05]], dtype=torch.float64), flat)
        compiled(pack, batch_of(shape, 4, 0), cross_entropy, clipping)
        sum_clipped(other, batch_of(shape, 4, 0), cross_entropy, clipping)
    torch.testing.assert_close(pack.sums, other.sums)


@pytest.mark.parametrize("name", NETWORKS)
def test_rounded_programs_follow_new_weights(name: str) -> None:
    build, shape = NETWORKS[name]
    packs = [pack_of(build, torch.float32) for _ in range(2)]
    functions: list[SumClipped] = [Compiled("eager"), sum_clipped]
    clipping = Clipping(torch.tensor([[0.3, 0.05]]))
    for pack in packs:
        pack.work_in(torch.bfloat16)
    for seed in range(2):
        x, y, mask = batch_of(shape, 4, seed, masked=True)
        for pack, function in zip(packs, functions, strict=True):
            pack.sums.zero_()
            function(pack, (x.float(), y, mask), cross_entropy, clipping)
            pack.values.sub_(0.5 * pack.sums)
        torch.testing.assert_close(packs[0].sums, packs[1].sums, rtol=1e-5, atol=1e-6)


def test_a_program_cannot_round_products_of_passes_alone() -> None:
    pack = Pack(NETWORKS["mlp"][0], [0, 1], Placement(CPU))
    pack.work_in(None, rounded_products=True)
    x, y, _ = batch_of((4,), 2, 0)
    with pytest.raises(ModelError, match="round the products"):
        Compiled("eager")(pack, (x.float(), y, None), cross_entropy, None)


@pytest.mark.parametrize(
    "changes",
    [
        ("method.batching=poisson",),
        ("method.batching=shuffle", "privacy.adjacency=zero-out", "method.batch_size=100"),
        ("method.batching=poisson", "runtime.micro_batch=50"),
    ],
    ids=["poisson", "a smaller last batch", "pieces"],
)
def test_a_training_is_one_program(changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Compiled] = []

    class Counted(Compiled):
        def __init__(self) -> None:
            super().__init__("eager")
            made.append(self)

    monkeypatch.setattr(compiling, "Compiled", Counted)
    loop.run(
        resolve_auto(load_recipe("quickstart", ("runtime.compile=true", "repeats=2", "epochs=2", *changes))),
        loop.Options(tmp_path),
    )
    assert [len(one._programs) for one in made] == [1]


def test_what_need_not_be_compiled_runs_as_it_is() -> None:
    build, shape = NETWORKS["mlp"]
    pack, other, batch = pack_of(build), pack_of(build), batch_of(shape, 2, 0)
    compiled = Compiled("a compiler that is not there", required=False)
    for _ in range(2):
        compiled(pack, batch, cross_entropy, None)
        sum_clipped(other, batch, cross_entropy, None)
    assert torch.equal(pack.sums, other.sums) and bool(pack.sums.any())


@pytest.mark.parametrize(
    ("wanted", "device", "epochs", "found"),
    [
        ("auto", "cuda", 2, True), ("auto", "cuda", 1, False), ("auto", "cpu", 10**6, False),
        (True, "cpu", 1, True), (False, "cuda", 10**6, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [10**6, 10**8])
def test_auto_captures_small_steps_on_a_gpu(size: int, wanted: Any, device: str, epochs: int, found: bool) -> None:
    """Ten batches of 300 make an epoch of 3,000 records. Padding of rounded batches is there anyway."""
    recipe = load_recipe("quickstart", ("method.batch_size=300",)).recipe
    recipe = recipe.changed(runtime=recipe.runtime.changed(compile=wanted))
    session = SimpleNamespace(rounds=False)
    pack = SimpleNamespace(values=SimpleNamespace(is_cuda=device == "cuda"), session=session, size=size)
    context: Any = SimpleNamespace(recipes=[recipe], table=range(3000), team=SimpleNamespace(size=1), pack=pack)
    assert compiles(context, epochs) is (found and (size < 10**8 or wanted is True))
    session.rounds = True
    assert compiles(context, epochs) is found


@needs_compiler
def test_a_recipe_trains_the_same_weights(tmp_path: Path) -> None:
    found = {}
    for compiled in ("false", "true"):
        changes = (f"runtime.compile={compiled}", "repeats=2", "epochs=2")
        where = loop.run(resolve_auto(load_recipe("quickstart", changes)), loop.Options(tmp_path / compiled))
        found[compiled] = store.read_document(where)
    assert found["true"]["privacy"] == found["false"]["privacy"]
    losses = [found[compiled]["metrics"]["test_loss"]["mean"] for compiled in ("false", "true")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("lee2018/dp-agd", (), "not those of dp-agd"),
        ("quickstart", ("runtime.dtype=tf32",), "use auto, bfloat16 or float32"),
    ],
)
def test_what_has_no_compiled_steps_is_refused(name: str, changes: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        load_recipe(name, ("runtime.compile=true", *changes))


class _Kernels(TorchDispatchMode):
    """What CUDA captures: operations on given memory, without the code that asked for them; no look at a number."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func == torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        if asks or func == torch.ops.aten.nonzero.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        if "empty" not in str(func):
            self.ran.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.ran:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _captured(step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    with _Kernels() as kernels:
        found = step()
    return found, kernels.replay


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """Graphs without a GPU; there, too, nobody asks whether rows are finite."""
    monkeypatch.setattr(compiling, "_graph_of", _captured)
    monkeypatch.setattr(run, "_surely_finite", lambda pack, x: False)
    return Captured()


@pytest.mark.parametrize("clips", ["flat", "per-layer", "none"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_captured_steps_follow_new_batches_bounds_and_weights(
    name: str, clips: str, dtype: torch.dtype | None, capturing: Captured
) -> None:
    build, shape = NETWORKS[name]
    packs = [pack_of(build, torch.float64 if dtype is None else torch.float32) for _ in range(2)]
    for pack in packs:
        pack.work_in(dtype)
    for seed in range(4):
        x, y, mask = batch_of(shape, 4, seed, masked=True)
        batch = (x.to(packs[0].values.dtype), y, mask)
        clipping = None if clips == "none" else bounds(len(packs[0].layers), clips == "flat")
        if clipping is not None:
            norms = (clipping.norms / (1 + seed)).to(packs[0].values.dtype)
            clipping = replace(clipping, norms=norms)
        losses, squares = capturing(packs[0], batch, cross_entropy, clipping)
        wanted, norms_wanted = sum_clipped(packs[1], batch, cross_entropy, clipping)
        torch.testing.assert_close(packs[0].sums, packs[1].sums, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(losses, wanted)
        assert (squares is None) == (norms_wanted is None)
        assert squares is None or norms_wanted is None or torch.allclose(squares, norms_wanted, rtol=1e-4)
        for pack in packs:
            pack.values.sub_(0.5 * pack.sums)
        assert bool(packs[1].sums.any())
    assert [program is not None for program in capturing._programs.values()] == [True]


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_what_asks_for_a_number_is_not_captured(asks: Callable[[Any, Tensor], Tensor], capturing: Captured) -> None:
    pack = pack_of(lambda: nn.Sequential(nn.Linear(4, 3), Of(asks)))
    with pytest.raises(ModelError):
        capturing._made(pack, batch_of((4,), 2, 0), cross_entropy, None)
    assert not pack.sums.any()


def test_a_graph_of_other_sums_is_not_used(capturing: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one forgot to read the rows that it is given."""
    build, shape = NETWORKS["mlp"]
    pack, other, batch = pack_of(build), pack_of(build), batch_of(shape, 4, 0)

    def deaf(step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        before = pack.sums.clone()
        found, moved = step(), pack.sums - before

        def replay() -> None:
            pack.sums.add_(moved)

        return found, replay

    monkeypatch.setattr(compiling, "_graph_of", deaf)
    with pytest.raises(ModelError, match="adds other sums"):
        capturing._made(pack, batch, cross_entropy, None)
    capturing(pack, batch, cross_entropy, None)
    sum_clipped(other, batch, cross_entropy, None)
    assert torch.equal(pack.sums, other.sums)


def test_what_a_failed_capture_has_recorded_is_not_added(capturing: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = NETWORKS["mlp"]
    pack, other, batch = pack_of(build), pack_of(build), batch_of(shape, 4, 0)

    def stopped(step: Callable[[], Any]) -> Any:
        run.record_pass(pack, batch[0], batch[1], cross_entropy)
        raise RuntimeError("capturing ended")

    monkeypatch.setattr(compiling, "_graph_of", stopped)
    capturing(pack, batch, cross_entropy, None)
    sum_clipped(other, batch, cross_entropy, None)
    assert torch.equal(pack.sums, other.sums)
