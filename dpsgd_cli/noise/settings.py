"""`privacy.noise`: correlation of the noise between steps, and all that depends on its kind.

To add a kind: a class here, and its name in the union `Noise`. The class states the batching that its theorem covers,
the number of groups that records are split into, and the charge of each epoch: noise multipliers and the uses of each.
`made` names the function in `noise/price.py` that makes its numbers (weights, predicted errors). Draws are in
`noise/correlation.py`.

The mechanism of a use, and the theorem that prices it, are `CorrelatedSums` in `accounting/mechanism.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import Batching
from dpsgd_cli.common.sections import Count, Section
from dpsgd_cli.errors import PrivacyError

Charges = list[tuple[float, int]]
"""Charges of one epoch: pairs of a noise multiplier and its number of uses."""


class IndependentNoise(Section):
    """Independent noise in every step: the default."""

    kind: Literal["independent"] = "independent"


class CorrelatedNoise(Section):
    """Base of the kinds of noise that are correlated between steps.

    `batching`: the only batching that the theorem covers. `made`: `module:name` of the function that makes the
    correlation from the settings, the number of epochs and the steps per epoch.
    """

    must_state = ("batching", "made")
    batching: ClassVar[Batching]
    made: ClassVar[str]
    kind: str

    @property
    @abstractmethod
    def groups(self) -> int:
        """Return the number of groups that records are split into; a step samples from one of them."""

    @abstractmethod
    def block_length(self, steps: int) -> int:
        """Return the number of steps over which noise is correlated, for `steps` steps per epoch."""

    @abstractmethod
    def charges_by_epoch(self, multipliers: Sequence[float], steps: int) -> list[Charges]:
        """Return the charges of each epoch of `steps` steps, given the epochs' noise multipliers."""


class BandedNoise(CorrelatedNoise):
    """Noise correlated between steps fewer than `bands` apart, amplified by sampling (arXiv 2306.08153)."""

    batching = "poisson"
    made = "dpsgd_cli.noise.price:banded"
    kind: Literal["banded"] = "banded"
    bands: Count | Literal["auto"] = Field(
        "auto",
        description="b: noise is correlated over b steps, and records are split into b groups; auto: the number with"
        " the least predicted error at the budget.",
    )
    weights: Literal["sqrt", "optimised"] = Field(
        "optimised",
        description="The first b coefficients of (1 - x)^(-1/2), or those with the least predicted error.",
    )

    @property
    def groups(self) -> int:
        if self.bands == "auto":
            raise PrivacyError("privacy.noise.bands is auto: it has no value until the plan has chosen it")
        return self.bands

    def block_length(self, steps: int) -> int:
        del steps
        return self.groups

    def charges_by_epoch(self, multipliers: Sequence[float], steps: int) -> list[Charges]:
        """Return one use per cycle of b steps, charged in the epoch of its first step, before anything is released.

        A record sampled in cycle r (steps r b to (r + 1) b - 1) moves the noisy sums of steps r b to (r + 2) b - 2 and
        no others. So the least noise of these steps, as far as training goes, bounds the cost of the cycle. An epoch in
        which no cycle begins is charged no use. The first charge of every epoch states the epoch's own noise.
        """
        bands, last = self.groups, len(multipliers) * steps - 1
        found: list[Charges] = []
        for epoch, own in enumerate(multipliers):
            begun, end = -(-epoch * steps // bands), -(-(epoch + 1) * steps // bands)
            ended = end if epoch + 1 == len(multipliers) else ((epoch + 1) * steps + 1) // bands - 1
            # cycles from `across` on also move steps of later epochs
            across = min(max(ended, begun), end)
            counts = {own: across - begun}
            for cycle in range(across, end):
                reach = min((cycle + 2) * bands - 2, last) // steps
                least = min(multipliers[epoch : reach + 1])
                counts[least] = counts.get(least, 0) + 1
            found.append(list(counts.items()))
        return found


class OnePassNoise(CorrelatedNoise):
    """Noise correlated over all steps of an epoch and independent between epochs."""

    @property
    def groups(self) -> int:
        return 1

    def block_length(self, steps: int) -> int:
        return steps

    def charges_by_epoch(self, multipliers: Sequence[float], steps: int) -> list[Charges]:
        """Return one use per epoch, in which each record takes part in one step."""
        del steps
        return [[(own, 1)] for own in multipliers]


class ToeplitzNoise(OnePassNoise):
    """DP-FTRL without amplification: the coefficients of (1 - x)^(-1/2), one for each step of an epoch."""

    batching = "shuffle"
    made = "dpsgd_cli.noise.price:toeplitz"
    kind: Literal["toeplitz"] = "toeplitz"


class TreeNoise(OnePassNoise):
    """DP-FTRL with the binary tree of Kairouz et al. (2021): sums over steps have the noise of few nodes."""

    batching = "shuffle"
    made = "dpsgd_cli.noise.price:tree"
    kind: Literal["tree"] = "tree"


Noise = Annotated[IndependentNoise | BandedNoise | ToeplitzNoise | TreeNoise, Field(discriminator="kind")]


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
