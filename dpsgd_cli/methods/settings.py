"""The `method:` section: how records reach a step and how a gradient becomes an update."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from dpsgd_cli.methods.baselines import MajorityMethod, NonPrivateMethod
from dpsgd_cli.methods.dp_agd import DpAgdMethod
from dpsgd_cli.methods.dp_sgd.settings import DpGdMethod, DpSgdMethod, GdMethod, Gradient, SgdMethod
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, Descriptor
from dpsgd_cli.methods.least_squares import LeastSquaresMethod
from dpsgd_cli.methods.pate.settings import PateMethod
from dpsgd_cli.methods.perturbation import ObjectivePerturbationMethod, OutputPerturbationMethod
from dpsgd_cli.methods.private_selection import PrivateSelectionMethod
from dpsgd_cli.methods.privgene import PrivGeneMethod


class PythonMethod(Gradient):
    """A user's own method: a class deriving from `dpsgd_cli.methods.base.Method`."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.base:own",
        planner="dpsgd_cli.methods.dp_sgd.price:of_own_code",
        privacy="optional",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=False,
    )
    kind: Literal["python"] = "python"
    file: str = Field(description="A Python file, relative to the recipe.", examples=["halved.py"])
    factory: str = Field("method", description="The Method class (or a factory of one) in that file.")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Whatever the method reads for itself.", examples=[{"decay": 0.9}]
    )


Method = Annotated[
    SgdMethod
    | DpSgdMethod
    | PrivateSelectionMethod
    | GdMethod
    | DpGdMethod
    | DpAgdMethod
    | ObjectivePerturbationMethod
    | OutputPerturbationMethod
    | LeastSquaresMethod
    | PrivGeneMethod
    | NonPrivateMethod
    | MajorityMethod
    | PateMethod
    | PythonMethod,
    Field(discriminator="kind"),
]

METHODS: dict[str, Any] = {one.model_fields["kind"].default: one for one in get_args(get_args(Method)[0])}
"""Section classes of all methods, by kind."""
