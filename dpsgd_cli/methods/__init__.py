"""Training methods by name. Adding one is one file here, one line in `METHODS` and its section in the schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpsgd_cli.core.streamed import StreamedTable
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
from dpsgd_cli.plugins import load_attribute, refusal_of_call
from dpsgd_cli.recipe import schema

__all__ = ["METHODS", "Context", "Method", "create", "own_factory"]

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
"""Methods whose only look at the data is the sum of `Team.release`: several processes may train them, and rows may stay
on disk."""


def create(context: Context) -> Method:
    """The method that the recipes name, ready for its first epoch.

    Raises UsageError where several processes train it, or its rows stay on disk, and there is no rule for that.
    """
    _refuse(context)
    settings = context.recipes[0].method
    if not isinstance(settings, schema.PythonMethod):
        return _built_in(settings)(context)
    factory = own_factory(settings, context.base)
    made = factory(context)
    if not isinstance(made, Method):
        what = factory.__name__ if isinstance(factory, type) else type(made).__name__
        raise RecipeError(f"{settings.file}: {settings.factory} gives {what}, not a dpsgd_cli.methods.Method")
    return made


def own_factory(settings: schema.PythonMethod, base: Path) -> Callable[[Context], Any]:
    """What makes a user's own method; RecipeError where it is not there, or does not take a context."""
    factory = load_attribute(base / settings.file, settings.factory)
    refusal = refusal_of_call(factory, settings.factory, {"context": None}, {})
    if refusal is not None:
        raise RecipeError(f"{settings.file}: {refusal}")
    found: Callable[[Context], Any] = factory
    return found


def _built_in(settings: schema.Method) -> type[Method]:
    if settings.kind == "dp-sgd" and settings.batching == "single":
        return LectureSgd
    return METHODS[settings.kind]


def _refuse(context: Context) -> None:
    settings, processes = context.recipes[0].method, context.team.size
    if settings.kind in METHODS and _built_in(settings) in TOGETHER:
        followed = any(r.privacy is not None and r.privacy.schedule.kind == "validation" for r in context.recipes)
        if followed and processes > 1:
            raise UsageError(
                "privacy.schedule validation looks at records between epochs, which has no rule for"
                f" {processes} processes; start it without torchrun, or use another schedule"
            )
        return
    name = f"method {settings.kind}{', batching single' if settings.kind == 'dp-sgd' else ''}"
    if processes > 1:
        raise UsageError(f"{name} trains in one process, not in {processes}; start it without torchrun")
    if isinstance(context.table, StreamedTable):
        raise UsageError(
            f"{name} holds all rows in memory, and those of a npy file stay on disk; save features and labels as one"
            " npz file"
        )
