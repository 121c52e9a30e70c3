"""Models as people have them: norms and clipped sums of each are those of one example at a time; leaks are refused.

Those of transformers and peft need the extra [transformers] (`pip install 'dpsgd[transformers]'`).
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine import independence
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.errors import ModelError
from tests.engine.conftest import CPU, Case, numbers

THERE = all(importlib.util.find_spec(name) is not None for name in ("transformers", "peft"))
transformers: Any = importlib.import_module("transformers") if THERE else None
peft: Any = importlib.import_module("peft") if THERE else None
NEEDS = pytest.mark.skipif(not THERE, reason="needs transformers and peft: pip install 'dpsgd[transformers]'")

WORDS, LENGTH = 20, 6
ENCODER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": WORDS,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
DECODER = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 1}


class Tokens(nn.Module):
    """A model of transformers on tokens, of which 0 is padding; an encoder and decoder gets them on both sides."""

    def __init__(self, model: nn.Module, both: bool = False, masked: bool = True) -> None:
        super().__init__()
        self.model, self.both, self.masked = model, both, masked

    def forward(self, x: Tensor) -> Tensor:
        given = {"input_ids": x.long(), "attention_mask": (x != 0).long()}
        y: Tensor = self.model(**given, **({"decoder_input_ids": x.long()} if self.both else {})).logits
        return y


class Pixels(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x).logits
        return y


def bert(kind: str = "BertForSequenceClassification") -> nn.Module:
    return Tokens(getattr(transformers, kind)(transformers.BertConfig(**ENCODER)))


def lora(build: Callable[[], nn.Module], *targets: str, saved: list[str] | None = None) -> nn.Module:
    """`build`'s model with adapters by peft, whose second factors are not zero, as after a first step."""
    made: Any = build()
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=list(targets), lora_dropout=0.1, modules_to_save=saved)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)  # frozen parameters are those of a file, and so of every trial
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.2)
    made.model = peft.get_peft_model(made.model, config)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return made


def frozen_but_for_a_head() -> nn.Module:
    made: Any = bert()
    made.model.bert.requires_grad_(False)
    return made


def gpt2(kind: str = "GPT2LMHeadModel") -> nn.Module:
    config = transformers.GPT2Config(**DECODER, n_positions=32, n_embd=16, n_layer=2, n_head=4, pad_token_id=0)
    return Tokens(getattr(transformers, kind)(config))


def llama() -> nn.Module:
    own = ENCODER | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 1}
    return Tokens(transformers.LlamaForCausalLM(transformers.LlamaConfig(**own)))


def t5() -> nn.Module:
    config = transformers.T5Config(**DECODER, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
    return Tokens(transformers.T5ForConditionalGeneration(config), both=True)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        **DECODER, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, pad_token_id=0,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
    )  # fmt: skip
    return Tokens(transformers.BartForConditionalGeneration(config), both=True)


def vit() -> nn.Module:
    own = {name: value for name, value in ENCODER.items() if name not in ("vocab_size", "max_position_embeddings")}
    return Pixels(transformers.ViTForImageClassification(transformers.ViTConfig(**own, image_size=8, patch_size=4)))


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[4, 4, 8, 8], depths=[1, 1, 1, 1])
    return Pixels(transformers.ConvNextForImageClassification(config))


OF_TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "BERT": (bert, "tokens"),
    "BERT of tokens": (lambda: bert("BertForTokenClassification"), "tokens"),
    "RoBERTa": (
        lambda: Tokens(transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**ENCODER))), "tokens",
    ),
    "GPT-2, tied": (gpt2, "tokens"),
    "GPT-2 classifier": (lambda: gpt2("GPT2ForSequenceClassification"), "tokens"),
    "Llama": (llama, "tokens"),
    "T5": (t5, "tokens"),
    "BART": (bart, "tokens"),
    "ViT": (vit, "pixels"),
    "ConvNeXt": (convnext, "pixels"),
    "BERT with LoRA": (lambda: lora(bert, "query", "value"), "tokens"),
    "BERT with LoRA and its head": (lambda: lora(bert, "query", saved=["classifier"]), "tokens"),
    "GPT-2 with LoRA": (lambda: lora(gpt2, "c_attn"), "tokens"),
    "BERT, frozen but for a head": (frozen_but_for_a_head, "tokens"),
}  # fmt: skip


class Residual(nn.Module):
    """A basic block of ResNet-18 with group normalisation and activations in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(2, outputs)
        self.second, self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(2, outputs)
        self.act = nn.ReLU(inplace=True)
        self.skip = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(2, outputs))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.second(self.act(self.one(self.first(x)))))
        y += self.skip(x)
        z: Tensor = self.act(y)
        return z


def resnet18() -> nn.Module:
    widths = [4, 4, 4, 6, 6, 8, 8, 10, 10]
    blocks = [Residual(a, b, 1 + (a != b)) for a, b in itertools.pairwise(widths)]
    enter = [nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*enter, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 3))


class UNet(nn.Module):
    """Two levels, transposed convolutions on the way up, skips by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = self._pair(3, 4), self._pair(4, 6)
        self.up, self.join = nn.ConvTranspose2d(6, 4, 2, 2), self._pair(8, 4)
        self.out = nn.Conv2d(4, 2, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        kept = self.down(x)
        y: Tensor = self.out(self.join(torch.cat([kept, self.up(self.deep(F.max_pool2d(kept, 2)))], 1)))
        return y


class Reader(nn.Module):
    """A recurrent classifier of tokens."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 4, padding_idx=0)
        self.core: Any = kind(4, 3, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.core(self.table(x))[0].mean(1))
        return y


class Encoder(nn.Module):
    """`nn.TransformerEncoder` on tokens, with padding masked."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, 8), nn.Embedding(LENGTH, 8)
        self.core = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x) + self.places(torch.arange(x.shape[1]))
        y = self.core(y, src_key_padding_mask=x == 0)
        z: Tensor = self.last(y[:, 0])
        return z


class OneAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.last = nn.Embedding(WORDS, 8), nn.MultiheadAttention(8, 2, 0.1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x).transpose(0, 1)
        z: Tensor = self.last(self.mix(y, y, y)[0].mean(0))
        return z


class FtTransformer(nn.Module):
    """Gorishniy et al. (2021): each column is a token, weight and bias of its own, and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(5, 8))
        self.token = nn.Parameter(torch.randn(8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
        self.core, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight.unsqueeze(0) * x.unsqueeze(-1) + self.bias
        y = torch.cat([self.token.expand(len(y), 1, -1), y], dim=1)
        z: Tensor = self.last(self.core(y)[:, 0])
        return z


OF_TORCH: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ResNet-18 with GroupNorm": (resnet18, "pixels"),
    "U-Net": (UNet, "pixels"),
    "LSTM": (lambda: Reader(nn.LSTM), "tokens"),
    "GRU": (lambda: Reader(nn.GRU), "tokens"),
    "nn.TransformerEncoder": (Encoder, "tokens"),
    "nn.MultiheadAttention": (OneAttention, "tokens"),
    "FT-transformer": (FtTransformer, "columns"),
}
MODELS = {**OF_TORCH, **OF_TRANSFORMERS}
EVERY = [*OF_TORCH, *(pytest.param(name, marks=NEEDS) for name in OF_TRANSFORMERS)]


def rows_of(kind: str, name: str = "") -> Tensor:
    if kind == "tokens":
        rows = 1 + numbers(1, 3, LENGTH).mul(1e3).long().abs() % (WORDS - 1)
        rows[0, 1, -2:] = 0
        return rows
    side = 32 if name == "ConvNeXt" else 8
    return numbers(1, 3, 5) if kind == "columns" else numbers(1, 3, 3, side, side)


def without_dropout(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """In eval mode, so that one example at a time can be compared; `test_dropout.py` has the masks."""
    return lambda: build().eval()


pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@pytest.mark.parametrize("name", EVERY)
def test_norms_and_sums_are_those_of_one_example_at_a_time(name: str) -> None:
    """Three examples of three norms, where the bound clips all of them; and each one's norm, never below the truth."""
    build, kind = MODELS[name]
    x, y = rows_of(kind, name), torch.arange(3)[None]
    case = Case(without_dropout(build), x, y, norms=(0.5,))
    case.check()
    for row in range(3):
        alone = Case(without_dropout(build), x[:, [row]], y[:, [row]], clips=False)
        true = float(torch.cat([g.flatten() for g in alone.slow().values()]).norm())
        pack = alone.pack()
        pack.session.begin()
        with torch.enable_grad():
            alone.loss(pack(alone.x), alone.y).sum().backward()
        norm = float(torch.stack([layer.square_norms() for layer in pack.layers if layer.used]).sum().sqrt())
        assert true * (1 - 2e-7) <= norm <= true * 1.001


@pytest.mark.parametrize("name", EVERY)
def test_a_model_trains_with_its_dropout_and_a_leak_in_it_is_refused(name: str) -> None:
    """It passes its first tests as it is, and not with a millionth of the batch's mean added to its outputs."""
    build, kind = MODELS[name]
    x = rows_of(kind, name)
    x = x[0] if kind == "tokens" else x[0].float()
    independence.check_model(Pack(build, [0], Placement(CPU)), tuple(x.shape[1:]), x)

    def leaking() -> nn.Module:
        return Leak(build())

    with pytest.raises(ModelError, match="mixes examples"):
        independence.check_model(Pack(leaking, [0], Placement(CPU)), tuple(x.shape[1:]), x)


class Leak(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + 1e-6 * (y.mean(0, keepdim=True) - y)


@NEEDS
def test_what_lies_behind_the_rules_is_refused() -> None:
    """A weight of BERT used by itself, and an input changed after a layer has used it."""

    def used() -> nn.Module:
        made: Any = bert()
        made.model.classifier.forward = lambda x: F.linear(x, made.model.bert.pooler.dense.weight)
        return made

    x = rows_of("tokens")
    with pytest.raises((ModelError, AttributeError), match=r"used outside of the module|may not be used"):
        independence.check_model(Pack(used, [0], Placement(CPU)), (LENGTH,), x)


@NEEDS
@pytest.mark.parametrize("build", [bert, gpt2, lambda: lora(bert, "query")])
def test_a_model_of_transformers_works_in_bfloat16(build: Callable[[], nn.Module]) -> None:
    pack = Pack(lambda: copy.deepcopy(build()).eval(), [0], Placement(CPU))
    exact = pack(rows_of("tokens"))
    pack.work_in(torch.bfloat16)
    pack.session.begin()
    with torch.enable_grad():
        y = pack(rows_of("tokens"))
        y.sum().backward()
    assert float((y - exact).norm() / exact.norm()) < 0.1
    norm = torch.stack([layer.square_norms() for layer in pack.layers if layer.used]).sum(0)
    assert norm.dtype == torch.float32 and bool(norm.isfinite().all())
