"""The `model:` section. `engine/models.py` builds the models."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dpsgd_cli.common.sections import Auto, Count, NonNegative, Positive, Section
from dpsgd_cli.engine.loss_bounds import LOSSES, Loss, LossKind


class ModelKind(Section):
    """Base of the kinds of models: properties that are known before a model is built.

    `auto_tunable`: the formulas of `training/auto_rule.py`, which were tested on such models, choose `auto` settings.
    """

    auto_tunable: ClassVar[bool] = False

    @property
    def layers(self) -> int | None:
        """Return the number of layers with parameters, for per-layer clipping; None if unknown before building."""
        return None


class OneLayer(ModelKind):
    """Settings that linear models share."""

    auto_tunable = True
    kind: str
    bias: bool | Auto = Field(
        "auto", description="Whether there is a constant beside the features; auto: unless the last step is bin."
    )

    @property
    def layers(self) -> int:
        return 1

    @property
    def has_bias(self) -> bool:
        """Return True if there is a constant beside the features; also while `bias` is `auto`."""
        return self.bias is not False

    @staticmethod
    def by_residual(outputs: int) -> float:
        """Return the largest norm of a record's loss gradient by the outputs, over its residual: 1, or sqrt(2) with one
        output per class."""
        return math.sqrt(2) if outputs > 1 else 1.0


class LinearModel(OneLayer):
    """One linear layer with an output for each class."""

    kind: Literal["linear"] = "linear"


class ConvexModel(OneLayer):
    """A convex problem: one linear output, a loss of its margin (labels become -1 and 1) or residual, an L2 term.

    The objective is mean loss + l2 / 2 |w|^2 over |w| <= radius, the constant column's weight included in w.
    """

    kind: Literal["convex"] = "convex"
    loss: Loss = Field(
        "logistic",
        description="logistic, hinge and huber-svm for two classes; squared, huber and quantile for regression.",
    )
    l2: NonNegative = Field(0.0, description="Coefficient of |w|^2 / 2, which makes the objective strongly convex.")
    radius: Positive | None = Field(None, description="Weights are projected to the ball of this radius.")
    huber_width: Positive = Field(
        0.5,
        description="Half-width of the parabola of huber-svm, or of huber in half widths of target_bounds.",
    )
    quantile: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="quantile: the share of targets below the prediction; 0.5 predicts the median."
    )
    target_bound: Positive = Field(1.0, description="Regression: public bound on a target's size (larger are clamped).")

    @property
    def known(self) -> LossKind:
        """Return the bounds and properties of the loss that prices and metrics use."""
        return LOSSES[self.loss]


class MlpModel(ModelKind):
    auto_tunable = True
    kind: Literal["mlp"] = "mlp"
    hidden: list[Count] = Field(default=[100], description="Widths of the hidden layers.")
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = Field("relu", description="Between the layers.")

    @property
    def layers(self) -> int:
        return len(self.hidden) + 1


class CnnModel(ModelKind):
    """A small convolutional network of Papernot et al. (2021) or, on scattering features, Tramer and Boneh (2021)."""

    kind: Literal["cnn"] = "cnn"
    layout: Literal["mnist", "cifar10", "scattering-mnist", "scattering-cifar10"] = Field(
        "mnist", description="Which one; scattering-*: for data.features of kind scattering."
    )
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = Field("tanh", description="Between the layers.")

    @property
    def layers(self) -> int:
        return {"mnist": 4, "cifar10": 8, "scattering-mnist": 4, "scattering-cifar10": 3}[self.layout]


class WrnModel(ModelKind):
    """The wide residual network of De et al. (2022): WRN-16-4 by default."""

    kind: Literal["wrn"] = "wrn"
    depth: Annotated[int, Field(ge=10, multiple_of=2)] = Field(16, description="Layers: 4 more than a multiple of 6.")
    width: Count = Field(4, description="Filters, in units of 16, 32 and 64 in the three stages.")
    groups: Annotated[int, Field(ge=1, le=16)] = Field(16, description="Of channels that are normalised together.")

    @model_validator(mode="after")
    def _whole_blocks(self) -> WrnModel:
        if self.depth % 6 != 4:
            near = 6 * round((self.depth - 4) / 6) + 4
            raise ValueError(f"depth: {self.depth} is not 4 more than a multiple of 6; try {near}")
        if 16 % self.groups:
            raise ValueError(
                f"groups: {self.groups} does not divide the first layer's 16 channels; use 1, 2, 4, 8 or 16"
            )
        return self


class VitModel(ModelKind):
    """A small vision transformer."""

    kind: Literal["vit"] = "vit"
    patch: Count = Field(4, description="Side of the square patches that become tokens, in pixels.")
    dim: Count = Field(128, description="Width of a token.")
    depth: Count = Field(4, description="Blocks of attention and two dense layers.")
    heads: Count = Field(4, description="Attention heads; divides dim.")
    expansion: Count = Field(2, description="Width of a block's hidden dense layer, in units of dim.")
    pool: Literal["token", "mean"] = Field("token", description="What is classified: a class token or the mean token.")

    @model_validator(mode="after")
    def _whole_heads(self) -> VitModel:
        if self.dim % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide dim {self.dim}")
        return self


class Weights(Section):
    """Numbers in a user's own model that are not drawn from the recipe's seed. The recipe declares them public."""

    file: str | None = Field(
        None,
        description="Tensors by the model's names (.safetensors, or .pt with a state dict), relative to the recipe.",
        examples=["public.safetensors"],
    )
    constant: list[str] = Field(
        default_factory=list,
        description="Parameters and buffers that code computes without any data: a table of positions, say.",
        examples=[["positions"]],
    )
    public: bool = Field(
        description="Must be written as true: no private record shaped these numbers.", examples=[True]
    )

    @model_validator(mode="after")
    def _declared(self) -> Weights:
        if not self.public:
            raise ValueError(
                "public: weights that private records shaped are outside of the statement; true declares that none did"
            )
        if self.file is None and not self.constant:
            raise ValueError("file: name a file of weights, or list what code computes as constant")
        return self


class PythonModel(ModelKind):
    kind: Literal["python"] = "python"
    file: str = Field(description="A Python file, relative to the recipe.", examples=["net.py"])
    factory: str = Field("build", description="Function `(input_shape, outputs) -> torch.nn.Module` in that file.")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of the factory.", examples=[{"width": 64}]
    )
    weights: Weights | None = Field(
        None,
        description="What the model holds that is not drawn from the seed; loaded into it by name.",
        examples=[{"file": "public.safetensors", "public": True}],
    )


Model = Annotated[
    LinearModel | ConvexModel | MlpModel | CnnModel | WrnModel | VitModel | PythonModel, Field(discriminator="kind")
]
