"""Clipped sums as one program: compiled (`runtime.compile: true`), or captured as a CUDA graph (`Captured`).

A compiled step (forward, backward, norms, clip factors, sums) is traced once for each shape of batch, as one flat list
of tensor operations, which `torch.compile` fuses. Inputs of the program are weights, bounds and rows; outputs are sums,
losses and squared norms. A program has no randomness and no state between steps: noise is drawn and added outside, and
was charged before its epoch began. On a GPU, torch captures the program's graph.

Clipping stays equally strict. The operations are those of `sum_clipped`, and norms include a margin for rounding errors
between sums and norms that are computed differently (`layers/base.py`). A compiler may reorder additions. It might also
compute a layer's input or gradient once for the norm and again for the sum, or round it to fewer bits for one and not
for the other; where terms cancel (a derivative near zero), the result is all rounding error, and the two may differ.
So what is recorded of a layer, and whatever else norms and sums both read, goes through an operator that no compiler
looks into (`Session.stored`): its numbers are in memory, as short as they were recorded, and every reader reads these.
Only `tf32` is refused: one setting rounds all products of a compiled program, also those of norms and sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dpsgd_cli.clipping.run import Clipping, Found, sum_clipped
from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.tensors import Examples
from dpsgd_cli.errors import ModelError

_Program = Callable[[Examples, Clipping | None], Found]

_MOST_PROGRAMS = 8


class Compiled:
    """Replacement for `sum_clipped` with a compiled program per shape of batch; after 8 shapes, others run uncompiled.

    `backend` is a backend of torch.compile. A step that cannot be traced or compiled runs uncompiled; if compiling is
    `required`, it raises ModelError.
    """

    def __init__(self, backend: str = "inductor", required: bool = True) -> None:
        self._backend, self._required = backend, required
        self._programs: dict[tuple[object, ...], _Program | None] = {}

    @torch.no_grad()
    def __call__(self, pack: Pack, rows: Examples, loss: Loss, clipping: Clipping | None) -> Found:
        """Add the clipped gradients of `rows` to the pack's sums.

        Returns losses (R, B), and squared norms (M, R, B) or None without clipping.
        """
        kind = None if clipping is None else clipping.flat
        key = (id(pack), loss, kind, *(None if x is None else (tuple(x.shape), x.dtype) for x in rows))
        if key not in self._programs and len(self._programs) < _MOST_PROGRAMS:
            try:
                self._programs[key] = self._made(pack, rows, loss, clipping)
            except ModelError:
                if self._required:
                    raise
                self._programs[key] = None
        program = self._programs.get(key)
        return sum_clipped(pack, rows, loss, clipping) if program is None else program(rows, clipping)

    def _made(self, pack: Pack, rows: Examples, loss: Loss, clipping: Clipping | None) -> _Program:
        """Make a program for batches like `rows`; weights and sums do not change."""
        before = pack.sums.clone()
        try:
            # run once uncompiled: a model may create state in its first pass, which fails on tensors without values
            sum_clipped(pack, rows, loss, clipping)
            if pack.session.passes.masks.needed:
                raise ModelError(
                    "runtime.compile: dropout draws other masks in each step, which a program cannot; leave one out"
                )
            return self._program(pack, rows, loss, clipping)
        finally:
            pack.sums.copy_(before)
            for layer in pack.members:
                layer.forget()  # what a step that failed has recorded would be added in the next one

    def _program(self, pack: Pack, rows: Examples, loss: Loss, clipping: Clipping | None) -> _Program:
        if pack.rounded_products:
            raise ModelError("runtime.compile: a program cannot round the products of passes alone; use float32")
        try:
            with warnings.catch_warnings():
                # warnings of the compiler about its own code, which a user cannot fix
                warnings.simplefilter("ignore")
                program = torch.compile(
                    _traced_step(pack, rows, loss, clipping),
                    backend=self._backend,
                    fullgraph=True,
                    dynamic=False,
                    options={"triton.cudagraphs": pack.values.is_cuda} if self._backend == "inductor" else None,
                )
                program(*_arguments(pack, rows, clipping))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # a compiler's failures have no common type
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelError(
                f"runtime.compile: this step could not be compiled ({type(error).__name__}: {reason}); a C++ compiler"
                " is needed, and operations that torch.compile knows; set runtime.compile to false"
            ) from error

        def run(rows: Examples, clipping: Clipping | None) -> Found:
            sums, losses, *squares = program(*_arguments(pack, rows, clipping))
            pack.sums.add_(sums)
            return losses, squares[0] if squares else None

        return run


class Captured(Compiled):
    """Replacement for `sum_clipped` that starts all kernels of an uncompiled step at once, as a CUDA graph.

    A step of a small network takes as long as its kernels take to start. To capture one takes
    about as long as four. It runs the kernels of the uncompiled step on the same memory, so what `precision.py` says of
    uncompiled steps holds, in all precisions. While kernels are captured, CUDA refuses every look at a number, so the
    first batch cannot influence how later ones are processed. A graph is used only if it adds the sums of an
    uncompiled step for a batch that it was not captured with. Steps that cannot be captured run as they are.
    """

    def __init__(self) -> None:
        super().__init__(required=False)

    def _program(self, pack: Pack, rows: Examples, loss: Loss, clipping: Clipping | None) -> _Program:
        first, *others = (x.clone() for x in _arguments(pack, rows, clipping)[1:])
        held = [first.copy_(first[:, :1].clone()), *others]  # a batch of its first row alone is another batch

        def step() -> Found:
            rest = list(held)
            own = None if clipping is None else replace(clipping, norms=rest.pop())
            mask = None if rows[2] is None else rest.pop()
            return sum_clipped(pack, (rest[0], rest[1], mask), loss, own)

        try:
            found, replay = _graph_of(step)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ModelError(f"a step could not be captured: {error}") from error

        def run(rows: Examples, clipping: Clipping | None) -> Found:
            for mine, new in zip(held, _arguments(pack, rows, clipping)[1:], strict=True):
                mine.copy_(new)
            replay()
            losses, squares = found
            return losses.clone(), None if squares is None else squares.clone()

        sums = []
        for once in (partial(sum_clipped, pack, rows, loss, clipping), partial(run, rows, clipping)):
            pack.sums.zero_()
            once()
            sums.append(pack.sums.clone())
        if not bool((sums[0] - sums[1]).norm() <= 1e-3 * sums[0].norm()):
            raise ModelError("a captured step adds other sums than the same step uncaptured")
        return run


def _graph_of(step: Callable[[], Found]) -> tuple[Found, Callable[[], None]]:
    """Capture the kernels of `step`; return its results, and a function that writes them, and what it adds, anew."""
    aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        step()  # libraries make their state in a first step, which cannot be captured
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # other threads may copy the next batch meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step()
    return found, graph.replay


def _arguments(pack: Pack, rows: Examples, clipping: Clipping | None) -> list[Tensor]:
    """Return the inputs of a program; rows are made contiguous, because a program is compiled for given strides."""
    ours = [x.reshape(-1).view(x.shape) for x in rows if x is not None]
    return [pack.values, *ours, *([] if clipping is None else [clipping.norms])]


def _traced_step(pack: Pack, rows: Examples, loss: Loss, clipping: Clipping | None) -> GraphModule:
    """Trace the operations of a step on tensors of these shapes: sums (R, P), losses and, with clipping, squared norms.

    Guarantee: the trace contains no value of these rows. It is made with tensors that have shapes but no values. So a
    model that reads a value (`tolist`, `numpy`, a count of positive rows) fails, and the content of the first batch
    cannot influence how later ones are processed.
    """

    def step(values: Tensor, x: Tensor, y: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        rest = list(more)
        mask = None if rows[2] is None else rest.pop(0)
        own = None if clipping is None else replace(clipping, norms=rest.pop(0))
        sums = torch.zeros_like(values)
        with pack.traced_on(values, sums):
            losses, squares = sum_clipped(pack, (x, y, mask), loss, own)
        return (sums, losses) if squares is None else (sums, losses, squares)

    return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*_arguments(pack, rows, clipping))
