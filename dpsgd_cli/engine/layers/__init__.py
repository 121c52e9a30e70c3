"""One file per layer rule; `RULES` is the registry, asked in order, and `Own` takes the parameters of other modules."""

from dpsgd_cli.engine.layers.affine import Affine, Normalised, Offset, Shift
from dpsgd_cli.engine.layers.base import Described, Layer, Ruled, Session, UsedByItselfError
from dpsgd_cli.engine.layers.conv import Conv
from dpsgd_cli.engine.layers.embedding import Embedding
from dpsgd_cli.engine.layers.linear import Linear
from dpsgd_cli.engine.layers.own import Own
from dpsgd_cli.engine.layers.rewritten import rewritten
from dpsgd_cli.engine.layers.standardised import Standardised, WeightStandardisedConv2d
from dpsgd_cli.engine.layers.tied import Tied

RULES: tuple[type[Layer], ...] = (Linear, Conv, Embedding, Normalised, Affine, Standardised, Offset)

__all__ = [
    "RULES", "Affine", "Conv", "Described", "Embedding", "Layer", "Linear", "Offset", "Own", "Ruled", "Session",
    "Shift", "Standardised", "Tied", "UsedByItselfError", "WeightStandardisedConv2d", "rewritten",
]  # fmt: skip
