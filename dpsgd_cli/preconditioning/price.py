"""Sensitivity of sums of second moments and of cells to one record, and their share of a budget; reads no data.

Notation: u_i are rows of L2 norm at most 1, A = sum u_i u_i^T, and Z = sum u_i y_i^T for targets y_i of norm at most 1.
The upper triangle of a symmetric matrix is released, with the entries off the diagonal times sqrt(2): a vector whose L2
norm is the Frobenius norm of the whole. V = sum v_i is a sum of rows of L2 norm 1 (or 0) without negative entries.

The sums themselves are in `preconditioning/second_moments.py` and `preconditioning/marginals.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, Adjacency
from dpsgd_cli.accounting.budget import released_before
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.common.plugins import named
from dpsgd_cli.common.sections import Fraction, Section

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


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


LABELS = tuple(made().kind for made in (SecondMoments, Marginals))
"""Labels of the release that a preconditioner is made of: its kinds."""


def sensitivity(adjacency: Adjacency) -> float:
    """Return the L2 bound on how far one record moves A, or V: 1, or sqrt(2) if records are replaced. Both are reached.

    - add-remove, zero-out: one record adds or takes away one u u^T (a null record has none), and |u u^T|_F = |u|^2.
    - replace-one: |u u^T - v v^T|_F^2 = |u|^4 + |v|^4 - 2 <u, v>^2 <= 2.
    - V: |v|, which is 0 or 1; or |v - w|^2 = |v|^2 + |w|^2 - 2 <v, w> <= 2, because no entry is negative.
    """
    return math.sqrt(2) if NEIGHBOURS[adjacency].replaced else 1.0


def joint_sensitivity(adjacency: Adjacency, weight: float, squares: float = 0.0) -> float:
    """Return the L2 bound on how far one record moves A, weight Z and `squares` Y together, with Y = sum y^2.

    Without Y (`squares` 0) it is reached; y^2 are the squares of the entries of y.

    - add-remove, zero-out: |u|^4 + weight^2 |u|^2 |y|^2 <= 1 + weight^2.
    - replace-one: let c = weight^2, t the cosine's absolute value and |u| = p, |v| = q. The square is at most
      p^4 + q^4 - 2 p^2 q^2 t^2 + c (p^2 + q^2 + 2 p q t). It grows with a common factor, so let q = 1. If c <= 2 p,
      the worst t is c / (2 p), which leaves p^4 + 1 + c (p^2 + 1) + c^2 / 2. Otherwise it is 1, which leaves
      (1 + p)^2 ((1 - p)^2 + c), of slope 2 (1 + p) (c - 2 p + 2 p^2) > 0. Both grow with p, so the worst is p = 1.
    - Y: |y^2|^2 = sum y_k^4 <= |y|^4 <= 1, which adds squares^2. Entries of y^2 are not negative, so a replaced record
      adds at most squares^2 (|y^2|^2 + |z^2|^2) <= 2 squares^2.
    """
    if not NEIGHBOURS[adjacency].replaced:
        return math.sqrt(1 + weight**2 + squares**2)
    cosine = min(1.0, weight**2 / 2)
    return math.sqrt(2 - 2 * cosine**2 + weight**2 * (2 + 2 * cosine) + 2 * squares**2)


def weight_of(share: float) -> float:
    """Return the factor of Z for which A, by itself, is charged `share` of the mu^2 of both under add-remove.

    Noise of one scale on both then makes A's noise multiplier 1 / sqrt(share) times that of the whole: the square of
    its sensitivity 1 is that share of the square of the joint one, 1 + weight^2.

    >>> weight_of(0.5), round(joint_sensitivity("add-remove", weight_of(0.2))**2, 9)
    (1.0, 5.0)
    """
    return math.sqrt((1 - share) / share)


def with_preconditioner(recipe: Recipe, before: Sequence[Release]) -> tuple[Release, ...]:
    """Return `before`, followed by the release of the recipe's preconditioner, if it has one (`released_before`)."""
    settings = recipe.preconditioner
    if settings is None:
        return tuple(before)
    moved: float = named(settings.sensitivity)(recipe.adjacency)
    made = GaussianSum(1.0, recipe.adjacency, sensitivity=moved, label=settings.kind)
    return released_before(recipe.required_privacy.budget, before, [settings.share], made)
