"""Dropout and noise that belong to records: each is a function of (trial, step, record, call) and of nothing else.

Guarantee: fix the trials' keys. Then an example's mask at a step is a fixed function of the content of its own input.
So its loss, its gradient and its clipped part of the sum are functions of that record and of the weights, as without
dropout, and no other record's part moves when one record is added, removed or replaced. The sensitivity is that of
clipping, under every adjacency and for every value of the keys: no quality of the random numbers enters. Equal inputs
get equal masks, except for copies of one example.

For training, masks should look random: bits are those of SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom
number generators") at a counter, 16 for each number. Because nothing else decides a mask, it is the same alone, in a
pack, in pieces of any size and after a resume. Dropout acts in recorded passes of a training only, where the module
that calls it is in training mode. Noise that a model draws (`torch.randn_like`) acts in the same passes; elsewhere it
is its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpsgd_cli.errors import ModelError

PLAIN = (F.dropout, torch.dropout, torch.dropout_)
CHANNELS = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_)
"""Functions that drop single numbers, and whole channels (axis 1)."""
NOISE: dict[Any, tuple[Callable[..., Tensor], bool]] = {
    torch.rand: (torch.empty, False),
    torch.randn: (torch.empty, True),
    torch.rand_like: (torch.empty_like, False),
    torch.randn_like: (torch.empty_like, True),
}
"""Functions that draw uniform or (True) normal numbers; each with what makes a tensor of the same shape and type."""
_GOLDEN, _FIRST, _SECOND = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
_WORD = 1 << 16


class Masks:
    """Dropout masks and noise of the examples of a pass. `needed`: some pass has asked for one; `drew`: for noise."""

    def __init__(self) -> None:
        self.step_keys: Tensor | None = None
        self.keys: Tensor | None = None
        self.recording = False
        self.calls = 0
        self.needed = False
        self.drew = False
        self._off = False

    @property
    def active(self) -> bool:
        """True while something is dropped. Raises ModelError in a recorded pass for which `begin` named no step."""
        self.needed = True
        if not self.recording or self._off:
            return False
        if self.keys is None:
            raise ModelError("dropout needs the number of the step, which this method does not say; leave it out")
        return True

    def begin(self, trials: Sequence[int], step: int) -> None:
        """Name the step of the next passes; `trials` has a key of each of the R trials, 63 bits."""
        self.step_keys = mixed(mixed(torch.tensor(trials, dtype=torch.int64)) + step)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Drop nothing while the context lasts, as in tests of a model."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    @contextmanager
    def pass_of(self, x: Tensor, trials: int, copies: int, recording: bool) -> Iterator[None]:
        """Count calls anew for one pass over inputs `x` (R B, ...): B rows per trial, `copies` of the same examples."""
        self.calls, self.recording = 0, recording
        if recording and self.step_keys is not None and not self._off:
            step = self.step_keys.to(x.device).repeat_interleave(len(x) // trials)
            rows = len(x) // trials // copies
            number = torch.arange(copies, device=x.device).repeat_interleave(rows).repeat(trials)
            self.keys = mixed((step ^ content(x)) + number)
        try:
            yield
        finally:
            self.keys, self.recording = None, False

    def dropped(self, x: Tensor, p: float, axes: int) -> Tensor:
        """Return `x` (N, ...) with numbers zeroed with probability `p`, and the others divided by 1 - p.

        The first `axes` axes have masks of their own; along the others a mask is shared. `p` is rounded to 2^-16.
        """
        assert self.keys is not None
        self.calls += 1
        least = round(p * _WORD)
        if least >= _WORD:
            return x * 0.0
        shape = x.shape[1:axes]
        mask = bits(mixed(self.keys + self.calls), shape.numel()) >= least
        return x * mask.view(len(x), *shape, *[1] * (x.dim() - axes)).to(x.dtype) * (_WORD / (_WORD - least))

    def noise(self, normal: bool, count: int) -> Tensor:
        """Return numbers (N, count), float64, uniform on [0, 1) in steps of 2^-24, or normal."""
        assert self.keys is not None
        self.calls += 1
        high, low = bits(mixed(self.keys + self.calls), 2 * count).double().chunk(2, dim=1)
        drawn = (high + torch.floor(low / 256) / 256) / _WORD
        return torch.special.ndtri(drawn + 2**-25) if normal else drawn


class Still(TorchFunctionMode):
    """Function mode that gives a model the mean of the noise that it draws: outside of training, and in tests."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return still(func, args, kwargs or {}) if func in NOISE else func(*args, **(kwargs or {}))


def still(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Return the mean of the noise that a call of `func`, one of `NOISE`, draws."""
    shaped, normal = NOISE[func]
    return shaped(*args, **kwargs).fill_(0.0 if normal else 0.5)


def mixed(z: Tensor) -> Tensor:
    """Return SplitMix64's output function of int64 numbers, which count as unsigned.

    >>> hex(int(mixed(torch.tensor(0))) & (2**64 - 1))
    '0xe220a8397b1dcdaf'
    """
    z = z + _GOLDEN
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def bits(keys: Tensor, count: int) -> Tensor:
    """Return `count` numbers of 0..65535 for each of N keys, int32 (N, count): 16 bits each of a stream per key."""
    words = torch.arange(-(-count // 4), device=keys.device) * _GOLDEN
    found = mixed(keys.unsqueeze(1) + words)
    return (found.view(torch.int16)[:, :count].int()) & (_WORD - 1)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content(x: Tensor) -> Tensor:
    """Return a key of the content of each row of `x` (N, ...), int64 (N,)."""
    numbers = x.reshape(len(x), -1).contiguous()
    numbers = (numbers if numbers.dtype == torch.bool else numbers.view(_BITS[x.element_size()])).long()
    return mixed((numbers * (mixed(torch.arange(numbers.shape[1], device=x.device)) | 1)).sum(dim=1))
