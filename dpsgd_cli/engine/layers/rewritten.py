"""Layers of PyTorch that use several weights in one operation, rewritten as dense layers with the same parameters.

`nn.LSTM`, `nn.GRU` and `nn.RNN` become two dense layers for each layer and direction: one on all inputs at once, one on
the state, step by step. The dense rule adds up the steps of an example before
clipping, so an example is a whole sequence. `nn.MultiheadAttention` becomes a dense layer for queries, keys and values
and one for the output. Formulae, arguments and results are PyTorch's (`tests/engine/layers/test_rewritten.py` compares
them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpsgd_cli.engine.apart import attention
from dpsgd_cli.engine.layers.affine import Shift
from dpsgd_cli.engine.layers.base import Described, Session
from dpsgd_cli.errors import ModelError


def _dense(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return a dense layer that holds these parameters themselves; two modules if only one of them is trained."""
    if bias is not None and weight.requires_grad != bias.requires_grad:
        shift = Shift(len(bias))
        shift.value = bias  # type: ignore[assignment]
        return nn.Sequential(_dense(weight, None), shift)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer


class Rewritten(nn.Module):
    """Base class: `parts` of the source by name, whose rules the pack finds. It runs on all examples at once.

    `axis`: where the source has its batch axis, among the axes of a batch.
    """

    def __init__(self, source: nn.Module, session: Session, axis: int) -> None:
        super().__init__()
        self.session, self.axis, self.training = session, axis, source.training
        for name, value in vars(source).items():
            if isinstance(value, bool | int | float | str | type(None)):
                setattr(self, name, value)
        self._parameters = {
            name: p if p is None else Described.of(p, type(source).__name__, name)  # type: ignore[misc]
            for name, p in source._parameters.items()
        }

    def rows(self, x: Tensor) -> tuple[Tensor, bool]:
        """Return (N, T, F) of a sequence (1, T, F), (T, 1, F) or (T, F), and whether it had a batch axis."""
        batched = x.dim() == 3
        x = self.session.passes.fold(x)
        if batched and x.shape[1 + self.axis] != 1:
            raise ModelError(
                f"{type(self).__name__} is called with {x.shape[1 + self.axis]} sequences for one example; give"
                f" batch_first=True, or put examples on axis {self.axis}"
            )
        return (x.squeeze(1 + self.axis) if batched else x), batched


