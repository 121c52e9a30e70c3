"""One file per layer rule; `RULES` is the registry, asked in order, and `Own` takes the parameters of other modules."""

from dpsgd_cli.engine.layers.affine import Affine, Normalised
from dpsgd_cli.engine.layers.base import Described, Layer, Ruled, Session, UsedByItselfError
from dpsgd_cli.engine.layers.conv import Conv
from dpsgd_cli.engine.layers.embedding import Embedding
from dpsgd_cli.engine.layers.linear import Linear
from dpsgd_cli.engine.layers.own import Own
from dpsgd_cli.engine.layers.rewritten import rewritten
from dpsgd_cli.engine.layers.standardised import Standardised, WeightStandardisedConv2d
from dpsgd_cli.engine.layers.tied import Tied

RULES: tuple[type[Layer], ...] = (Linear, Conv, Embedding, Normalised, Affine, Standardised)

__all__ = [
    "RULES", "Affine", "Conv", "Described", "Embedding", "Layer", "Linear", "Own", "Ruled", "Session",
    "Standardised", "Tied", "UsedByItselfError", "WeightStandardisedConv2d", "rewritten",
]  # fmt: skip
