"""Kronecker factors of every layer's gradient from synthetic inputs: clipping and noise where directions weigh alike.

One example's gradient of a layer is a matrix g (outputs, inputs). Let M be the second moment of the layer's inputs over
synthetic inputs (probes), divided by the mean of its eigenvalues. Let A = (M + damping)^-1/2 times a number that makes
its largest eigenvalue 1. With `factors: both`, G is the same for the loss gradient by the layer's outputs, with labels
drawn from the model's own prediction; otherwise G is the identity. Only the largest 64 eigenvalues of M count by
themselves, and the others by their mean, so that A is I - C C^T for a C of few columns: a step costs little more.

The layer's gradient becomes Q g = s G g A, with s such that the probes' gradients of the layer keep their mean square
length. So the clip norm keeps its meaning, and so does the share of each layer in a gradient. A bias has gradient
s G g. A convolution has A over its channels. An embedding, whose inputs are not vectors, has G alone. Layers without a
rule (`Layer.sides` is None), or whose weights are shared, keep their gradients, within the same clip.

Released at each step: the sum over the batch of clip(Q g), over all layers together, plus the same isotropic noise as
without factors. The optimizer takes this sum as the gradient: a descent direction, as each Q is positive definite.

Sensitivity: the clip norm, for any Q that is fixed before the batch is drawn (`price.of_no_record`). Q is computed
from released weights, probes of a public seed, and public numbers. So it is post-processing, and is not charged.

Sources: Martens and Grosse 2015 ("Optimizing neural networks with Kronecker-factored approximate curvature"); Molina
Van den Bosch et al. 2026 ("DP-KFC", arXiv 2605.13418), whose probes are noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.clipping.run import record_pass
from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.layers import Embedding, Layer
from dpsgd_cli.engine.layers.base import Cuts, vectors_along
from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.errors import ModelError
from dpsgd_cli.preconditioning.settings import Kfac

PROBES = 256
"""Number of synthetic inputs. They pass through the model together."""
RANK = 64
"""Most directions of a factor with eigenvalues of their own."""
SEED = 0
"""Public seed of the probes and of their labels."""


class KroneckerFactors:
    """Factors of a pack's layers, computed anew by `renew`; between two calls they are constant."""

    def __init__(self, pack: Pack, probes: Tensor, loss: Loss, settings: Kfac) -> None:
        """Prepare factors from `probes` (N, ...), inputs of the model that depend on no record.

        Raises ModelError if no layer of the model has a rule.
        """
        self.pack, self.loss, self.settings = pack, loss, settings
        self.probes = probes.unsqueeze(0)
        self.layers = [one for one in pack.layers if isinstance(one, Layer) and self._ruled(one)]
        if not self.layers:
            raise ModelError(
                "method.preconditioner: kfac has a rule for dense layers, ungrouped convolutions and (factors: both)"
                " embeddings, and this model has none; leave it out"
            )

    @classmethod
    def of(cls, context: Context, settings: Kfac, draw: Callable[..., np.ndarray]) -> KroneckerFactors:
        """Return factors for a training; `draw` makes probes (`data/synthetic.py`).

        Images are drawn with pixels in [0, 1], and brought to the public range of the recipe's own.
        """
        pack, table = context.pack, context.table
        heights = [layer.height for layer in pack.members if isinstance(layer, Embedding)]
        tokens = None if table.like.is_floating_point() else min(heights, default=2)
        drawn = torch.from_numpy(draw(settings.probes, PROBES, table.input_shape, SEED, tokens))
        if tokens is None and len(table.input_shape) == 3:
            low, high = context.recipes[0].data.pixel_range or (0.0, 1.0)
            drawn = low + (high - low) * drawn
        return cls(pack, drawn.to(table.like), context.loss, settings)

    def _ruled(self, layer: Layer) -> bool:
        return layer.sides is not None and (layer.sides.inputs is not None or self.settings.factors == "both")

    @torch.no_grad()
    def renew(self, step: int) -> None:
        """Compute all factors at the present weights, which must have been released; `step` decides the labels."""
        pack = self.pack
        pack.preconditioned = []
        record_pass(pack, self.probes, self._labels(step), self.loss)
        used = [layer for layer in self.layers if layer.used]
        for layer in used:
            before = layer.square_norms().mean(dim=1)
            layer.cuts = self._cuts(layer)
            layer.precondition()
            scale = (before / layer.square_norms().mean(dim=1)).sqrt()
            # a layer that no probe moves, or whose numbers overflow, keeps its scale
            layer.cuts = replace(layer.cuts, scale=torch.where((scale > 0) & scale.isfinite(), scale, 1.0))
        for one in pack.layers:
            one.forget()
        pack.preconditioned = used

    def _labels(self, step: int) -> Tensor:
        """Return a class for each trial and probe, (R, N), drawn from the model's own prediction."""
        shares = self.pack(self.probes).softmax(dim=-1).cumsum(dim=-1)
        drawn = np.random.default_rng([SEED, step]).random(shares.shape[1], np.float32)
        points = torch.from_numpy(drawn).to(shares).view(1, -1, 1)
        return (shares < points).sum(dim=-1).clamp_max(shares.shape[-1] - 1)

    def _cuts(self, layer: Layer) -> Cuts:
        assert layer.sides is not None
        calls = layer.recorded()
        inputs = [vectors_along(a, layer.sides.inputs) for a, _ in calls if layer.sides.inputs is not None]
        outputs = [vectors_along(d, layer.sides.outputs) for _, d in calls if self.settings.factors == "both"]
        scale = torch.ones_like(self.pack.values[:, 0])
        return Cuts(self._cut(inputs) if inputs else None, self._cut(outputs) if outputs else None, scale)

    def _cut(self, calls: list[Tensor]) -> Tensor:
        """Return C (R or 1, n, k) of the vectors (R or 1, N, n) of all calls; 0 if any of them is not finite."""
        vectors = torch.cat([one.expand(max(map(len, calls)), -1, -1) for one in calls], dim=1)
        # factors do not depend on the scale, and products of large numbers would overflow
        largest = vectors.abs().amax(dim=(1, 2), keepdim=True)
        vectors = torch.where(largest.isfinite() & (largest > 0), vectors / largest, 0.0)
        values, directions = _largest(vectors, min(RANK, vectors.shape[-1]))
        damping, total = self.settings.damping, vectors.double().square().sum(dim=(1, 2)).unsqueeze(1)
        size, kept = vectors.shape[-1], values.shape[1]
        mean = (total / size).clamp_min(1e-300)
        rest = values[:, :1] if kept == size else (total - values.sum(dim=1, keepdim=True)).clamp_min(0) / (size - kept)
        shares = 1 - ((rest / mean + damping) / (values / mean + damping)).sqrt()
        return (directions * shares.clamp_min(0).sqrt().unsqueeze(1)).to(calls[0].dtype)


def _largest(vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest `count` eigenvalues (R, k), ascending, of X^T X for X (R, N, n), and directions (R, n, k)."""
    if vectors.shape[1] >= vectors.shape[2]:
        values, directions = torch.linalg.eigh((vectors.mT @ vectors).double())
        return values[:, -count:].clamp_min(0), directions[..., -count:]
    vectors = vectors.double()
    values, mixtures = torch.linalg.eigh(vectors @ vectors.mT)
    values = values[:, -count:].clamp_min(0)
    directions = vectors.mT @ mixtures[..., -count:]
    return values, directions / values.sqrt().clamp_min(1e-150).unsqueeze(1)
