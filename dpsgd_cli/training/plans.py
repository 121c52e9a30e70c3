"""Plan of a recipe and its data, for training, prices, sweeps and comparisons alike.

A plan depends on public facts alone: the outline of the data, the releases of private preprocessing, the bound on a
record's features, and the layers of the model. Torch is loaded only if layers are clipped one by one, because only the
built model tells their number.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dpsgd_cli import data
from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.budget import EpsilonBudget, mu_squared_left
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.common import interrupts
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.splits import places_of_a_fold
from dpsgd_cli.engine.settings import ConvexModel, HuggingFaceModel, OneLayer, PythonModel
from dpsgd_cli.errors import RecipeError, UnsupportedMechanism, UsageError
from dpsgd_cli.evaluation.price import held_out_release, held_out_releases
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.recipe.loading import AutoChoice, LoadedRecipe, SettledRecipe
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.training import auto_settings
from dpsgd_cli.training.auto_rule import PublicFacts


def resolve_auto(loaded: LoadedRecipe) -> SettledRecipe:
    """Return the recipe with every `auto` setting resolved from public facts (`training/auto_settings.py`).

    Raises the errors of planning and of `data.outline` if the formulas need facts about the data.
    """
    recipe = loaded.recipe
    if not auto_settings.needs_data(recipe):
        recipe, told = auto_settings.discovery(recipe)
        recipe, _ = auto_settings.features(recipe, None, lambda _: 0)
        recipe, chosen = auto_settings.before_plan(recipe, None)
        return _settled(loaded, recipe, told + chosen)
    with interrupts.explained(list(loaded.own_code.values()), lambda: "nothing was written"):
        settled, outline = _before_plan(loaded)
        if auto_settings.covers(settled.recipe):
            plan = plan_of(settled, outline)
            assert plan is not None
            recipe, rate = auto_settings.after_plan(settled.recipe, _known(settled.recipe, outline), plan)
            settled = replace(settled, recipe=recipe, chosen=settled.chosen + rate)
    return settled


def plan_and_outline(loaded: LoadedRecipe, priced_by: Accountant | None = None) -> tuple[Plan | None, data.Outline]:
    """Return the plan of a recipe, for its price, and the outline of the data. Settings of the recipe may be `auto`.

    The learning rate is not resolved, because no plan depends on it. `priced_by` prices the budget instead of the
    recipe's accountant. Raises the errors of planning and of `data.outline`.
    """
    settled, outline = _before_plan(loaded)
    return plan_of(settled, outline, priced_by), outline


def _before_plan(loaded: LoadedRecipe) -> tuple[SettledRecipe, data.Outline]:
    """Resolve every `auto` setting that a plan reads; return the recipe and the outline of its data."""
    with loaded.locating_errors():
        outline = data.outline(loaded.recipe.data, loaded.base)

    def count(recipe: Recipe) -> int:
        return _known(recipe, data.outline(recipe.data, loaded.base)).features

    recipe, noise = auto_settings.discovery(loaded.recipe)
    recipe, features = auto_settings.features(recipe, _known(recipe, outline), count)
    outline = data.outline(recipe.data, loaded.base) if features else outline
    recipe, chosen = auto_settings.before_plan(recipe, _known(recipe, outline))
    return _settled(loaded, recipe, noise + features + chosen), outline


def _settled(loaded: LoadedRecipe, recipe: Recipe, chosen: tuple[AutoChoice, ...] = ()) -> SettledRecipe:
    return SettledRecipe(recipe, loaded.base, loaded.source, loaded.tree, chosen)


def _known(recipe: Recipe, outline: data.Outline) -> PublicFacts:
    """Return the public facts about the data that automatic settings use."""
    records = training_records(recipe, outline)
    outputs = 1 if isinstance(recipe.model, ConvexModel) else outline.outputs
    return PublicFacts(records, math.prod(outline.input_shape), outputs, outline.norm_bound)


def plan_of(loaded: SettledRecipe, outline: data.Outline, priced_by: Accountant | None = None) -> Plan | None:
    """Return the plan of a recipe on data with this outline; None for a method without privacy.

    `priced_by` prices the budget instead of the recipe's accountant.
    """
    recipe = loaded.recipe
    records = training_records(recipe, outline)
    if recipe.privacy is None:
        if recipe.method.batch is not None and recipe.method.batch > records:
            raise UsageError(
                f"method.batch_size is {recipe.method.batch}, more than the {records} training records; make it smaller"
            )
        return None
    before = data.private_releases(recipe.data, recipe.adjacency, loaded.base)
    layers = _layers(loaded, outline) if recipe.privacy.clipping.by_layer else None
    with loaded.locating_errors():
        facts = Facts(records, before, layers, feature_bound(recipe, outline), outline.public_records, priced_by)
        plan = plan_for(recipe, facts)
        return _with_held_out(plan, recipe) if recipe.data.measured_privately else plan


def _with_held_out(plan: Plan, recipe: Recipe) -> Plan:
    """Return the plan with the release that measures held-out records, at the price of the training.

    That price is an epsilon. A budget of rho also limits the release's mu: an accountant may state an epsilon that is
    much larger than rho allows.
    """
    budget, numbers = recipe.required_privacy.budget, recipe.data.task == "regression"
    most = math.inf if budget is None or isinstance(budget, EpsilonBudget) else mu_squared_left(budget, [])
    price = plan.guarantee().epsilon
    try:
        mechanism = held_out_release(
            plan.accountant, price, plan.delta, plan.sampling.adjacency, numbers, math.sqrt(most)
        )
    except (ValueError, UnsupportedMechanism) as error:
        raise RecipeError(
            f"data.evaluation: private (also the default for a table of your own) costs what the training costs, and"
            f" there is {error}; state evaluation: public, which declares the held-out records public"
        ) from None
    return replace(plan, held_out=(held_out_releases(mechanism, numbers),))


def _layers(loaded: LoadedRecipe, outline: data.Outline) -> int:
    """Return the number of layers with parameters, for per-layer clipping; build the model if necessary."""
    model = loaded.recipe.model
    if model.layers is not None:
        return model.layers
    import torch

    from dpsgd_cli.engine.models import builder
    from dpsgd_cli.engine.packing import Pack, Placement

    own_code = [loaded.base / model.file] if isinstance(model, PythonModel) else []
    with interrupts.explained(own_code, lambda: "nothing was written"):
        build = builder(model, outline.input_shape, outline.outputs, loaded.base, loaded.recipe.data.inputs)
        return len(Pack(build, [0], Placement(torch.device("cpu"))).layers)


def training_records(recipe: Recipe, outline: data.Outline) -> int:
    """Return the public number of records of each trial: of the training part, or with folds of a trial's places.

    Users count, if they are the unit of privacy.
    """
    if recipe.folds is None:
        return outline.train_records
    return places_of_a_fold(outline.files, recipe.folds, recipe.data.by_place)


def feature_bound(recipe: Recipe, known: data.Outline | data.Dataset) -> float | None:
    """Return the public bound on the norm of a linear model's features, constant column included; None without one."""
    if not isinstance(recipe.model, OneLayer) or known.norm_bound is None:
        return None
    return math.hypot(known.norm_bound, float(recipe.model.has_bias))


def declared_by_model(loaded: LoadedRecipe) -> tuple[str, ...]:
    """Return the declarations of model and method: a bound on targets, weights that no seed drew."""
    recipe, model, said = loaded.recipe, loaded.recipe.model, []
    if isinstance(model, PythonModel) and model.weights is not None:
        file, constant = model.weights.file, model.weights.constant
        if file is not None:
            hashed = f"SHA-256 {sha256(loaded.base / file)}"
            said.append(f"The weights in {file} ({hashed}), which the model starts from, are declared public.")
        if constant:
            said.append(f"The numbers of {' and '.join(constant)}, which code computes, are declared public.")
    if isinstance(model, HuggingFaceModel):
        said.append(
            f"The numbers in {model.folder}, which the model starts from, are declared public (SHA-256 of each file in"
            " result.json)."
        )
    if isinstance(model, ConvexModel) and model.known.residual and recipe.data.target_bounds is None:
        bound = f"{model.target_bound:g}"
        said.append(
            f"In training targets are clamped to [-{bound}, {bound}], a public bound (model.target_bound); metrics of"
            " public test records are of their targets as they are."
        )
    return tuple(said)
