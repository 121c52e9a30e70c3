"""The `model:` section. `engine/models.py` builds the models."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dpsgd_cli.common.sections import Auto, Count, NonNegative, Positive, Section
from dpsgd_cli.engine.loss_bounds import LOSSES, Loss, LossKind

MOST_NAMED = 30
"""Most classes with metrics of their own, and with a confusion matrix in a private evaluation."""


class ModelKind(Section):
    """Base of the kinds of models: properties that are known before a model is built.

    `auto_tunable`: the formulas of `training/auto_rule.py`, which were tested on such models, choose `auto` settings.
    """

    auto_tunable: ClassVar[bool] = False

    @property
    def layers(self) -> int | None:
        """Return the number of layers with parameters, for per-layer clipping; None if unknown before building."""
        return None


LossName = Literal["cross-entropy", "bce", "next-token", "squared", "huber", "poisson"]


LOSS_TASKS: dict[LossName, tuple[str, ...]] = {
    "cross-entropy": ("classification", "token-classification", "next-token"),
    "bce": ("multi-label",),
    "next-token": ("next-token",),
    "squared": ("regression",),
    "huber": ("regression",),
    "poisson": ("regression",),
}
"""Values of `data.task` that each loss is for; `engine/losses.py` has the losses."""


class NamedLoss(Section):
    """A loss with settings of its own."""

    kind: LossName = Field(description="Which one.")
    smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="cross-entropy, next-token, bce: share of each label that is spread over all classes."
    )
    ignore_index: int | None = Field(
        None, description="cross-entropy, next-token: a class whose places do not count; negative ones never do."
    )
    width: Positive = Field(0.5, description="huber: half-width of the parabola, in half widths of target_bounds.")

    @model_validator(mode="after")
    def _settings_of_its_kind(self) -> NamedLoss:
        of = {
            "smoothing": ("cross-entropy", "next-token", "bce"),
            "ignore_index": ("cross-entropy", "next-token"),
            "width": ("huber",),
        }
        for key, kinds in of.items():
            changed = getattr(self, key) != type(self).model_fields[key].default
            if changed and self.kind not in kinds:
                raise ValueError(f"{key}: is for {', '.join(kinds)}, not {self.kind}; leave it out")
        return self


class PythonLoss(Section):
    """A function of the user's own. It is called with one example at a time, so it cannot look at another."""

    python: str = Field(description="A Python file, relative to the recipe.", examples=["losses.py"])
    function: str = Field("loss", description="Function `(outputs, label) -> tensor with one number` in that file.")


LossSettings = LossName | NamedLoss | PythonLoss


class NetworkModel(ModelKind):
    """Settings that all models but convex ones share."""

    loss: LossSettings | None = Field(
        None,
        description="Loss of one example; left out, that of data.task. It changes no price: an example's gradient is"
        " clipped, whatever its loss.",
    )


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


class LinearModel(OneLayer, NetworkModel):
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


class MlpModel(NetworkModel):
    auto_tunable = True
    kind: Literal["mlp"] = "mlp"
    hidden: list[Count] = Field(default=[100], description="Widths of the hidden layers.")
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = Field("relu", description="Between the layers.")

    @property
    def layers(self) -> int:
        return len(self.hidden) + 1


class CnnModel(NetworkModel):
    """A small convolutional network of Papernot et al. (2021)."""

    auto_tunable = True
    kind: Literal["cnn"] = "cnn"
    layout: Literal["mnist", "cifar10"] = Field("mnist", description="Which one.")
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = Field("tanh", description="Between the layers.")

    @property
    def layers(self) -> int:
        return {"mnist": 4, "cifar10": 8}[self.layout]


class WrnModel(NetworkModel):
    """The wide residual network of De et al. (2022): WRN-16-4 by default."""

    auto_tunable = True
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


def check_public(public: bool) -> None:
    """Raise ValueError unless weights from outside of a recipe are declared public."""
    if not public:
        raise ValueError(
            "public: weights that private records shaped are outside of the statement; true declares that none did"
        )


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
        check_public(self.public)
        if self.file is None and not self.constant:
            raise ValueError("file: name a file of weights, or list what code computes as constant")
        return self


class InputArray(Section):
    """One of several named arrays of which an input consists."""

    shape: list[Count] = Field(description="Shape of one record's array.", examples=[[128]])
    kind: Literal["integer", "real"] = Field("integer", description="Tokens and masks are integers, pixels are real.")


class OwnModel(NetworkModel):
    """Base of models whose code is not this package's: they run on one example at a time, and are tested."""


class PythonModel(OwnModel):
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


class Lora(Section):
    """Low-rank adapters (Hu et al. 2022): W + (alpha / rank) B A beside each target; A and B train, W does not."""

    rank: Count = Field(8, description="Rank of B A.")
    alpha: Positive = Field(16, description="Scale of B A, in units of 1 / rank.")
    targets: Annotated[list[str], Field(min_length=1)] = Field(
        description="Dense layers by the end of their names: [query, value] for BERT, [c_attn] for GPT-2.",
        examples=[["query", "value"]],
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Share of an adapter's inputs set to 0.")


class HuggingFaceModel(OwnModel):
    """A model of transformers in a local folder. Nothing is downloaded; the weights must be safetensors."""

    kind: Literal["huggingface"] = "huggingface"
    folder: str = Field(
        description="Folder that save_pretrained wrote, relative to the recipe.", examples=["models/bert"]
    )
    task: Literal["sequence-classification", "token-classification", "causal-lm", "image-classification"] = Field(
        description="What the model is used for."
    )
    public: bool = Field(description="Must be written as true: no private record shaped the numbers in the folder.")
    lora: Lora | None = Field(
        None,
        description="Train adapters, the head and new layers; left out, all layers.",
        examples=[{"rank": 8, "targets": ["query", "value"]}],
    )
    freeze: list[str] = Field(
        default_factory=list,
        description="Patterns of parameters that do not train.",
        examples=[["bert.embeddings.*"]],
    )
    dtype: Literal["bfloat16"] | None = Field(
        None, description="Precision of passes, as runtime.dtype; parameters, norms, sums and noise stay float32."
    )

    @model_validator(mode="after")
    def _declared(self) -> HuggingFaceModel:
        check_public(self.public)
        return self


Model = Annotated[
    LinearModel | ConvexModel | MlpModel | CnnModel | WrnModel | PythonModel | HuggingFaceModel,
    Field(discriminator="kind"),
]