class Recurrent(Rewritten):
    """`nn.LSTM`, `nn.GRU` or `nn.RNN` of any number of layers, in one or both directions."""

    def __init__(self, source: nn.RNNBase, session: Session) -> None:
        super().__init__(source, session, 0 if source.batch_first else 1)
        self.num_layers, self.hidden_size, self.proj_size = source.num_layers, source.hidden_size, source.proj_size
        self.dropout = source.dropout
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
        passes = self.session.passes
        sequence, batched = self.rows(x)
        given = [] if hx is None else [passes.fold(one) for one in (hx if isinstance(hx, tuple) else (hx,))]
        given = [one.squeeze(2) if batched else one for one in given]
        with passes.outside():
            y, last = self._run(sequence, given)
            y = y.unsqueeze(1 + self.axis) if batched else y
            last = [one.unsqueeze(2) if batched else one for one in last]
        states = tuple(passes.unfold(one) for one in last)
        return passes.unfold(y), states if len(states) > 1 else states[0]

    def _run(self, x: Tensor, given: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        ends: list[list[Tensor]] = []
        masks = self.session.passes.masks
        for layer in range(self.num_layers):
            found = []
            for direction, suffix in enumerate(("", "_reverse")[: self.directions]):
                start = [one[:, layer * self.directions + direction] for one in given]
                y, end = self._one_way(x.flip(1) if suffix else x, start, f"l{layer}{suffix}")
                found.append(y.flip(1) if suffix else y)
                ends.append(end)
            x = torch.cat(found, dim=-1)
            if self.dropout and self.training and layer < self.num_layers - 1 and masks.active:
                x = masks.dropped(x, self.dropout, x.dim())
        return x, [torch.stack(parts, dim=1) for parts in zip(*ends, strict=True)]

    def _one_way(self, x: Tensor, start: list[Tensor], place: str) -> tuple[Tensor, list[Tensor]]:
        """Return the states (N, T, hidden) of one layer in one direction, and its last state and memory."""
        inputs, state = self._modules[f"inputs_{place}"], self._modules[f"state_{place}"]
        projected = self._modules.get(f"projected_{place}")
        assert inputs is not None and state is not None
        step = _STEPS[self.kind]
        given = inputs(x)
        h = start[0] if start else given.new_zeros(len(x), self.proj_size or self.hidden_size)
        memory = start[1:] or [given.new_zeros(len(x), self.hidden_size)] * (self.kind == "LSTM")
        states = []
        for one in given.unbind(dim=1):
            h, *memory = step(one, state(h), h, *memory)
            h = h if projected is None else projected(h)
            states.append(h)
        return torch.stack(states, dim=1), [h, *memory]


def _lstm(x: Tensor, of_state: Tensor, h: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
    del h
    enter, keep, new, out = (x + of_state).chunk(4, dim=1)
    memory = keep.sigmoid() * memory + enter.sigmoid() * new.tanh()
    return out.sigmoid() * memory.tanh(), memory


def _gru(x: Tensor, of_state: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    (reset, keep, new), (of_reset, of_keep, of_new) = x.chunk(3, dim=1), of_state.chunk(3, dim=1)
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

    def __init__(self, source: nn.MultiheadAttention, session: Session) -> None:
        super().__init__(source, session, 0 if source.batch_first else 1)
        self.num_heads, self.dropout = source.num_heads, source.dropout
        self.in_proj = _dense(source.in_proj_weight, source.in_proj_bias)
        self.out_proj = source.out_proj

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the output in the shape of `query`, and the weights if they are needed."""
        passes, masks = self.session.passes, self.session.passes.masks
        q, batched = self.rows(query)
        k = q if key is query else self.rows(key)[0]
        v = k if value is key else self.rows(value)[0]
        places, padding = (None if mask is None else passes.fold(mask) for mask in (attn_mask, key_padding_mask))
        dropout = self.dropout if self.dropout and self.training and masks.active else 0.0
        with passes.outside():
            parts = self.in_proj(q).chunk(3, dim=-1)
            if v is not q:
                of_key = parts if k is q else self.in_proj(k).chunk(3, dim=-1)
                of_value = of_key if v is k else self.in_proj(v).chunk(3, dim=-1)
                parts = (parts[0], of_key[1], of_value[2])
            split = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts]
            mask = self._mask(places, padding, split[0])
            if is_causal and mask is None:
                raise ModelError("MultiheadAttention with is_causal=True needs attn_mask, as PyTorch says")
            weights = None
            if need_weights:
                scores = split[0] @ split[1].transpose(-1, -2) * split[0].shape[-1] ** -0.5
                weights = torch.softmax(scores if mask is None else scores + mask, -1)
                weights = masks.dropped(weights, dropout, weights.dim()) if dropout else weights
                mixed = weights @ split[2]
                weights = weights.mean(dim=1) if average_attn_weights else weights
                weights = weights.unsqueeze(1) if batched else weights
            else:
                mixed = attention(split[0], split[1], split[2], mask, dropout, masks)
            y = self.out_proj(mixed.transpose(1, 2).flatten(2))
            y = y.unsqueeze(1 + self.axis) if batched else y
        return passes.unfold(y), None if weights is None else passes.unfold(weights)

    def _mask(self, places: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """Return what is added to the scores (N, heads, T, S), from (N, T, S) or (N, heads, T, S), and (N, [1,] S)."""
        found = None
        for mask in (
            None if places is None else places.unsqueeze(1) if places.dim() == 3 else places,
            None if padding is None else padding.reshape(len(padding), 1, 1, -1),
        ):
            if mask is not None:
                if mask.dtype == torch.bool:
                    mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
                found = mask if found is None else found + mask
        return found


def rewritten(module: nn.Module, session: Session) -> Rewritten | None:
    """Return `module` made of dense layers, or None if it is no module of this file or has rarely used options."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return None
    if isinstance(module, nn.RNNBase) and type(module) in (nn.LSTM, nn.GRU, nn.RNN):
        return Recurrent(module, session)
    if type(module) is nn.MultiheadAttention:
        if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
            raise ModelError(
                "MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn has no rule; leave them out, or make"
                " attention of dense layers and F.scaled_dot_product_attention"
            )
        return Heads(module, session)
    return None
