"""Sections of PATE: unpublished teachers, rules that release their votes, and the student that learns from these.

A rule says how the votes of n teachers on one query become a released label, or none, and what that costs. One record
is in one teacher's part (`methods/pate/run.py`), so neighbouring data change at most one vote: one count falls by 1 and
another rises by 1, or nothing changes. That holds whether a record is added, removed or replaced, so every adjacency
has the same sensitivities: of all K counts L1 2 and L2 sqrt(2), of their maximum 1.

Each rule is one class. It states the charge for asking a query, the charge for answering it, the two decisions, and, if
a theorem gives one, a bound that depends on the votes (`methods/pate/votes.py`).

Sources: Papernot et al. 2017 (arXiv 1610.05755), Papernot et al. 2018 (arXiv 1802.08908).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, PureDP
from dpsgd_cli.common.sections import Count, NonNegative, Positive, Section
from dpsgd_cli.engine.settings import Model
from dpsgd_cli.methods.dp_sgd.settings import Averaging, Gradient
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch
from dpsgd_cli.schedules.learning_rate import Rate

if TYPE_CHECKING:
    import numpy as np

ALL_COUNTS_L1 = 2.0
ALL_COUNTS_L2 = math.sqrt(2.0)
LARGEST_COUNT = 1.0

NoiseScale = Positive | Literal["auto"]


class VoteNoise(Protocol):
    """Source of noise for the statistics of one query; each purpose is used at most once in it (`noise/run.py`)."""

    def gaussian(self, purpose: str, exact: np.ndarray, mechanism: GaussianSum) -> np.ndarray:
        """Return `exact` plus Gaussian noise of the mechanism's multiplier times its sensitivity."""

    def laplace(self, purpose: str, exact: np.ndarray, epsilon: float, sensitivity: float, changed: int) -> np.ndarray:
        """Return `exact` plus Laplace noise of scale `sensitivity` / `epsilon`; a record changes `changed` numbers."""


def gaussian(noise: float, sensitivity: float, adjacency: Adjacency, label: str) -> GaussianSum:
    """Return the mechanism of noise of standard deviation `noise` on votes of L2 `sensitivity`."""
    return GaussianSum(noise / sensitivity, adjacency, sensitivity=sensitivity, label=label)


class AggregationRule(Section):
    """Base of the aggregations. `votes` are counts, shape (K,), or (Q, K) for Q queries; K >= 2."""

    must_state = ("asked", "answered", "accepts", "label")
    kind: str

    if TYPE_CHECKING:  # a field that each rule declares with its own values
        noise: NoiseScale

    @property
    def scale(self) -> float:
        """Return the noise on each count, which the plan has replaced by a number if it was `auto`."""
        assert not isinstance(self.noise, str)
        return self.noise

    @abstractmethod
    def asked(self, adjacency: Adjacency) -> Mechanism | None:
        """Return the release of every query, answered or not; charged before `accepts` is called. None: no release."""

    @abstractmethod
    def answered(self, adjacency: Adjacency) -> Mechanism | None:
        """Return the further release of an answer; charged before `label` is called. None: no release."""

    @property
    def is_adaptive(self) -> bool:
        """True if the spending of a run depends on what was released: answers cost, and queries may stay unanswered."""
        return self.asked("add-remove") is not None and self.answered("add-remove") is not None

    @abstractmethod
    def accepts(self, votes: np.ndarray, noise: VoteNoise) -> bool:
        """Return whether the query is answered. May read nothing that `asked` does not charge."""

    @abstractmethod
    def label(self, votes: np.ndarray, noise: VoteNoise) -> int:
        """Return the released label."""

    @abstractmethod
    def renyi(self, votes: np.ndarray, answered: np.ndarray) -> np.ndarray | None:
        """Return the divergence at each of `votes.ORDERS`, added up over queries (Q, K), some `answered`. NON-PRIVATE.

        Returns None if no theorem gives one.
        """


