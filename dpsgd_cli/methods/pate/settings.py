"""Sections of PATE: unpublished teachers, the release of their votes, and the student that learns from these.

`methods/pate/votes.py` has the costs of aggregations, `methods/pate/run.py` the training.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Count, Fraction, NonNegative, Positive, Section
from dpsgd_cli.engine.settings import Model
from dpsgd_cli.methods.descriptor import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch
from dpsgd_cli.methods.dp_sgd.settings import Averaging, Gradient
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


class Supervised(Training):
    """A student that learns from the answered queries."""

    kind: Literal["supervised"] = "supervised"
    rounds: ClassVar[int] = 1

    def most_lessons(self, queries: int, public: int) -> int:
        """Return the largest number of records that a student may learn from."""
        del public
        return queries


class LabelSpreading(Training):
    """A student that learns after the answers are spread to all public records, along a graph of nearest neighbours.

    Source: Zhou et al. 2004, by scikit-learn's LabelSpreading. It reads public features and released labels only, so it
    costs no privacy. Neighbours at distance d are joined with weight exp(-(d / (width m))^2), where m is the median
    distance of all joined pairs.

    If teachers are less sure of some classes, these get fewer answers and lose records to the others. `balanced`
    corrects this for classes of about equal size (class mass normalisation; Zhu, Ghahramani and Lafferty 2003). In each
    further round the student's predictions for all public records are spread instead of the answers, and a new student
    learns from the result: neighbours outvote the errors of one student.
    """

    kind: Literal["label-spreading"] = "label-spreading"
    neighbours: Count = Field(10, description="Of each record in the graph.")
    width: Positive = Field(0.6, description="Of the weights, in median distances between neighbours.")
    clamping: Fraction = Field(0.99, description="alpha: how much a record takes from its neighbours at a time.")
    rounds: Count = Field(1, description="Students that learn one after the other, each for all `epochs`.")
    later_clamping: Fraction = Field(0.9, description="alpha of later rounds, in which every record has a label.")
    balanced: bool = Field(
        False, description="Divide what reaches a record of each class by the number of the class's answers."
    )

    def most_lessons(self, queries: int, public: int) -> int:
        """Return the largest number of records that a student may learn from."""
        del queries
        return public


Student = Annotated[Supervised | LabelSpreading, Field(discriminator="kind")]


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
    student: Student = Field(
        description="How the published model learns.", examples=[{"kind": "supervised", "epochs": 30}]
    )
