"""Preconditioners as recipes give them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Fraction, Section


class PreconditionerKind(Section):
    """Base of the preconditioners.

    `sensitivity`: `module:name` of a function from an adjacency to the L2 sensitivity of the statistics that the
    preconditioner is made of. Their noise and their charge depend on it.
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


Preconditioner = Annotated[SecondMoments | Marginals, Field(discriminator="kind")]
