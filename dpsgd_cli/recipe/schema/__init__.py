"""What a recipe may say: one pydantic model per section, every field described, every default here.

Not here: reading YAML (`loading.py`), what a recipe costs (`privacy/plan.py`), how it runs (`experiment.py`).
`privacy:` holds everything that can change the guarantee; `runtime:` nothing that can.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpsgd_cli.recipe.schema.base import Count, Delta, Interval, NonNegative, Positive, Section, Values
from dpsgd_cli.recipe.schema.convex import (
    DpAgdMethod,
    FullBatch,
    MajorityMethod,
    NonPrivateMethod,
    ObjectivePerturbationMethod,
    OutputPerturbationMethod,
    PrivGeneMethod,
)
from dpsgd_cli.recipe.schema.data import PREPROCESS, Bias, Data, OneHot, Pca, PreprocessStep, Scale, Split, UnitNorm
from dpsgd_cli.recipe.schema.method import (
    Adam,
    AllIterates,
    Averaging,
    DpGdMethod,
    DpSgdMethod,
    Ema,
    FullGradient,
    GdMethod,
    Gradient,
    Method,
    Optimizer,
    PythonMethod,
    Sgd,
    SgdAdvMethod,
    SgdMaMethod,
    SgdMethod,
    TailIterates,
)
from dpsgd_cli.recipe.schema.model import CnnModel, ConvexModel, LinearModel, MlpModel, Model, PythonModel
from dpsgd_cli.recipe.schema.privacy import (
    Auto,
    Clipping,
    EpsilonBudget,
    ExponentialDecay,
    FlatClipping,
    PerLayerClipping,
    PolynomialDecay,
    Privacy,
    RhoBudget,
    Schedule,
    StepDecay,
    TimeDecay,
    Uniform,
)
from dpsgd_cli.recipe.schema.runtime import Runtime

__all__ = [
    "PREPROCESS",
    "Adam",
    "AllIterates",
    "Auto",
    "Averaging",
    "Bias",
    "Clipping",
    "CnnModel",
    "ConvexModel",
    "Count",
    "Data",
    "Delta",
    "DpAgdMethod",
    "DpGdMethod",
    "DpSgdMethod",
    "Ema",
    "EpsilonBudget",
    "ExponentialDecay",
    "FlatClipping",
    "FullBatch",
    "FullGradient",
    "GdMethod",
    "Gradient",
    "Interval",
    "LinearModel",
    "MajorityMethod",
    "Method",
    "MlpModel",
    "Model",
    "NonNegative",
    "NonPrivateMethod",
    "ObjectivePerturbationMethod",
    "OneHot",
    "Optimizer",
    "OutputPerturbationMethod",
    "Pca",
    "PerLayerClipping",
    "PolynomialDecay",
    "Positive",
    "PreprocessStep",
    "PrivGeneMethod",
    "Privacy",
    "PythonMethod",
    "PythonModel",
    "Recipe",
    "RhoBudget",
    "Runtime",
    "Scale",
    "Schedule",
    "Section",
    "Sgd",
    "SgdAdvMethod",
    "SgdMaMethod",
    "SgdMethod",
    "Split",
    "StepDecay",
    "TailIterates",
    "TimeDecay",
    "Uniform",
    "UnitNorm",
    "Values",
]


class Recipe(Section):
    """One experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)] = Field(
        description="Names the result directory."
    )
    description: str = Field("", description="The question that the experiment answers.")
    data: Data
    model: Model
    method: Method
    privacy: Privacy | None = Field(None, description="Needed by every private method, refused by `sgd`.")
    runtime: Runtime = Field(Runtime(), description="Where and how fast it runs; never what is guaranteed.")
    epochs: Count | Literal["until-budget"] = Field("until-budget", description="How long to train.")
    seed: int | None = Field(None, ge=0, description="First trial's seed (trial i uses seed + i); none: secure.")
    repeats: Count = Field(1, description="Trials, trained together.")
    save_model: bool = Field(False, description="Write model.safetensors.")

    @model_validator(mode="after")
    def _method_and_privacy_agree(self) -> Recipe:
        problems = []
        if self.method.kind == "sgd" and self.privacy is not None:
            problems.append("privacy: method sgd has no privacy; leave this section out or use dp-sgd")
        if self.method.kind == "sgd" and self.epochs == "until-budget":
            problems.append("epochs: method sgd has no budget to stop at; give a number")
        if self.method.kind == "dp-sgd" and self.privacy is None:
            problems.append("method: dp-sgd needs a privacy section")
        if self.privacy is not None:
            if self.privacy.noise_source == "secure" and self.seed is not None:
                problems.append("privacy.noise_source: secure cannot be seeded; leave seed out")
            if self.privacy.noise_source == "seeded" and self.seed is None:
                problems.append("privacy.noise_source: seeded needs a seed")
        if problems:
            raise ValueError("\n".join(problems))
        return self
