"""`privacy.noise`: correlation of the noise between steps.

A strategy is a matrix C; `noise/price.py` defines it, its sensitivity and its charges. The proof of every price is
`CorrelatedSums` in `accounting/mechanism.py`; `noise/correlation.py` draws the noise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import Batching
from dpsgd_cli.common.sections import Count, Section
from dpsgd_cli.common.text_format import any_of
from dpsgd_cli.errors import PrivacyError

BATCHINGS: tuple[Batching, ...] = ("poisson", "shuffle", "random-allocation")
"""Batchings that a theorem about correlated noise covers."""


class IndependentNoise(Section):
    """Independent noise in every step: the default."""

    kind: Literal["independent"] = "independent"


class CorrelatedNoise(Section):
    """Noise that is correlated between steps, by a banded lower triangular Toeplitz matrix C: `noise/price.py`."""

    kind: Literal["banded"] = "banded"
    bands: Count | Literal["auto"] = Field(
        "auto",
        description="b: C has so many bands, and b - 1 vectors of past noise are kept; auto: the number with the least"
        " predicted error at the budget.",
    )

    def groups_for(self, batching: Batching) -> int:
        """Return the number of groups that records are split into; a step draws from one of them.

        1 while the bands are `auto`. Raises PrivacyError for a batching that no theorem covers.
        """
        if batching not in BATCHINGS:
            raise PrivacyError(
                f"no guarantee for privacy.noise {self.kind} on {batching} batches: its theorems are about"
                f" {any_of(list(BATCHINGS))} ones; use them for method.batching, or leave privacy.noise out"
            )
        return 1 if batching == "shuffle" or self.bands == "auto" else self.bands


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
