"""PrivGene as recipes give it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dpsgd_cli.common.sections import Count, Fraction, Positive
from dpsgd_cli.methods.descriptor import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch


class PrivGeneMethod(FullBatch):
    """PrivGene (Zhang et al. 2013): a genetic search whose survivors are chosen by the exponential mechanism."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.privgene.run:PrivGene",
        planner="dpsgd_cli.methods.privgene.price:privgene",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=True,
        may_differ=ITS_BUDGET,
    )
    kind: Literal["privgene"] = "privgene"
    rounds: Count = Field(20, description="Generations.")
    population: Count = Field(100, description="Weight vectors of a generation.")
    survivors: Count = Field(5, description="Vectors chosen, one after the other, to breed the next generation.")
    reach: Positive = Field(2.0, description="First vectors are uniform in [-reach, reach]; so wide a mutation is.")
    shrink: Fraction = Field(0.85, description="Factor on the width of mutations from one round to the next.")

    @property
    def choices(self) -> int:
        """Return the number of uses of the exponential mechanism: the survivors of each round, and the winner."""
        return self.rounds * self.survivors + 1
