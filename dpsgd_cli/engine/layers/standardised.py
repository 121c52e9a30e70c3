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

The first term is the norm that the rule of plain convolutions computes for output gradients rescaled by g_o s_o.
<G_o, 1> is the sum over positions of d_o times the sum of the patch: a convolution with one filter of ones. t_o is the
sum of d_o times the layer's output without gain and bias, which is kept from the forward pass. The clipped sum is the
linear map applied to the plain rule's clipped sum of G.

In rounded passes the map uses the exact weights, for norms and sums alike. t_o then comes from another convolution of
the recorded inputs, because the output of the forward pass is rounded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import EITHER, Layer, Session
from dpsgd_cli.engine.layers.conv import Conv

# A gain that training brought near zero counts as this much where a norm is divided by it.
_LEAST_GAIN = 1e-4


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
    which is at most (sum_l |d_l| |u_l|)^2 over positions l with patches u_l; 16 machine epsilons of that are added.
    Filters with a gain below 1e-4 count as if it were 1e-4.
    """

    kinds = (WeightStandardisedConv2d,)
    clipped = EITHER
    holds_gradients = True
    rounds = True

    def __init__(self, source: nn.Module, session: Session) -> None:
        super().__init__(source, session)
        assert isinstance(source, WeightStandardisedConv2d)
        # in a list, so that it is not registered as a clipping group of its own
        self.plain = [Conv(_plain(source), session)]
        self.box = (source.stride, source.padding, source.dilation)
        self.kernel = source.kernel_size
        self.floor = source.floor
        self.exact: dict[str, Tensor] = {}
        # the plain rule's sums, allocated once: programs of torch.compile may write there
        self.own: Tensor | None = None
        self.units: list[Tensor] = []
        self.rescaled = False
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
        self.plain[0].forget()
        self.units.clear()
        self.rescaled = False
        self.kept = None

    def _filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return s c (R, O, K), s (R, O) and q (R, O), bool, for the exact weights."""
        centre = centred(self.exact["weight"].flatten(2), 1)
        squares = centre.square().sum(dim=2)
        scale = squares.clamp_min(self.floor).rsqrt()
        return centre * scale.unsqueeze(-1), scale, squares > self.floor

    def compute(self, a: Tensor) -> Tensor:
        unit = self._unit(a)
        if self.session.recording:
            self.units.append(unit)
        gain, bias = (self.values[name][:, None, :, None, None] for name in ("gain", "bias"))
        return torch.addcmul(bias, unit, gain)

    def _unit(self, a: Tensor) -> Tensor:
        """Return the output without gain and bias, in the dtype of `a`."""
        filters = self._filters()[0].view_as(self.exact["weight"])
        self.plain[0].values = {"weight": filters.to(a.dtype)}
        return self.plain[0].compute(a)

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        return self.plain[0].input_gradient(a, d * self.values["gain"][:, None, :, None, None])

    def _strengths(self, scale: Tensor) -> Tensor:
        """Return the factors |g| s (R, O), never zero, by which output gradients are rescaled for the plain rule."""
        return self.exact["gain"].abs().clamp_min(_LEAST_GAIN) * scale

    def _rescale(self) -> None:
        """Pass this layer's calls to the plain rule, and replace the recorded gradients with rescaled ones."""
        if self.rescaled:
            return
        by = self._strengths(self._filters()[1])[:, None, :, None, None]
        self.gradients[:] = [None if d is None else self.session.stored(d * by) for d in self.gradients]
        self.plain[0].inputs, self.plain[0].gradients = self.inputs, self.gradients
        self.rescaled = True

    def square_norms(self) -> Tensor:
        self._rescale()
        _, scale, above = self._filters()
        strength = self._strengths(scale).unsqueeze(1)
        along_ones, along_units, shifts, most = self._inner_products()
        # the sums of gain and bias use the same gradients as their norms
        self.kept = self.session.stored(along_units / strength), self.session.stored(shifts / strength)
        # divided before squaring, so that it is finite if the plain norm is
        mean = along_ones / self.exact["weight"][0, 0].numel() ** 0.5
        taken = mean.square() + above.unsqueeze(1) * along_units.square()
        margin = most.square() * (16 * torch.finfo(most.dtype).eps)
        weights = (self.plain[0].square_norms() - taken.sum(dim=2)).clamp_min_(0.0) + margin
        return weights + sum(part.square().sum(dim=2) for part in self.kept)

    def _inner_products(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return sums over all positions of all calls, for rescaled gradients d of the output.

        Three are (R, B, O): of d times the sum of the patch, which is <G, 1>; of d times the output without gain and
        bias; and of d. The last is (R, B): of |d| times the norm of the patch.
        """
        used = [unit for unit, d in zip(self.units, self.gradients, strict=True) if d is not None]
        units = [part for unit in used for part in self.by_copy(unit)]
        found = []
        for (a, d), rough in zip(self.recorded(), units, strict=True):
            unit = self._unit(a) if self.session.rounds else rough
            by_place = d.flatten(3)
            sizes = self._boxes(a.square()).clamp_min_(0.0).sqrt_()
            found.append(
                (
                    torch.matmul(by_place, self._boxes(a).unsqueeze(-1)).squeeze(-1),
                    (by_place * unit.flatten(3)).sum(dim=3),
                    by_place.sum(dim=3),
                    (torch.linalg.vector_norm(by_place, dim=2) * sizes).sum(dim=2),
                )
            )
        ones, along, shifts, most = (torch.stack(parts).sum(dim=0) for parts in zip(*found, strict=True))
        return ones, along, shifts, most

    def _boxes(self, a: Tensor) -> Tensor:
        """Return the sum of every patch of `a` (R or 1, B, C, H, W), shape (R or 1, B, L)."""
        flat = a.sum(dim=2).flatten(0, 1).unsqueeze(1)
        stride, padding, dilation = self.box
        sums = F.conv2d(flat, flat.new_ones(1, 1, *self.kernel), None, stride, padding, dilation)
        return sums.view(*a.shape[:2], -1)

    def add_clipped_sums(self, factors: Tensor) -> None:
        self._rescale()
        total = self.plain[0].sums["weight"].zero_()
        self.plain[0].add_clipped_sums(factors)
        filters, scale, above = self._filters()
        strength = self._strengths(scale)
        sums = total.flatten(2) / strength.unsqueeze(-1)
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
        if self.plain[0].gradients is not self.gradients:
            super().zero_nonfinite(bad)


def _plain(source: WeightStandardisedConv2d) -> nn.Conv2d:
    """Return a convolution of the same shape without bias and without stored weights."""
    sizes = (source.in_channels, source.out_channels, source.kernel_size)
    moves = (source.stride, source.padding, source.dilation)
    return nn.Conv2d(*sizes, *moves, bias=False, device="meta")  # type: ignore[arg-type]
