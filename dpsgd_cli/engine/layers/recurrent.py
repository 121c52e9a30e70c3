"""LSTM and GRU made of dense layers; use them instead of PyTorch's, whose per-example gradients are not accessible.

Each has two dense layers: one on all inputs at once, one on the state, step by step. Their rule (`linear.py`) adds up
the steps of an example before clipping, so an example is a whole sequence. Formulae and layout of weights are those of
`torch.nn.LSTM` and `torch.nn.GRU` (one layer, `batch_first=True`): `inputs` is their `weight_ih_l0` and `bias_ih_l0`,
`state` their `weight_hh_l0` and `bias_hh_l0`. They return all hidden states (B, T, hidden); the last is `y[:, -1]`.

    from dpsgd_cli.engine.layers import LSTM

    class Reader(nn.Module):                        # of sequences (B, T, features)
        def __init__(self, features, outputs):
            super().__init__()
            self.lstm, self.last = LSTM(features, 32), nn.Linear(32, outputs)

        def forward(self, x):
            return self.last(self.lstm(x)[:, -1])
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Recurrent(nn.Module):
    """Base class: two dense layers of `gates` times `hidden` outputs, initialised like PyTorch's recurrent layers."""

    gates: int

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.inputs = nn.Linear(features, self.gates * hidden)
        self.state = nn.Linear(hidden, self.gates * hidden)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)


class LSTM(_Recurrent):
    """Long short-term memory: inputs (B, T, features) -> hidden states (B, T, hidden)."""

    gates = 4

    def forward(self, x: Tensor) -> Tensor:
        given = self.inputs(x)
        state = memory = given.new_zeros(len(given), self.hidden)
        states = []
        for step in given.unbind(dim=1):
            enter, keep, new, out = (step + self.state(state)).chunk(4, dim=1)
            memory = keep.sigmoid() * memory + enter.sigmoid() * new.tanh()
            state = out.sigmoid() * memory.tanh()
            states.append(state)
        return torch.stack(states, dim=1)


class GRU(_Recurrent):
    """Gated recurrent units: inputs (B, T, features) -> hidden states (B, T, hidden)."""

    gates = 3

    def forward(self, x: Tensor) -> Tensor:
        given = self.inputs(x)
        state = given.new_zeros(len(given), self.hidden)
        states = []
        for step in given.unbind(dim=1):
            (reset, keep, new), (of_reset, of_keep, of_new) = step.chunk(3, dim=1), self.state(state).chunk(3, dim=1)
            fresh = (new + (reset + of_reset).sigmoid() * of_new).tanh()
            share = (keep + of_keep).sigmoid()
            state = (1 - share) * fresh + share * state
            states.append(state)
        return torch.stack(states, dim=1)
