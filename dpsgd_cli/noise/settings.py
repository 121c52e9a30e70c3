"""`privacy.noise`: correlation of the noise between steps.

A strategy is a matrix C; `noise/price.py` defines it, its sensitivity and its charges. To add a kind of strategy: its
name in `StrategyKind`, its record in `STRATEGIES`, and the functions that the record names. The proof of every price is
`CorrelatedSums` in `accounting/mechanism.py`; `noise/correlation.py` draws the noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import Batching
from dpsgd_cli.common.sections import Count, Section
from dpsgd_cli.common.text_format import any_of
from dpsgd_cli.errors import PrivacyError

StrategyKind = Literal["banded", "inverse-banded", "buffered"]
Weights = Literal["sqrt", "optimised"]
Workload = Literal["iterates", "average"]


class IndependentNoise(Section):
    """Independent noise in every step: the default."""

    kind: Literal["independent"] = "independent"


@dataclass(frozen=True, kw_only=True)
class StrategyRecord:
    """Properties of a kind of strategy. No field has a default.

    `batchings`: those that a theorem covers. `made`: `module:name` of the function that makes the numbers of a
    `noise.price.NoiseStrategy` from a `noise.weights.Wanted`.
    """

    batchings: tuple[Batching, ...]
    made: str


STRATEGIES: dict[StrategyKind, StrategyRecord] = {
    "banded": StrategyRecord(
        batchings=("poisson", "shuffle", "random-allocation"), made="dpsgd_cli.noise.weights:banded"
    ),
    # columns of C reach to the end, so a record's blocks of rows meet: Poisson batches are not covered
    "inverse-banded": StrategyRecord(
        batchings=("shuffle", "random-allocation"), made="dpsgd_cli.noise.weights:inverse_banded"
    ),
    "buffered": StrategyRecord(batchings=("shuffle", "random-allocation"), made="dpsgd_cli.noise.weights:buffered"),
}


class CorrelatedNoise(Section):
    """Noise that is correlated between steps, by a lower triangular Toeplitz matrix C: `noise/price.py`."""

    kind: StrategyKind = Field(
        description="banded: C has `bands` bands. inverse-banded: C^-1 has (BISR; 2 bands keep one vector)."
        " buffered: BLT, which keeps bands - 1 decaying sums of past noise."
    )
    bands: Count | Literal["auto"] = Field(
        "auto",
        description="b: b - 1 vectors of past noise are kept; auto: the number with the least predicted error at the"
        " budget.",
    )
    weights: Weights = Field(
        "optimised",
        description="sqrt: the coefficients of (1 - x)^(-1/2), or of its inverse; optimised: those with the least"
        " predicted error.",
    )
    workload: Workload = Field(
        "iterates",
        description="What the predicted error is about: the weights after each step, or the average over half of the"
        " training.",
    )
    groups: Count | None = Field(
        None,
        description="For random-allocation: number of groups of records, which take turns, so that two steps of a"
        " record are as far apart. A banded strategy has as many as bands.",
    )

    def groups_for(self, batching: Batching) -> int:
        """Return the number of groups that records are split into; a step draws from one of them.

        1 while the bands of banded noise are `auto`. Raises PrivacyError for a batching that no theorem covers, and for
        groups that are not given.
        """
        covered = STRATEGIES[self.kind].batchings
        if batching not in covered:
            raise PrivacyError(
                f"no guarantee for privacy.noise {self.kind} on {batching} batches: its theorems are about"
                f" {any_of(list(covered))} ones; use them for method.batching, or leave privacy.noise out"
            )
        if batching == "shuffle":
            return 1
        if self.kind == "banded":
            if self.groups is not None:
                raise PrivacyError("privacy.noise.groups: banded noise has as many groups as bands; leave groups out")
            return 1 if self.bands == "auto" else self.bands
        if self.groups is None:
            raise PrivacyError(
                f"privacy.noise.groups: {self.kind} noise on {batching} batches needs it: the number of groups that"
                " take turns, a divisor of the steps of an epoch"
            )
        return self.groups


Noise = Annotated[IndependentNoise | CorrelatedNoise, Field(discriminator="kind")]


def numbers_of_bands(most: int) -> list[int]:
    """Return the numbers that `bands: auto` tries: 1, 2, 3, 4, 6, 8, 12, 16, ... up to `most`.

    >>> numbers_of_bands(20)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    powers = [1 << k for k in range(most.bit_length())]
    return sorted(bands for bands in {*powers, *(3 * power for power in powers)} if bands <= most)


NoiseSource = Literal["seeded", "secure"]


def noise_source(*seeds: int | None) -> NoiseSource:
    """Return the source of the randomness under these seeds: `secure`, the operating system, only if all are None."""
    return "secure" if all(seed is None for seed in seeds) else "seeded"


def describe_noise(source: NoiseSource) -> str:
    """Return the words for a noise source in statements: noise that a seed can repeat is for experiments."""
    if source == "secure":
        return "secure"
    return "seeded (experiment: who knows the seed can take the noise away, and runs with one seed share their noise)"
