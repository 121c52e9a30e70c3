"""Preconditioners as recipes give them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Fraction, Section


class PreconditionerKind(Section):
    """What every preconditioner offers.

    `sensitivity`: `module:name` of the function from an adjacency to the L2 norm of how far one record moves what is
    released; its noise and its charge rest on it.
    """

    must_state = ("sensitivity",)
    sensitivity: ClassVar[str]
    kind: str


class SecondMoments(PreconditionerKind):
    """Rows on which all directions weigh alike, by a noised second-moment matrix of the training records."""

    sensitivity = "dpsgd_cli.preconditioning.price:sensitivity"
    kind: Literal["second-moment"] = "second-moment"
    share: Fraction = Field(0.2, description="Share of the budget's mu^2 (or rho) that the matrix gets.")


class Marginals(PreconditionerKind):
    """Rows on which all directions weigh alike, as far as noised counts of each column's values tell; after bin."""

    sensitivity = "dpsgd_cli.preconditioning.price:sensitivity"
    kind: Literal["marginals"] = "marginals"
    share: Fraction = Field(0.05, description="Share of the budget's mu^2 (or rho) that the counts get.")


Preconditioner = Annotated[SecondMoments | Marginals, Field(discriminator="kind")]
