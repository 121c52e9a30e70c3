"""The `model:` section. What each model is stands in `core/models.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dpsgd_cli.recipe.schema.base import Count, NonNegative, Positive, Section


class LinearModel(Section):
    kind: Literal["linear"] = "linear"
    bias: bool = Field(True, description="Whether the layer has a bias of its own.")


class ConvexModel(Section):
    """A convex problem: one linear output, a loss of its margin (labels become -1 and 1) or residual, an L2 term.

    The objective is mean loss + l2 / 2 |w|^2 over |w| <= radius, the constant column's weight included in w.
    """

    kind: Literal["convex"] = "convex"
    loss: Literal["logistic", "hinge", "huber-svm", "squared"] = Field(
        "logistic", description="logistic, hinge and huber-svm for two classes; squared for regression."
    )
    l2: NonNegative = Field(0.0, description="Coefficient of |w|^2 / 2, which makes the objective strongly convex.")
    radius: Positive | None = Field(None, description="Weights are projected to the ball of this radius.")
    bias: bool = Field(True, description="Append a constant column of 1.")
    huber_width: Positive = Field(0.5, description="Half-width of huber-svm's parabola.")
    target_bound: Positive = Field(1.0, description="squared: public bound on a target's size (larger are clamped).")


class MlpModel(Section):
    kind: Literal["mlp"] = "mlp"
    hidden: list[Count] = Field(default=[100], description="Widths of the hidden layers.")
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = Field("relu", description="Between the layers.")


class CnnModel(Section):
    """The small convolutional network of Papernot et al. (2021): two convolutions, two dense layers."""

    kind: Literal["cnn"] = "cnn"
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = Field("tanh", description="Between the layers.")


class PythonModel(Section):
    kind: Literal["python"] = "python"
    file: str = Field(description="A Python file, relative to the recipe.")
    factory: str = Field("build", description="Function `(input_shape, outputs) -> torch.nn.Module` in that file.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments of the factory.")


Model = Annotated[LinearModel | ConvexModel | MlpModel | CnnModel | PythonModel, Field(discriminator="kind")]
