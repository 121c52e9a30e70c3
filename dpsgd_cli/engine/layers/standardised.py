"""Weight-standardised convolutions: y = conv(x, V) + b with V_o = g_o s_o (W_o - mean W_o).

W_o is filter o as a vector of K numbers, c_o = W_o - mean(W_o) and s_o = 1 / sqrt(max(|c_o|^2, floor)). Let G_o be one
example's gradient with respect to V_o, as in a plain convolution with filters V. V does not depend on the example, so
the chain rule is one linear map, the same for all examples:

    gain gradient:    t_o = <G_o, s_o c_o>
    weight gradient:  g_o s_o P_o G_o,   P_o = I - 1 1^T / K - q_o (s_o c_o)(s_o c_o)^T.

q_o is 1 if |c_o|^2 is above the floor. Then s_o c_o is a unit vector, orthogonal to 1, and P_o projects onto the
orthogonal complement of both. Otherwise s_o is constant and q_o is 0: P_o only subtracts the mean. A projection is its
own square, so

    |g s P G|^2 = sum_o (g_o s_o)^2 (|G_o|^2 - <G_o, 1>^2 / K - q_o t_o^2).

Every G_o is computed, a few rows at a time, and all three terms are read from it. The clipped sum is the linear map
applied to the plain rule's clipped sum of G. In rounded passes the map uses the exact weights, for norms and sums
alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import OWN_GRADIENTS, Layer, Session, instantiated_squares
from dpsgd_cli.engine.layers.conv import Conv
from dpsgd_cli.engine.precision import SHORT, product


def centred(weight: Tensor, axes: int) -> Tensor:
    """Return `weight` minus its mean over the last `axes` axes."""
    over = tuple(range(-axes, 0))
    return weight - weight.mean(dim=over, keepdim=True)


class WeightStandardisedConv2d(nn.Conv2d):
    """A convolution whose filters have mean 0 and L2 norm `gain` (less if the floor applies), for any stored weights.

    Filter o is gain_o * (W_o - mean W_o) / sqrt(max(K var W_o, floor)), where K is the number of entries of a filter
    (Qiao et al. 2019, "Micro-batch training with batch-channel normalization and weight standardization"; with gain and
    floor as in De et al. 2022). Weights are (O, C, *kernel), gain and bias (O,). Gains start at 1, biases at 0.
    """

    floor = 1e-4

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding)
        self.gain = nn.Parameter(torch.ones(outputs))
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        centre = centred(self.weight, 3)
        squares = centre.square().sum(dim=(1, 2, 3), keepdim=True)
        weight = centre * squares.clamp_min(self.floor).rsqrt() * self.gain.view(-1, 1, 1, 1)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Standardised(Layer):
    """Rule for `WeightStandardisedConv2d`. Weight (R, O, C, *kernel), bias and gain (R, O).

    Guarantee: norms are no less than the true ones. Subtraction leaves rounding errors relative to the first term,
    which is at most sum_l |g s d_l|^2 times sum_l |u_l|^2 over positions l with patches u_l; 16 machine epsilons of
    that are added.
    """

    kinds = (WeightStandardisedConv2d,)
    clipped = OWN_GRADIENTS
    holds_gradients = True
    rounds = True

    def __init__(self, source: nn.Module, session: Session) -> None:
        super().__init__(source, session)
        assert isinstance(source, WeightStandardisedConv2d)
        plain = Conv(_plain(source), session)
        plain.inputs, plain.gradients = self.inputs, self.gradients
        # in a list, so that it is not registered as a clipping group of its own
        self.plain = [plain]
        self.floor = source.floor
        self.exact: dict[str, Tensor] = {}
        # the plain rule's sums, allocated once: programs of torch.compile may write there
        self.own: Tensor | None = None
        self.kept: tuple[Tensor, Tensor] | None = None

    def bind(self, values: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
        super().bind(values, sums)
        self.exact = values
        total = torch.zeros_like(sums["weight"]) if self.session.tracing or self.own is None else self.own
        if not self.session.tracing:
            self.own = total
        self.plain[0].bind({"weight": values["weight"]}, {"weight": total})

    def forget(self) -> None:
        super().forget()
        self.plain[0].kept = self.kept = None

    def _filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return s c (R, O, K), s (R, O) and q (R, O), bool, for the exact weights."""
        centre = centred(self.exact["weight"].flatten(2), 1)
        squares = centre.square().sum(dim=2)
        scale = squares.clamp_min(self.floor).rsqrt()
        return centre * scale.unsqueeze(-1), scale, squares > self.floor

    def compute(self, a: Tensor) -> Tensor:
        filters = self._filters()[0].view_as(self.exact["weight"])
        self.plain[0].values = {"weight": filters.to(a.dtype)}
        gain, bias = (self.values[name][:, None, :, None, None] for name in ("gain", "bias"))
        return torch.addcmul(bias, self.plain[0].compute(a), gain)

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        return self.plain[0].input_gradient(a, d * self.values["gain"][:, None, :, None, None])

    def square_norms(self) -> Tensor:
        plain, calls = self.plain[0], self.stored()
        found = [self._norms_of([(a[:, part], d[:, part]) for a, d in calls]) for part in plain.chunks(calls)]
        weights, along, shifts = (torch.cat(parts, dim=1) for parts in zip(*(part[:3] for part in found), strict=True))
        gradients = [part[3] for part in found if part[3] is not None]
        plain.kept = torch.cat(gradients, dim=1) if gradients else None
        self.kept = self.session.stored(along), self.session.stored(shifts)
        return weights + sum(part.square().sum(dim=2) for part in self.kept)

    def _norms_of(self, calls: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return squared norms (R, B) of weight gradients, gradients (R, B, O) for gain and bias, and G if small."""
        filters, scale, above = self._filters()
        turned = filters.view_as(self.exact["weight"]).movedim(2, -1).flatten(2)  # as patches are: channels last
        u, d = self.plain[0].factors(calls)
        plain = product(d, u)
        gradients = plain.squeeze(2)
        along = torch.einsum("rbok,rok->rbo", gradients, turned.to(gradients.dtype))
        along_ones = gradients.sum(dim=3) / gradients.shape[3] ** 0.5
        # multiplied before squaring, so that squares are finite if the norm is
        strength = (self.exact["gain"] * scale).unsqueeze(1)
        whole, ones, units = (
            (strength * part).square().sum(dim=2)
            for part in (torch.linalg.vector_norm(gradients, dim=3), along_ones, above.unsqueeze(1) * along)
        )
        inputs, outputs = self.plain[0].sizes(calls)
        outputs = (outputs * strength.square()).sum(dim=2)
        margin = inputs * outputs * (16 * torch.finfo(inputs.dtype).eps)
        short = d.shape[-1] * (SHORT in (u.dtype, d.dtype))
        weights = instantiated_squares((whole - ones - units).clamp_min(0.0) + margin, inputs, outputs, short)
        shifts = d.squeeze(2).sum(dim=3, dtype=along.dtype)
        return weights, along, shifts, plain if plain.numel() <= u.numel() else None

    def add_clipped_sums(self, factors: Tensor) -> None:
        total = self.plain[0].sums["weight"].zero_()
        self.plain[0].add_clipped_sums(factors)
        filters, scale, above = self._filters()
        sums = total.flatten(2)
        gains = (sums * filters).sum(dim=2)
        part = centred(sums, 1) - (above * gains).unsqueeze(-1) * filters
        part *= (self.exact["gain"] * scale).unsqueeze(-1)
        self.sums["weight"] += part.view_as(total)
        if self.kept is None:
            self.square_norms()
        assert self.kept is not None
        for name, each in zip(("gain", "bias"), self.kept, strict=True):
            self.add(name, factors, each)

    def zero_nonfinite(self, bad: Tensor) -> None:
        self.plain[0].zero_nonfinite(bad)
        if self.kept is not None:
            self.kept = tuple(part.masked_fill(bad.unsqueeze(-1), 0.0) for part in self.kept)  # type: ignore[assignment]


def _plain(source: WeightStandardisedConv2d) -> nn.Conv2d:
    """Return a convolution of the same shape without bias and without stored weights."""
    sizes = (source.in_channels, source.out_channels, source.kernel_size)
    moves = (source.stride, source.padding, source.dilation)
    return nn.Conv2d(*sizes, *moves, bias=False, device="meta")  # type: ignore[arg-type]
