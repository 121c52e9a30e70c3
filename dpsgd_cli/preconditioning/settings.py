"""Preconditioners as recipes give them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Count, Fraction, Positive, Section


class PreconditionerKind(Section):
    """Base of the preconditioners.

    `sensitivity`: `module:name` of a function from an adjacency to the L2 sensitivity of the statistics that the
    preconditioner is made of. Their noise and their charge depend on it; 0 for statistics of no record.
    """

    must_state = ("sensitivity",)
    sensitivity: ClassVar[str]
    kind: str


class SecondMoments(PreconditionerKind):
    """Rows scaled to equal weight in all directions, by a noisy second-moment matrix of the training records."""

    sensitivity = "dpsgd_cli.preconditioning.price:sensitivity"
    kind: Literal["second-moment"] = "second-moment"
    share: Fraction = Field(0.2, description="Share of the budget's mu^2 (or rho) that the matrix gets.")


class Marginals(PreconditionerKind):
    """Rows scaled towards equal weight in all directions, by noisy counts of each column's values; after `bin`."""

    sensitivity = "dpsgd_cli.preconditioning.price:sensitivity"
    kind: Literal["marginals"] = "marginals"
    share: Fraction = Field(0.05, description="Share of the budget's mu^2 (or rho) that the counts get.")


class Kfac(PreconditionerKind):
    """Gradients of every layer scaled by its curvature on synthetic inputs, before they are clipped; for networks."""

    sensitivity = "dpsgd_cli.preconditioning.price:of_no_record"
    kind: Literal["kfac"] = "kfac"
    probes: Literal["strokes", "dead-leaves", "uniform"] = Field(
        description="Synthetic inputs: images that resemble handwriting or photographs, or independent numbers.",
        examples=["strokes"],
    )
    factors: Literal["inputs", "both"] = Field(
        "inputs",
        description="Of a layer's inputs alone, or also of its loss gradients by its outputs, which costs more.",
    )
    every: Count = Field(50, description="Steps after which the factors are computed anew; also when an epoch begins.")
    damping: Positive = Field(
        1.0, description="Added to the eigenvalues of a factor, whose mean is 1; a large number changes little."
    )


Released = SecondMoments | Marginals
Preconditioner = Annotated[Released | Kfac, Field(discriminator="kind")]
