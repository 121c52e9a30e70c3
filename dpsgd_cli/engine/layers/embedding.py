"""Embedding tables: y_t = W[token_t].

One example's gradient adds d_t to row token_t. So its squared norm is the sum of <d_t, d_s> over pairs of positions
with the same token. The clipped sum scatters rescaled rows of d, without a table per example.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.apart import without_gradient
from dpsgd_cli.engine.layers.base import CLOSED_FORM, Each, Layer, Outer, Session, gram, gram_squares, stacked
from dpsgd_cli.engine.precision import SHORT
from dpsgd_cli.errors import ModelError


class Embedding(Layer):
    """Rule for `torch.nn.Embedding`. Weight (R, V, E); input integers (R or 1, B, ...)."""

    kinds = (nn.Embedding,)
    clipped = CLOSED_FORM
    holds_gradients = False
    rounds = True

    def __init__(self, source: nn.Embedding, session: Session) -> None:
        super().__init__(source, session)
        if source.max_norm is not None or source.scale_grad_by_freq or source.sparse:
            raise ModelError("Embedding with max_norm, scale_grad_by_freq or sparse has no private rule; leave all off")
        self.padding = source.padding_idx
        self.height, self.width = source.num_embeddings, source.embedding_dim

    def _examples(self, x: Tensor) -> Tensor:
        """Look tokens up. A padding token's row does not change: its gradient ends here, before it is recorded."""
        y = super()._examples(x)
        if self.padding is None:
            return y
        tokens = self.unfold(x)
        return without_gradient(y, tokens.expand(self.session.trials, *tokens.shape[1:]).flatten(0, 1) == self.padding)

    def item_axes(self, axes: int) -> tuple[int, bool]:
        return 0, True

    def compute(self, a: Tensor) -> Tensor:
        weight = self.values["weight"]
        if not self.one_by_one(weight):
            return weight[self._trials(a), a.expand(self.session.trials, *a.shape[1:])]
        found = [F.embedding(a[min(r, a.shape[0] - 1)], weight[r]) for r in range(self.session.trials)]
        return stacked(found)

    def _trials(self, a: Tensor) -> Tensor:
        """Return each trial's number (R, 1, ...), to index with it beside tokens (R or 1, B, ...)."""
        return torch.arange(self.session.trials, device=a.device).view(-1, *[1] * (a.dim() - 1))

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        raise ModelError("the input of an Embedding must be integers that no layer computed")

    def _flat(self, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Concatenate all calls: tokens (R, B, T) and gradients (R, B, T, E)."""
        trials, rows = self.session.trials, self.session.rows
        tokens, gradients = [], []
        for a, d in pairs:
            tokens.append(a.reshape(a.shape[0], rows, a.shape[2:].numel()).expand(trials, -1, -1))
            gradients.append(d.reshape(trials, rows, a.shape[2:].numel(), self.width))
        token, gradient = (one[0] if len(one) == 1 else torch.cat(one, 2) for one in (tokens, gradients))
        return token, gradient

    def square_norms(self) -> Tensor:
        tokens, d = self._flat(self.stored())
        same = tokens.unsqueeze(-1) == tokens.unsqueeze(-2)
        return gram_squares(same.to(self.session.exact), gram(d), self.width, d.dtype == SHORT)

    def contributions(self, name: str) -> list[Outer | Each]:
        tokens, d = self._flat(self.stored())
        return [Outer(tokens, d, self.height)]

    def add_clipped_sums(self, factors: Tensor) -> None:
        tokens, d = self._flat(self.recorded())
        scaled = d * factors[..., None, None]
        if not self.one_by_one(d):
            total = self.sums["weight"]
            total.index_put_((self._trials(tokens), tokens), scaled.to(total.dtype), accumulate=True)
            return
        for r in range(self.session.trials):
            own = self.sums["weight"][r]
            own.index_add_(0, tokens[r].reshape(-1), scaled[r].reshape(-1, self.width).to(own.dtype))
