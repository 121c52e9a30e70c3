"""Sections of PATE: unpublished teachers, the release of their votes, and the student that learns from these.

`methods/pate/votes.py` has the costs of aggregations, `methods/pate/run.py` the training.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Count, NonNegative, Positive, Section
from dpsgd_cli.engine.settings import Model
from dpsgd_cli.methods.dp_sgd.settings import Averaging, Gradient
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch
from dpsgd_cli.schedules.learning_rate import Rate


class AggregationKind(Section):
    """Base of the aggregations. `rule`: `module:name` of the class that states the release and its cost."""

    must_state = ("rule",)
    rule: ClassVar[str]
    kind: str


NoiseScale = Positive | Literal["auto"]


class LnMax(AggregationKind):
    """The class with the largest Laplace-noised count (Papernot et al. 2017)."""

    rule = "dpsgd_cli.methods.pate.votes:LaplaceMax"
    kind: Literal["lnmax"] = "lnmax"
    noise: NoiseScale = Field(
        20.0, description="Scale of the Laplace noise on each count; auto: the least for the budget."
    )


class GnMax(AggregationKind):
    """The class with the largest Gaussian-noised count (Papernot et al. 2018)."""

    rule = "dpsgd_cli.methods.pate.votes:GaussianMax"
    kind: Literal["gnmax"] = "gnmax"
    noise: NoiseScale = Field(
        40.0, description="Standard deviation of the noise on each count; auto: the least for the budget."
    )


class ConfidentGnMax(AggregationKind):
    """GNMax for queries whose largest noisy count reaches a threshold (Papernot et al. 2018)."""

    rule = "dpsgd_cli.methods.pate.votes:ConfidentMax"
    kind: Literal["confident-gnmax"] = "confident-gnmax"
    threshold: NonNegative = Field(200.0, description="T: votes that the leading class must have, noise included.")
    threshold_noise: Positive = Field(150.0, description="sigma_1: standard deviation of that noise.")
    noise: NoiseScale = Field(
        40.0,
        description="sigma_2: standard deviation of the noise on each count of an answer; auto: the least with which"
        " the budget allows `answers`.",
    )
    answers: Count | None = Field(None, description="Most queries that are answered; left out, as many as pass.")


Aggregation = Annotated[LnMax | GnMax | ConfidentGnMax, Field(discriminator="kind")]


class Training(Gradient):
    """Non-private training, for models that are never published or learn from public records only."""

    must_state = ()

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = Field(description="How long to train.")
    batching: Literal["shuffle", "full", "poisson"] = Field("full", description="How records reach a step.")
    batch_size: Count | None = Field(None, description="Expected (poisson) or exact (shuffle) size, none (full).")
    learning_rate: Positive | Rate = Field(0.1, description="Step length, or how it changes with the epoch.")
    averaging: Averaging | None = Field(
        None, description="Use averaged weights instead of the last.", examples=[{"kind": "tail", "fraction": 0.5}]
    )


class Teachers(Training):
    """Training of every teacher on its part."""

    count: Annotated[int, Field(ge=2)] = Field(description="n: teachers, and parts of the training records.")
    model: Model | None = Field(None, description="Left out, the student's (`model`).", examples=[{"kind": "linear"}])


class PateMethod(FullBatch):
    """Private aggregation of teacher ensembles: teachers on disjoint parts vote, a student learns the noisy results."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.pate.run:Pate",
        planner="dpsgd_cli.methods.pate.price:pate",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        discovers="names",
        only_convex=False,
        per_trial_keys=(*ITS_BUDGET, "method.aggregation"),
    )
    kind: Literal["pate"] = "pate"
    teachers: Teachers = Field(
        description="Trained without privacy, never published.", examples=[{"count": 250, "epochs": 30}]
    )
    aggregation: Aggregation = Field(description="How a query's votes are released.")
    queries: Count | None = Field(None, description="Public records that are asked about; left out, all of them.")
    student: Training = Field(description="How the published model learns from the answers.", examples=[{"epochs": 30}])
