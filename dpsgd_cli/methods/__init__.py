"""Training methods by name. Adding one is one file here, one line in `METHODS` and its section in the schema."""

from __future__ import annotations

import inspect

from dpsgd_cli.errors import RecipeError, UsageError
from dpsgd_cli.methods.base import Context, Method
from dpsgd_cli.methods.dp_agd import DpAgd
from dpsgd_cli.methods.dp_gd import DpGd
from dpsgd_cli.methods.dp_sgd import DpSgd
from dpsgd_cli.methods.gd import Gd
from dpsgd_cli.methods.lecture_sgd import LectureSgd
from dpsgd_cli.methods.majority import Majority
from dpsgd_cli.methods.non_private import NonPrivate
from dpsgd_cli.methods.objective_perturbation import ObjectivePerturbation
from dpsgd_cli.methods.output_perturbation import OutputPerturbation
from dpsgd_cli.methods.private_selection import PrivateSelection
from dpsgd_cli.methods.privgene import PrivGene
from dpsgd_cli.methods.sgd import Sgd
from dpsgd_cli.methods.sgd_baselines import SgdAdv, SgdMa
from dpsgd_cli.plugins import load_attribute
from dpsgd_cli.recipe import schema

__all__ = ["METHODS", "Context", "Method", "create"]

METHODS: dict[str, type[Method]] = {
    "sgd": Sgd,
    "dp-sgd": DpSgd,
    "gd": Gd,
    "dp-gd": DpGd,
    "dp-agd": DpAgd,
    "objective-perturbation": ObjectivePerturbation,
    "output-perturbation": OutputPerturbation,
    "privgene": PrivGene,
    "sgd-adv": SgdAdv,
    "sgd-ma": SgdMa,
    "private-selection": PrivateSelection,
    "non-private": NonPrivate,
    "majority": Majority,
}


TOGETHER: tuple[type[Method], ...] = (Sgd, DpSgd, SgdMa, SgdAdv)
"""Methods whose only look at the data is the sum of `Team.release`, so that several processes may train them."""


def create(context: Context) -> Method:
    """The method that the recipes name, ready for its first epoch.

    Raises UsageError where several processes train it and there is no rule for that.
    """
    method = _create(context)
    if context.team.size > 1:
        kind = context.recipes[0].method.kind
        if type(method) not in TOGETHER:
            batching = ", batching single" if kind == "dp-sgd" else ""
            raise UsageError(
                f"method {kind}{batching} trains in one process, not in {context.team.size}; start it without torchrun"
            )
        if isinstance(method, DpSgd) and method.pacer is not None and method.pacer.runners:
            raise UsageError(
                "privacy.schedule validation looks at records between epochs, which has no rule for"
                f" {context.team.size} processes; start it without torchrun, or use another schedule"
            )
    return method


def _create(context: Context) -> Method:
    settings = context.recipes[0].method
    if settings.kind == "dp-sgd" and settings.batching == "single":
        return LectureSgd(context)
    if not isinstance(settings, schema.PythonMethod):
        return METHODS[settings.kind](context)
    factory = load_attribute(context.base / settings.file, settings.factory)
    made = factory(context)
    if not isinstance(made, Method):
        what = factory.__name__ if inspect.isclass(factory) else type(made).__name__
        raise RecipeError(f"{settings.file}: {settings.factory} gives {what}, not a dpsgd_cli.methods.Method")
    return made
