"""One file per layer rule; `RULES` is the registry, asked in order, and `Fallback` takes the rest."""

from dpsgd_cli.engine.layers.affine import Affine, Offset, Shift
from dpsgd_cli.engine.layers.base import Layer, Ruled, Session
from dpsgd_cli.engine.layers.conv import Conv
from dpsgd_cli.engine.layers.embedding import Embedding
from dpsgd_cli.engine.layers.fallback import Fallback
from dpsgd_cli.engine.layers.linear import GRU, LSTM, Linear
from dpsgd_cli.engine.layers.standardised import Standardised, WeightStandardisedConv2d

RULES: tuple[type[Layer], ...] = (Linear, Conv, Embedding, Affine, Standardised, Offset)

__all__ = [
    "GRU", "LSTM", "RULES", "Affine", "Conv", "Embedding", "Fallback", "Layer", "Linear", "Offset", "Ruled", "Session",
    "Shift", "Standardised", "WeightStandardisedConv2d",
]  # fmt: skip
