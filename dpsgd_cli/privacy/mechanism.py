"""What was released: frozen records of mechanisms, and nothing about what they cost.

A mechanism names the noise, relative to which sensitivity, on which sample of the data, under which
adjacency. Ledgers list mechanisms with counts; accountants (`privacy/accountants/`) price them.

Batching decides what ONE count of a `GaussianSum` means:

============  =========================================================================================
full          one noisy sum over all records
poisson       one noisy sum over a batch that holds each record independently with `sampling_rate`
fixed         one noisy sum over a batch of fixed size drawn uniformly without replacement
shuffle       one EPOCH: noisy sums over all the disjoint batches of a random partition whose choice
              does not depend on the data; by parallel composition it costs one Gaussian
              (Yu et al. 2019, Theorem 2 and Corollary 1)
============  =========================================================================================
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.recipe.batching import BATCHINGS, Adjacency, Batching
from dpsgd_cli.wording import quoted

PureSource = Literal["laplace", "exponential", "pure"]


@dataclass(frozen=True)
class GaussianSum:
    """Gaussian noise on a sum of per-record vectors, each of bounded L2 norm.

    `noise_multiplier` is the standard deviation of the noise over the L2 sensitivity OF THE SUM under
    `adjacency` (>= 0; 0 means no privacy). `sensitivity` (> 0) is that L2 sensitivity; it is recorded so
    that the released noise can be re-derived (`noise_multiplier * sensitivity`), and costs nothing.
    `sampling_rate` is in [0, 1]: the inclusion probability (poisson), the batch over the data size (fixed),
    and 1 for full and shuffle.
    """

    kind: ClassVar[str] = "gaussian"
    noise_multiplier: float
    adjacency: Adjacency
    batching: Batching = "full"
    sampling_rate: float = 1.0
    sensitivity: float = 1.0
    label: str = "gradient"

    def __post_init__(self) -> None:
        _require(self.noise_multiplier >= 0, "noise_multiplier", self.noise_multiplier, "at least 0")
        _require(0 <= self.sampling_rate <= 1, "sampling_rate", self.sampling_rate, "in [0, 1]")
        _require(0 < self.sensitivity < math.inf, "sensitivity", self.sensitivity, "positive and finite")
        _require_one_of(Adjacency, "adjacency", self.adjacency)
        _require_one_of(Batching, "batching", self.batching)
        if not self.sampled:
            _require(self.sampling_rate == 1, "sampling_rate", self.sampling_rate, f"1 for {self.batching} batching")

    @property
    def sampled(self) -> bool:
        """Whether the batch is a sample, whose rate amplifies the guarantee."""
        return BATCHINGS[self.batching].sampled


@dataclass(frozen=True)
class PureDP:
    """A release that is epsilon-DP; `source` says by what, so that accountants which know more of it can use that.

    `laplace`: ONE number plus Laplace noise of scale (its sensitivity)/epsilon. `exponential`: the exponential
    mechanism, or whatever else is epsilon-bounded-range. `pure`: anything else, report-noisy-min included.
    """

    kind: ClassVar[str] = "pure"
    epsilon: float
    adjacency: Adjacency
    source: PureSource = "pure"
    label: str = "selection"

    def __post_init__(self) -> None:
        _require(self.epsilon >= 0, "epsilon", self.epsilon, "at least 0")
        _require_one_of(Adjacency, "adjacency", self.adjacency)
        _require_one_of(PureSource, "source", self.source)


@dataclass(frozen=True)
class ApproximateDP:
    """A release that is known to be (epsilon, delta)-DP and nothing more (objective perturbation, ...)."""

    kind: ClassVar[str] = "approximate"
    epsilon: float
    delta: float
    adjacency: Adjacency
    label: str = "solution"

    def __post_init__(self) -> None:
        _require(self.epsilon >= 0, "epsilon", self.epsilon, "at least 0")
        _require(0 <= self.delta < 1, "delta", self.delta, "in [0, 1)")
        _require_one_of(Adjacency, "adjacency", self.adjacency)


@dataclass(frozen=True)
class ZeroConcentrated:
    """Releases that are rho-zCDP together and of which nothing more is known: what a filter in rho lets through.

    Their Renyi divergence is at most alpha rho at every order alpha (Bun and Steinke 2016, Definition 1.1).
    """

    kind: ClassVar[str] = "zcdp"
    rho: float
    adjacency: Adjacency
    label: str = "budget"

    def __post_init__(self) -> None:
        _require(self.rho >= 0, "rho", self.rho, "at least 0")
        _require_one_of(Adjacency, "adjacency", self.adjacency)


Mechanism = GaussianSum | PureDP | ApproximateDP | ZeroConcentrated
KINDS: dict[str, type[Mechanism]] = {cls.kind: cls for cls in (GaussianSum, PureDP, ApproximateDP, ZeroConcentrated)}


@dataclass(frozen=True)
class Release:
    """A mechanism used `count` times on the same data (adaptively)."""

    mechanism: Mechanism
    count: int = 1

    def __post_init__(self) -> None:
        _require(self.count >= 0 and int(self.count) == self.count, "count", self.count, "a whole number >= 0")


def to_record(release: Release) -> dict[str, Any]:
    """The JSON object of one ledger line; `from_record` inverts it exactly."""
    return {**mechanism_record(release.mechanism), "count": release.count}


def mechanism_record(mechanism: Mechanism) -> dict[str, Any]:
    """The JSON object of a mechanism; `from_record` reads it as used once."""
    return {"mechanism": mechanism.kind, **vars(mechanism)}


def from_record(record: dict[str, Any]) -> Release:
    """Read one ledger line; keys that belong to the ledger (trial, epoch, ...) are ignored.

    Raises PrivacyError for an unknown mechanism, a missing or an impossible value.
    """
    if not isinstance(record, dict):
        raise PrivacyError(f"a JSON object was expected, not {quoted(record)}")
    kind = record.get("mechanism")
    if not isinstance(kind, str) or kind not in KINDS:
        raise PrivacyError(f"unknown mechanism {quoted(kind)}; known: {', '.join(KINDS)}")
    fields = {field.name: field.type for field in dataclasses.fields(KINDS[kind]) if field.name in record}
    try:
        values = {name: _typed(name, record[name], "number" if f == "float" else "text") for name, f in fields.items()}
        return Release(KINDS[kind](**values), whole_number("count", record.get("count", 1)))
    except (TypeError, PrivacyError) as error:
        raise PrivacyError(f"damaged {kind} record: {error}") from None


_LARGEST = 2**53
"""Counts beyond this are no longer exact as floating-point numbers, which is how accountants multiply by them."""


def whole_number(name: str, value: object) -> int:
    """`value`, a whole number from 0 that a float holds exactly; PrivacyError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise PrivacyError(f"{name} is {quoted(value)}, but must be a whole number from 0 to 2^53")
    return value


def _typed(name: str, value: object, wanted: str) -> Any:
    """A float, or text; PrivacyError for what is no such thing in JSON, or too large for it."""
    if wanted == "text" and isinstance(value, str):
        return value
    if wanted == "number" and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise PrivacyError(f"{name} is {quoted(value)}, but must be a {wanted}")


def merge(releases: list[Release]) -> list[Release]:
    """Add up the counts of equal mechanisms, keeping the order of first use."""
    counts: dict[Mechanism, int] = {}
    for release in releases:
        counts[release.mechanism] = counts.get(release.mechanism, 0) + release.count
    return [Release(mechanism, count) for mechanism, count in counts.items() if count]


def _require(condition: bool, name: str, value: object, bound: str) -> None:
    if not condition or (isinstance(value, float) and math.isnan(value)):
        raise PrivacyError(f"{name} is {quoted(value)}, but must be {bound}")


def _require_one_of(names: Any, name: str, value: object) -> None:
    known = get_args(names)
    _require(value in known, name, value, f"one of {', '.join(known)}")