class LnMax(AggregationRule):
    """The class with the largest Laplace-noised count (Papernot et al. 2017)."""

    # It releases the index (section 2.1). Counts have L1 sensitivity 2, so all noisy counts, and the index with them,
    # are (2 / b)-DP, where b is the scale.
    kind: Literal["lnmax"] = "lnmax"
    noise: NoiseScale = Field(
        20.0, description="Scale of the Laplace noise on each count; auto: the least for the budget."
    )

    def asked(self, adjacency: Adjacency) -> None:
        """Return None: every query is answered."""

    def accepts(self, votes: np.ndarray, noise: VoteNoise) -> bool:
        del votes, noise
        return True

    def answered(self, adjacency: Adjacency) -> PureDP:
        return PureDP(ALL_COUNTS_L1 / self.scale, adjacency, "pure", "vote")

    def label(self, votes: np.ndarray, noise: VoteNoise) -> int:
        epsilon = ALL_COUNTS_L1 / self.scale
        return int(noise.laplace("vote", votes, epsilon, ALL_COUNTS_L1, changed=2).argmax())

    def renyi(self, votes: np.ndarray, answered: np.ndarray) -> np.ndarray:
        from dpsgd_cli.methods.pate.votes import laplace_log_q, laplace_renyi

        del answered
        return laplace_renyi(laplace_log_q(votes, self.scale), self.scale).sum(axis=0)


class GnMax(AggregationRule):
    """The class with the largest Gaussian-noised count (Papernot et al. 2018)."""

    # It releases the index (section 4.1), a function of all noisy counts. Those are one Gaussian mechanism of L2
    # sensitivity sqrt(2), so of noise multiplier sigma / sqrt(2).
    kind: Literal["gnmax"] = "gnmax"
    noise: NoiseScale = Field(
        40.0, description="Standard deviation of the noise on each count; auto: the least for the budget."
    )

    def asked(self, adjacency: Adjacency) -> None:
        """Return None: every query is answered."""

    def accepts(self, votes: np.ndarray, noise: VoteNoise) -> bool:
        del votes, noise
        return True

    def answered(self, adjacency: Adjacency) -> GaussianSum:
        return gaussian(self.scale, ALL_COUNTS_L2, adjacency, "vote")

    def label(self, votes: np.ndarray, noise: VoteNoise) -> int:
        return int(noise.gaussian("vote", votes, self.answered("add-remove")).argmax())

    def renyi(self, votes: np.ndarray, answered: np.ndarray) -> np.ndarray:
        from dpsgd_cli.methods.pate.votes import max_log_q, max_renyi

        return max_renyi(max_log_q(votes[answered], self.scale), self.scale).sum(axis=0)


class ConfidentGnMax(AggregationRule):
    """GNMax for queries whose largest noisy count reaches a threshold (Papernot et al. 2018)."""

    # It releases, for every query, whether its largest count plus N(0, sigma_1^2) reaches the threshold: a Gaussian
    # mechanism of sensitivity 1 (Algorithm 1). For a query that reaches it, it also releases the answer of `gnmax`,
    # with noise of its own. The spending depends on how many queries reach the threshold, so only the most that the
    # filter ever admits is a bound (Smith and Thakurta 2022).
    kind: Literal["confident-gnmax"] = "confident-gnmax"
    threshold: NonNegative = Field(200.0, description="T: votes that the leading class must have, noise included.")
    threshold_noise: Positive = Field(150.0, description="sigma_1: standard deviation of that noise.")
    noise: NoiseScale = Field(
        40.0,
        description="sigma_2: standard deviation of the noise on each count of an answer; auto: the least with which"
        " the budget allows `answers`.",
    )
    answers: Count | None = Field(None, description="Most queries that are answered; left out, as many as pass.")

    def asked(self, adjacency: Adjacency) -> GaussianSum:
        return gaussian(self.threshold_noise, LARGEST_COUNT, adjacency, "threshold")

    def accepts(self, votes: np.ndarray, noise: VoteNoise) -> bool:
        noisy = noise.gaussian("threshold", votes.max(keepdims=True), self.asked("add-remove"))
        return bool(noisy[0] >= self.threshold)

    def answered(self, adjacency: Adjacency) -> GaussianSum:
        return gaussian(self.scale, ALL_COUNTS_L2, adjacency, "vote")

    def label(self, votes: np.ndarray, noise: VoteNoise) -> int:
        return int(noise.gaussian("vote", votes, self.answered("add-remove")).argmax())

    def renyi(self, votes: np.ndarray, answered: np.ndarray) -> np.ndarray:
        from dpsgd_cli.methods.pate.votes import max_log_q, max_renyi, threshold_renyi

        told = max_renyi(max_log_q(votes[answered], self.scale), self.scale).sum(axis=0)
        return told + threshold_renyi(votes.max(axis=1), self.threshold, self.threshold_noise).sum(axis=0)


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
