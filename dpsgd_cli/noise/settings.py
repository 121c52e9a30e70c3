"""`privacy.noise`: how the noise of one step goes with that of others, and all that depends on its kind.

A kind of noise is one class here, and its name in the union `Noise`. The class owns the batching that its theorem is
about, into how many groups records are split, and what each epoch is charged: how often one use of which noise
multiplier. Its numbers (weights, predicted errors) stand in `noise/price.py`, its draws in
`noise/correlation.py`; both are named by `made`.

What each use is, and the theorem that prices it: `accounting/mechanism.py`, `CorrelatedSums`.
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
"""Of one epoch: noise multipliers, and how many uses of each."""


class IndependentNoise(Section):
    """Every step has noise of its own: what is drawn where nothing is said."""

    kind: Literal["independent"] = "independent"


class CorrelatedNoise(Section):
    """What every kind offers whose steps have noise in common.

    `batching`: the only one that its theorem covers. `made`: `module:name` of what makes its correlation from the
    settings, the epochs and the steps of each.
    """

    must_state = ("batching", "made")
    batching: ClassVar[Batching]
    made: ClassVar[str]
    kind: str

    @property
    @abstractmethod
    def groups(self) -> int:
        """How many groups records are split into, of which a step samples one."""

    @abstractmethod
    def span(self, steps: int) -> int:
        """Over how many steps noise is correlated, where an epoch has `steps`."""

    @abstractmethod
    def charges(self, multipliers: Sequence[float], steps: int) -> list[Charges]:
        """What each epoch of `steps` steps is charged, whose noise multipliers are `multipliers`."""


class BandedNoise(CorrelatedNoise):
    """Noise of fewer than `bands` steps apart is correlated; amplified by sampling (arXiv 2306.08153)."""

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

    def span(self, steps: int) -> int:
        del steps
        return self.groups

    def charges(self, multipliers: Sequence[float], steps: int) -> list[Charges]:
        """One use a cycle of b steps, charged in the epoch that its first step is in, before any of it is released.

        A record that cycle r samples (steps r b to (r + 1) b - 1) moves the noisy sums of steps r b to (r + 2) b - 2
        and no others, so the least noise of those steps, as far as there are so many, bounds what the cycle costs.
        An epoch in which no cycle begins is charged no use; the first charge of every epoch says its own noise.
        """
        bands, last = self.groups, len(multipliers) * steps - 1
        found: list[Charges] = []
        for epoch, own in enumerate(multipliers):
            begun, end = -(-epoch * steps // bands), -(-(epoch + 1) * steps // bands)
            ended = end if epoch + 1 == len(multipliers) else ((epoch + 1) * steps + 1) // bands - 1
            # cycles from `across` on move steps of later epochs, too
            across = min(max(ended, begun), end)
            counts = {own: across - begun}
            for cycle in range(across, end):
                reach = min((cycle + 2) * bands - 2, last) // steps
                least = min(multipliers[epoch : reach + 1])
                counts[least] = counts.get(least, 0) + 1
            found.append(list(counts.items()))
        return found


class OnePassNoise(CorrelatedNoise):
    """Noise correlated over all the steps of an epoch, and independent of that of every other epoch."""

    @property
    def groups(self) -> int:
        return 1

    def span(self, steps: int) -> int:
        return steps

    def charges(self, multipliers: Sequence[float], steps: int) -> list[Charges]:
        """One use an epoch, in which each record takes part in one step."""
        del steps
        return [[(own, 1)] for own in multipliers]


class ToeplitzNoise(OnePassNoise):
    """DP-FTRL without amplification: the coefficients of (1 - x)^(-1/2), as many as an epoch has steps."""

    batching = "shuffle"
    made = "dpsgd_cli.noise.price:toeplitz"
    kind: Literal["toeplitz"] = "toeplitz"


class TreeNoise(OnePassNoise):
    """DP-FTRL with the binary tree of Kairouz et al. (2021): sums of steps have noise of few nodes."""

    batching = "shuffle"
    made = "dpsgd_cli.noise.price:tree"
    kind: Literal["tree"] = "tree"


Noise = Annotated[IndependentNoise | BandedNoise | ToeplitzNoise | TreeNoise, Field(discriminator="kind")]


def numbers_of_bands(most: int) -> list[int]:
    """What `bands: auto` tries, fewest first: 1, 2, 3, 4, 6, 8, 12, 16, ... up to `most`.

    >>> numbers_of_bands(20)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    powers = [1 << k for k in range(most.bit_length())]
    return sorted(bands for bands in {*powers, *(3 * power for power in powers)} if bands <= most)


NoiseSource = Literal["seeded", "secure"]


def noise_source(*seeds: int | None) -> NoiseSource:
    """Where randomness comes from that these seeds decide: the operating system only where none is given."""
    return "secure" if all(seed is None for seed in seeds) else "seeded"


def describe_noise(source: NoiseSource) -> str:
    """The same as every statement says it: what a seed can repeat is an experiment."""
    if source == "secure":
        return "secure"
    return "seeded (experiment: who knows the seed can take the noise away, and runs with one seed share their noise)"
