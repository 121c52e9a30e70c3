"""The `model:` section. What each model is stands in `core/models.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dpsgd_cli.recipe.schema.base import Count, Section


class LinearModel(Section):
    kind: Literal["linear"] = "linear"
    bias: bool = Field(True, description="Whether the layer has a bias of its own.")


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


Model = Annotated[LinearModel | MlpModel | CnnModel | PythonModel, Field(discriminator="kind")]
