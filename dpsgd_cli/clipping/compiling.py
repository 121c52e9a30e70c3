"""Clipped sums as one compiled program: `runtime.compile`.

A step (forward, backward, norms, clip factors, sums) is written down once for a shape of batch as one flat list of
tensor operations, which `torch.compile` fuses. What changes from step to step goes in and comes out: weights, bounds
and rows; sums, losses and squared norms. Nothing random is in a program, and nothing stays in one between steps: noise
is drawn and added outside, and was charged before its epoch began. On a GPU, torch captures a program's graph by
itself.

Why clipping is as strict as before: the operations are those of `sum_clipped`, with norms as large as rounding errors
of sums and norms that were computed in different ways demand (`layers/base.py`). A compiler may order additions anew.
It is told to keep each number that several places read: by itself it would compute a layer's input or gradient once for
the norm and once for the sum, and where terms cancel (a derivative near zero) the last bit, which may differ, is all
there is of it. It might also leave out a rounding to fewer bits that one place relies on and not another, so rounded
passes (`engine/precision.py`) are refused.

Not here: the sums themselves (`run.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
# The compiler keeps a number with several readers when computing it takes more reads than this; by default each reader
# may compute it anew.
_ONCE: dict[str, str | int | bool | Callable[..., Any]] = {"realize_reads_threshold": 0}


class Compiled:
    """`sum_clipped` by a compiled program for each shape of batch; shapes beyond the first 8 run as they are.

    `backend` is one of torch.compile's. Raises ModelError where a step cannot be written down or compiled.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._programs: dict[tuple[object, ...], _Program] = {}

    @torch.no_grad()
    def __call__(self, pack: Pack, rows: Examples, loss: Loss, clipping: Clipping | None) -> Found:
        """Add the clipped gradients of `rows` to the pack's sums; losses (R, B) and squared norms (M, R, B) or None."""
        kind = None if clipping is None else clipping.flat
        key = (id(pack), loss, kind, *(None if x is None else (tuple(x.shape), x.dtype) for x in rows))
        if key not in self._programs:
            if len(self._programs) == _MOST_PROGRAMS:
                return sum_clipped(pack, rows, loss, clipping)
            self._programs[key] = self._made(pack, rows, loss, clipping)
        sums, losses, *squares = self._programs[key](*_arguments(pack, rows, clipping))
        pack.sums.add_(sums)
        return losses, squares[0] if squares else None

    def _made(self, pack: Pack, rows: Examples, loss: Loss, clipping: Clipping | None) -> _Program:
        """A program for batches like `rows`, compiled; neither weights nor sums change."""
        if pack.session.rounds:
            raise ModelError("runtime.compile: rounded passes cannot be compiled; use float32")
        # once as it is: models may make what they keep, which cannot be done with tensors that hold no numbers
        before = pack.sums.clone()
        try:
            sum_clipped(pack, rows, loss, clipping)
        finally:
            pack.sums.copy_(before)
        options = _ONCE | {"triton.cudagraphs": pack.values.is_cuda}
        try:
            with warnings.catch_warnings():
                # a compiler's, about its own code, which a user can do nothing about
                warnings.simplefilter("ignore")
                program = torch.compile(
                    _written_down(pack, rows, loss, clipping),
                    backend=self._backend,
                    fullgraph=True,
                    dynamic=False,
                    options=options if self._backend == "inductor" else None,
                )
                program(*_arguments(pack, rows, clipping))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # a compiler's failures have no common kind
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelError(
                f"runtime.compile: this step could not be compiled ({type(error).__name__}: {reason}); a C++ compiler"
                " is needed, and operations that torch.compile knows; set runtime.compile to false"
            ) from error
        return program


def _arguments(pack: Pack, rows: Examples, clipping: Clipping | None) -> list[Tensor]:
    """What goes into a program; rows as they lie in memory if side by side, because a program is for given strides."""
    ours = [x.reshape(-1).view(x.shape) for x in rows if x is not None]
    return [pack.values, *ours, *([] if clipping is None else [clipping.norms])]


def _written_down(pack: Pack, rows: Examples, loss: Loss, clipping: Clipping | None) -> GraphModule:
    """The operations of a step on tensors like these: sums (R, P), losses, and squared norms if anything is clipped.

    Guarantee: no number of these rows is in them. They are written down on tensors that have shapes and no numbers, so
    that a model that asks for one (`tolist`, `numpy`, how many rows are positive) fails, and later batches cannot be
    treated by what the first one held.
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
