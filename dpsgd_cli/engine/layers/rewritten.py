"""Layers of PyTorch that use several weights in one operation, rewritten as dense layers with the same parameters.

`nn.LSTM`, `nn.GRU` and `nn.RNN` become two dense layers for each layer and direction: one on all inputs at once, one on
the state, step by step. The dense rule adds up the steps of an example before clipping, so an example is a whole
sequence. `nn.MultiheadAttention` becomes a dense layer for queries, keys and values and one for the output. The code
between them runs on one example at a time, as that of any model (`apart.py`). Formulae, arguments and results are
PyTorch's (`tests/engine/layers/test_rewritten.py` compares them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import Described
from dpsgd_cli.errors import ModelError


def _dense(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return a dense layer that holds these parameters themselves."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer


class Rewritten(nn.Module):
    """Base class: dense layers, whose rules the pack finds, and code that runs on one example (`apart.py`)."""

    batch_first: bool
    dropout: float

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.training = source.training
        for name, value in vars(source).items():
            if isinstance(value, bool | int | float | str | type(None)):
                setattr(self, name, value)
        self._parameters = {
            name: p if p is None else Described.of(p, type(source).__name__, name)  # type: ignore[misc]
            for name, p in source._parameters.items()
        }

    def turned(self, x: Tensor) -> Tensor:
        """Return sequences (.., T, F) of (T, F), (B, T, F) or, without `batch_first`, (T, B, F); and the other way."""
        return x if self.batch_first or x.dim() < 3 else x.transpose(0, 1)


class Recurrent(Rewritten):
    """`nn.LSTM`, `nn.GRU` or `nn.RNN` of any number of layers, in one or both directions."""

    num_layers: int
    hidden_size: int
    proj_size: int

    def __init__(self, source: nn.RNNBase) -> None:
        super().__init__(source)
        self.kind, self.directions = source.mode, 2 if source.bidirectional else 1
        for layer in range(source.num_layers):
            for suffix in ("", "_reverse")[: self.directions]:
                place = f"l{layer}{suffix}"
                biases = [getattr(source, f"bias_{part}_{place}") if source.bias else None for part in ("ih", "hh")]
                for part, name, bias in zip(("ih", "hh"), ("inputs", "state"), biases, strict=True):
                    self.add_module(f"{name}_{place}", _dense(getattr(source, f"weight_{part}_{place}"), bias))
                if source.proj_size:
                    self.add_module(f"projected_{place}", _dense(getattr(source, f"weight_hr_{place}"), None))

    def forward(self, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Return all hidden states, and the last ones of each layer and direction (with the memory of an LSTM)."""
        if not isinstance(x, Tensor):
            raise ModelError("packed sequences mix the rows of a batch; give the padded sequences themselves")
        y, given, ends = self.turned(x), hx if isinstance(hx, tuple) else (hx,) * (hx is not None), []
        for layer in range(self.num_layers):
            found = []
            for direction, suffix in enumerate(("", "_reverse")[: self.directions]):
                start = [one[layer * self.directions + direction] for one in given]
                states, end = self._one_way(y.flip(-2) if suffix else y, start, f"l{layer}{suffix}")
                found.append(states.flip(-2) if suffix else states)
                ends.append(end)
            y = torch.cat(found, dim=-1)
            if layer < self.num_layers - 1:
                y = F.dropout(y, self.dropout, self.training)
        last = tuple(map(torch.stack, zip(*ends, strict=True)))
        return self.turned(y), last if len(last) > 1 else last[0]

    def _one_way(self, x: Tensor, start: list[Tensor], place: str) -> tuple[Tensor, list[Tensor]]:
        """Return the states (.., T, hidden) of one layer in one direction, and its last state and memory."""
        inputs, state = self._modules[f"inputs_{place}"], self._modules[f"state_{place}"]
        projected = self._modules.get(f"projected_{place}")
        assert inputs is not None and state is not None
        step = _STEPS[self.kind]
        given = inputs(x)
        h = start[0] if start else given.new_zeros(*x.shape[:-2], self.proj_size or self.hidden_size)
        memory = start[1:] or [given.new_zeros(*x.shape[:-2], self.hidden_size)] * (self.kind == "LSTM")
        states = []
        for one in given.unbind(dim=-2):
            h, *memory = step(one, state(h), h, *memory)
            h = h if projected is None else projected(h)
            states.append(h)
        return torch.stack(states, dim=-2), [h, *memory]


def _lstm(x: Tensor, of_state: Tensor, h: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
    del h
    enter, keep, new, out = (x + of_state).chunk(4, dim=-1)
    memory = keep.sigmoid() * memory + enter.sigmoid() * new.tanh()
    return out.sigmoid() * memory.tanh(), memory


def _gru(x: Tensor, of_state: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    (reset, keep, new), (of_reset, of_keep, of_new) = x.chunk(3, dim=-1), of_state.chunk(3, dim=-1)
    fresh = (new + (reset + of_reset).sigmoid() * of_new).tanh()
    share = (keep + of_keep).sigmoid()
    return ((1 - share) * fresh + share * h,)


_STEPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda x, of_state, h: ((x + of_state).tanh(),),
    "RNN_RELU": lambda x, of_state, h: ((x + of_state).relu(),),
}


class Heads(Rewritten):
    """`nn.MultiheadAttention` whose queries, keys and values have one width."""

    num_heads: int

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__(source)
        self.in_proj = _dense(source.in_proj_weight, source.in_proj_bias)
        self.out_proj = source.out_proj

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the output in the shape of `query`, and the weights if they are needed."""
        of_query = self.in_proj(self.turned(query)).chunk(3, dim=-1)
        of_key = of_query if key is query else self.in_proj(self.turned(key)).chunk(3, dim=-1)
        same = (of_query, query), (of_key, key)
        of_value = next((parts for parts, x in same if value is x), None)
        of_value = of_value or self.in_proj(self.turned(value)).chunk(3, dim=-1)
        parts = (of_query[0], of_key[1], of_value[2])
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2) for part in parts)
        if attn_mask is not None and attn_mask.dim() == 3 < q.dim():
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        mask = _added(attn_mask, None if key_padding_mask is None else key_padding_mask[..., None, None, :], q)
        if is_causal and mask is None:
            raise ModelError("MultiheadAttention with is_causal=True needs attn_mask, as PyTorch says")
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout, self.training)
            mixed = weights @ v
            weights = weights.mean(dim=-3) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        return self.turned(self.out_proj(mixed.transpose(-3, -2).flatten(-2))), weights


def _added(places: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """Return what two masks add to scores (.., heads, T, S), of the dtype of `like`; None without any."""
    found = None
    for mask in (places, padding):
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
            found = mask if found is None else found + mask
    return found


def rewritten(module: nn.Module) -> Rewritten | None:
    """Return `module` made of dense layers, or None if it is no module of this file or has rarely used options."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return None
    if isinstance(module, nn.RNNBase) and type(module) in (nn.LSTM, nn.GRU, nn.RNN):
        return Recurrent(module)
    if type(module) is nn.MultiheadAttention:
        if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
            raise ModelError(
                "MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn has no rule; leave them out, or make"
                " attention of dense layers and F.scaled_dot_product_attention"
            )
        return Heads(module)
    return None
