"""Objective and output perturbation as recipes give them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dpsgd_cli.common.sections import Count
from dpsgd_cli.methods.descriptor import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch

OFF_GRID = "its random term enters a search, so no proof covers the floating-point grid of what it releases"


class ObjectivePerturbationMethod(FullBatch):
    """Objective perturbation with Gaussian noise (Kifer, Smith and Thakurta 2012).

    The inexactness of the minimum is paid for (Iyengar et al. 2019).
    """

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.perturbation.run:ObjectivePerturbation",
        planner="dpsgd_cli.methods.perturbation.price:objective_perturbation",
        privacy="needed",
        adjacencies=("add-remove",),
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["objective-perturbation"] = "objective-perturbation"


class OutputPerturbationMethod(FullBatch):
    """Output perturbation: noise on the last iterate of full-batch gradient descent, by its stability."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.perturbation.run:OutputPerturbation",
        planner="dpsgd_cli.methods.perturbation.price:output_perturbation",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["output-perturbation"] = "output-perturbation"
    steps: Count = Field(100, description="Gradient steps, at a rate for which they do not drift apart.")
