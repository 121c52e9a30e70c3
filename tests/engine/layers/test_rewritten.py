"""PyTorch's recurrent layers and attention, rewritten: their own numbers, and gradients of one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.errors import ModelError
from tests.engine.conftest import Case, Of, numbers

Run = Callable[[Any, Tensor], Tensor]


def first(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.layer(x)[0]
    return y


def time_first(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.layer(x.transpose(0, 1))[0].transpose(0, 1)
    return y


def attention_with_weights(m: Any, x: Tensor) -> Tensor:
    y, weights = m.layer(x, x, x)
    return torch.cat([y.flatten(1), weights.flatten(1)], 1)


def from_a_state(m: Any, x: Tensor) -> Tensor:
    y, (h, c) = m.layer(x, (x.new_ones(1, len(x), 2), x.new_ones(1, len(x), 3)))
    return torch.cat([y.flatten(1), h[0], c[0]], 1)


def last_states(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.layer(x)[1].transpose(0, 1)
    return y


def causal(m: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x)
    y: Tensor = m.layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    return y


def crossed(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.layer(x[:, :2], x, 2 * x, key_padding_mask=x[:, :, 0] > 1)[0]
    return y


def encoder_layer(**settings: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(4, 2, 6, **{"dropout": 0.0, "batch_first": True} | settings)


def masked(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.layer(x, src_key_padding_mask=x[..., 0] > 1)
    return y


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return module


FROZEN: tuple[tuple[type[nn.RNNBase], tuple[str, ...]], ...] = (
    (nn.LSTM, ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")),
    (nn.LSTM, ("weight_hh",)),
    (nn.LSTM, ("weight_ih", "bias_hh")),
    (nn.GRU, ("bias_ih", "weight_hh")),
)
CASES: dict[str, tuple[Run, Callable[[], nn.Module]]] = {
    **{
        f"{kind.__name__}, {told}": (run, lambda kind=kind, given=given: kind(4, 3, **given))  # type: ignore[misc]
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for told, run, given in (
            ("two layers, both ways", first, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
            ("time first, no bias", time_first, {"bias": False}),
        )
    },
    "LSTM from a state, projected": (from_a_state, lambda: nn.LSTM(4, 3, proj_size=2, batch_first=True)),
    "GRU's last states": (last_states, lambda: nn.GRU(4, 3, 2, batch_first=True)),
    **{
        f"{kind.__name__} with frozen {', '.join(names)}": (
            first,
            lambda kind=kind, names=names: frozen(kind(4, 3, 2, batch_first=True), *names),  # type: ignore[misc]
        )
        for kind, names in FROZEN
    },
    "attention with a frozen bias": (
        attention_with_weights,
        lambda: frozen(nn.MultiheadAttention(4, 2, batch_first=True), "in_proj_bias"),
    ),
    "attention": (attention_with_weights, lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
    "causal attention": (causal, lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
    "attention to others": (crossed, lambda: nn.MultiheadAttention(4, 2, batch_first=True, bias=False)),
    "encoder": (lambda m, x: m.layer(x), lambda: nn.TransformerEncoder(encoder_layer(), 2)),
    "encoder of padded rows": (masked, lambda: nn.TransformerEncoder(encoder_layer(norm_first=True), 2)),
    "encoder, time first": (
        lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1),
        lambda: nn.TransformerEncoder(encoder_layer(batch_first=False), 1),
    ),
    "encoder and decoder": (
        lambda m, x: m.layer(x, x[:, :3]),
        lambda: nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True),
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_sums_are_those_of_pytorchs_own(name: str) -> None:
    run, layer = CASES[name]

    def build() -> nn.Module:
        made = Of(run, layer=layer())
        for parameter in made.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.5)
            else:  # the same for all seeds
                parameter.data = torch.arange(parameter.numel()).view_as(parameter).sin() / 2
        return made

    model = build()
    rows = numbers(2, 3, 4, 4) if "state" not in name else numbers(1, 3, 4, 4)
    case = Case(build, rows, torch.arange(6).view(2, 3)[: len(rows)], norms=(0.5,), seeds=range(len(rows)))
    case.check()
    pack = Case(lambda: copy.deepcopy(model), rows[:1], torch.zeros(1, 3)).pack()
    torch.testing.assert_close(pack(rows[:1])[0], copy.deepcopy(model).double()(rows[0]))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.MultiheadAttention(4, 2, kdim=3), "MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn"),
        (nn.RReLU(), "RReLU draws from a stream that no seed of a trial controls"),
    ],
)
def test_rarely_used_options_are_refused_by_name(module: nn.Module, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        Case(lambda: nn.Sequential(nn.Linear(3, 3), module), numbers(1, 2, 3), torch.zeros(1, 2)).pack()


def test_packed_sequences_are_refused() -> None:
    def packed(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.layer(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4]), batch_first=True))[0].data
        return y

    with pytest.raises(ModelError):
        Case(lambda: Of(packed, layer=nn.GRU(4, 3, batch_first=True)), numbers(1, 1, 4, 4), torch.zeros(1, 1)).fast()
