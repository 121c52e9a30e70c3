"""Clipped sums as one compiled program (`runtime.compile`).

A step (forward, backward, norms, clip factors, sums) is traced once for each shape of batch, as one flat list of tensor
operations, which `torch.compile` fuses. Inputs of the program are weights, bounds and rows; outputs are sums, losses
and squared norms. A program has no randomness and no state between steps: noise is drawn and added outside, and was
charged before its epoch began. On a GPU, torch captures the program's graph.

Clipping stays equally strict. The operations are those of `sum_clipped`, and norms include a margin for rounding errors
between sums and norms that are computed differently (`layers/base.py`). A compiler may reorder additions. It might also
compute a layer's input or gradient once for the norm and again for the sum, or round it to fewer bits for one and not
for the other; where terms cancel (a derivative near zero), the result is all rounding error, and the two may differ.
So what is recorded of a layer, and whatever else norms and sums both read, goes through an operator that no compiler
looks into (`Session.stored`): its numbers are in memory, as short as they were recorded, and every reader reads these.
Only `tf32` is refused: one setting rounds all products of a program, also those of norms and sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dpsgd_cli.clipping.run import Clipping, Found, sum_clipped
from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.tensors import Examples
from dpsgd_cli.errors import ModelError

_Program = Callable[..., tuple[Tensor, ...]]

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
        if program is None:
            return sum_clipped(pack, rows, loss, clipping)
        sums, losses, *squares = program(*_arguments(pack, rows, clipping))
        pack.sums.add_(sums)
        return losses, squares[0] if squares else None

    def _made(self, pack: Pack, rows: Examples, loss: Loss, clipping: Clipping | None) -> _Program:
        """Compile a program for batches like `rows`; weights and sums do not change."""
        if pack.rounded_products:
            raise ModelError("runtime.compile: a program cannot round the products of passes alone; use float32")
        # run once uncompiled: a model may create state in its first pass, which fails on tensors without values
        before = pack.sums.clone()
        try:
            sum_clipped(pack, rows, loss, clipping)
        finally:
            pack.sums.copy_(before)
        if pack.session.passes.masks.needed:
            raise ModelError(
                "runtime.compile: dropout draws other masks in each step, which a program cannot; leave one out"
            )
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
        return program


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
