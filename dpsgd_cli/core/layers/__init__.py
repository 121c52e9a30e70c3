"""Layer rules, one file each; `RULES` is the registry, searched in order, and `Fallback` takes all other layers."""

from dpsgd_cli.core.layers.affine import Affine, Offset, Shift
from dpsgd_cli.core.layers.base import Layer, Ruled, Session
from dpsgd_cli.core.layers.conv import Conv
from dpsgd_cli.core.layers.embedding import Embedding
from dpsgd_cli.core.layers.fallback import Fallback
from dpsgd_cli.core.layers.linear import Linear
from dpsgd_cli.core.layers.recurrent import GRU, LSTM
from dpsgd_cli.core.layers.standardised import Standardised, WeightStandardisedConv2d

RULES: tuple[type[Layer], ...] = (Linear, Conv, Embedding, Affine, Standardised, Offset)

__all__ = [
    "GRU", "LSTM", "RULES", "Affine", "Conv", "Embedding", "Fallback", "Layer", "Linear", "Offset", "Ruled", "Session",
    "Shift", "Standardised", "WeightStandardisedConv2d",
]  # fmt: skip
