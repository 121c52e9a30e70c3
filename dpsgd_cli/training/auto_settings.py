"""Automatic settings: resolve each `auto` of a recipe by the formulas of `auto_rule.py`, with the reason in words.

Only public facts are used: the recipe, the numbers of training records, features and outputs, the bound on a record's
features that the public bounds give, and the budget. So automatic settings cost no privacy. Neighbouring data with the
same public facts get the same settings, to the bit.

A recipe with its own learning rate gets plain defaults: clip norm 1, the last weights, no momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dpsgd_cli.accounting.adjacency import BATCHINGS
from dpsgd_cli.accounting.budget import mu_squared_left
from dpsgd_cli.accounting.mechanism import Release
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.calibration.price import Calibration
from dpsgd_cli.data.step_settings import GRID, WAVES_UNTOLD
from dpsgd_cli.discovery import price
from dpsgd_cli.discovery.settings import DELTA_SHARE, LARGEST_DELTA, Discovery
from dpsgd_cli.engine.settings import OneLayer
from dpsgd_cli.errors import DataError
from dpsgd_cli.methods.dp_sgd.settings import EmaSettings, Gradient, Preconditioned, SgdSettings, TailIterates
from dpsgd_cli.methods.private_selection import PrivateSelectionMethod
from dpsgd_cli.preconditioning.price import Marginals
from dpsgd_cli.recipe.agreement import calibration_problems, preconditioner_problems
from dpsgd_cli.recipe.loading import AutoChoice
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.schedules.settings import ByRule, Influence, Tail, Uniform
from dpsgd_cli.training import auto_rule as rule
from dpsgd_cli.training.auto_rule import PublicFacts, RuleProblem

Chosen = tuple[Any, str]
"""A value, and why; the reason is empty where nothing depends on the data."""


def covers(recipe: Recipe) -> bool:
    """Return True if the formulas of `auto_rule.py` choose the learning rate, and with it all other `auto` settings."""
    method = recipe.method
    return (
        isinstance(method, Gradient)
        and method.described.auto_tunable
        and recipe.model.auto_tunable
        and recipe.privacy is not None
        and recipe.privacy.clipping.plain
        and method.learning_rate == "auto"
        and isinstance(method.optimizer, SgdSettings)
    )


def needs_data(recipe: Recipe) -> bool:
    """Return True if an `auto` setting depends on public facts of the data."""
    sampled = isinstance(recipe.method, Gradient) and recipe.method.batch_size == "auto"
    return covers(recipe) or (sampled and recipe.method.batching != "full") or _solves_noise(recipe)


def discovery(recipe: Recipe) -> tuple[Recipe, tuple[AutoChoice, ...]]:
    """Return the recipe with the noise of private bounds and categories resolved, and the choices. Uses the budget."""
    if not recipe.data.private_columns:
        return recipe, ()
    own, privacy, told = recipe.data.discovery or Discovery(), recipe.required_privacy, []
    if own.delta == "auto":
        own = own.changed(delta=min(_rounded(DELTA_SHARE * privacy.stated_delta), LARGEST_DELTA))
        told = [AutoChoice("data.discovery.delta", own.delta, "a tenth of the statement's")]
    if own.noise_multiplier == "auto":
        assert privacy.budget is not None and isinstance(own.delta, float)
        named = [Release(price.named(own.delta, recipe.adjacency))] * any(recipe.data.private_columns.values())
        multiplier = _rounded((own.share * mu_squared_left(privacy.budget, named)) ** -0.5)
        own = own.changed(noise_multiplier=multiplier)
        told.append(AutoChoice("data.discovery.noise_multiplier", multiplier, f"{own.share:.4g} of the budget's mu^2"))
    return with_choice(recipe, AutoChoice("data.discovery", own, "")), tuple(told)


def features(
    recipe: Recipe, known: PublicFacts | None, count: Callable[[Recipe], int]
) -> tuple[Recipe, tuple[AutoChoice, ...]]:
    """Return the recipe with its `auto` features resolved, and the choices; `count` counts a recipe's features."""
    told: list[AutoChoice] = []
    if recipe.data.target_transform == "auto" and recipe.data.target_bounds is not None:
        low, high = recipe.data.target_bounds
        told = [AutoChoice("data.target_transform", "log" if recipe.data.log_scale else None, f"{low:g} to {high:g}")]
        recipe = with_choice(recipe, told[0])
    ruled = covers(recipe) and isinstance(recipe.model, OneLayer)
    for key, value in _of_features(recipe).items():
        if value == "auto":
            choose = _CHOOSE[key.rpartition(".")[2]]
            told.append(AutoChoice(key, *choose(recipe, key, known if ruled else None, count)))
            recipe = with_choice(recipe, told[-1])
    return recipe, tuple(choice for choice in told if choice.why)


def _of_features(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of steps that decide the number of features, by their keys."""
    found: dict[str, Any] = {}
    for number, step in enumerate(recipe.data.preprocess or ()):
        at = f"data.preprocess.{number}"
        if step.bin is not None:
            found |= {f"{at}.bin.waves": step.bin.waves} if step.bin.cosines is not None else {}
            found |= {f"{at}.bin.products": step.bin.products, f"{at}.bin.grid": step.bin.grid}
    return found


def _signal(recipe: Recipe, known: PublicFacts | None) -> float | None:
    return None if known is None else RuleProblem(recipe, known).signal


def _waves(recipe: Recipe, key: str, known: PublicFacts | None, count: Callable[[Recipe], int]) -> Chosen:
    signal = _signal(recipe, known)
    if known is None or signal is None:
        return WAVES_UNTOLD, ""
    of_target, (least, *more) = RuleProblem(recipe, known).of_target, rule.WAVES
    share, of = rule.WAVES_OF_TARGETS if of_target else 1.0, ", ".join(map(str, rule.WAVES))
    root, within = share * math.sqrt(signal), "sqrt(n mu) / 2" if of_target else "sqrt(n mu)"
    chosen = least
    for waves in more:
        if waves <= root and count(with_choice(recipe, AutoChoice(key, waves, ""))) <= rule.MOST_FEATURES:
            chosen = waves
    return chosen, f"of {of} the most within {within}, {root:.4g}, and {rule.MOST_FEATURES} features"


def _products(recipe: Recipe, key: str, known: PublicFacts | None, count: Callable[[Recipe], int]) -> Chosen:
    """Choose products of features of two columns if the budget pays for them and they are not too many."""
    step = (recipe.data.preprocess or ())[int(key.split(".")[2])].bin
    assert step is not None
    method, signal = recipe.method, _signal(recipe, known)
    if known is None or signal is None or step.cosines is None or not isinstance(method, Preconditioned):
        return False, ""
    given = with_choice(recipe, AutoChoice("method.preconditioner", rule.MARGINALS, ""))
    counts = method.preconditioner == "auto" or isinstance(method.preconditioner, Marginals)
    if not counts or any(preconditioner_problems(given)):
        return False, ""
    if signal < rule.PRODUCTS_FROM:
        few = f"few records at this budget: records times mu is {signal:,.0f}"
        return False, f"{few}; counts pay from {rule.PRODUCTS_FROM:,}"
    try:
        features = count(with_choice(recipe, AutoChoice(key, True, "")))
    except DataError:
        return False, ""  # far more than a row may have
    needed = rule.RECORDS_A_FEATURE[RuleProblem(recipe, known).of_target]
    paid = int(min(known.records / needed, signal / rule.SIGNAL_A_FEATURE))
    most = min(rule.MOST_FEATURES, paid, rule.MOST_NUMBERS // known.records)
    return features <= most, f"{features} features with them, of at most {most}"


def _grid(recipe: Recipe, key: str, known: PublicFacts | None, count: Callable[[Recipe], int]) -> Chosen:
    """Choose a grid for tables whose features would fill the memory, if rows can be kept as codes."""
    step = (recipe.data.preprocess or ())[int(key.split(".")[2])].bin
    assert step is not None
    if known is None or step.cosines is None or step.products is True:
        return None, ""
    numbers = known.records * count(recipe)
    streamed = recipe.data.on_disk and recipe.method.batching == "full"
    if numbers <= rule.MOST_DENSE and not streamed:
        return None, ""
    why = (
        f"{numbers:.3g} features in all, above {rule.MOST_DENSE:.3g}"
        if numbers > rule.MOST_DENSE
        else "rows stay on disk"
    )
    try:
        count(with_choice(recipe, AutoChoice(key, GRID, "")))
    except DataError:
        return None, ""  # the features of texts are not of a grid
    return GRID, why


_CHOOSE = {"waves": _waves, "products": _products, "grid": _grid}


def before_plan(recipe: Recipe, known: PublicFacts | None) -> tuple[Recipe, tuple[AutoChoice, ...]]:
    """Return the recipe with every `auto` setting resolved that a plan reads, and the choices.

    `known` may be None if `needs_data` is False.
    """
    told: list[AutoChoice] = []
    for key, choose in _BEFORE_PLAN.items():
        held: Any = recipe
        for name in key.split("."):
            held = getattr(held, name, None)
        if held == "auto" or isinstance(held, ByRule):
            told.append(AutoChoice(key, *choose(recipe, known)))
            recipe = with_choice(recipe, told[-1])
    if isinstance(recipe.method, Gradient) and recipe.method.learning_rate == "auto" and not covers(recipe):
        recipe = with_choice(recipe, AutoChoice("method.learning_rate", recipe.method.rate, ""))
    return recipe, tuple(choice for choice in told if choice.why)


def after_plan(recipe: Recipe, known: PublicFacts, plan: Plan) -> tuple[Recipe, tuple[AutoChoice, ...]]:
    """Return a covered recipe with its learning rate resolved, and the choice. No plan depends on the rate."""
    method = recipe.method
    assert isinstance(method, Gradient) and isinstance(method.optimizer, SgdSettings)
    problem, sampling = RuleProblem(recipe, known), plan.sampling
    # sqrt(T) z for uniform noise z of the same price: T / sqrt(sum z_t^-2)
    # an adaptive plan may keep its first noise multiplier for `most_epochs` epochs
    noise = plan.noise_multipliers if plan.epochs else plan.noise_multipliers[:1] * plan.most_epochs
    spent = sampling.steps_per_epoch * math.fsum(z**-2 for z in noise)
    steps = sampling.steps_per_epoch * len(noise) / math.sqrt(spent)
    allowed = (1 - method.optimizer.momentum_value) * problem.effective_step(
        steps * plan.sensitivity / sampling.batch_size, sampling.steps_per_epoch * len(noise)
    )
    why = f"so that noise moves a prediction by {problem.terms.noise * problem.unit:g}; at most {problem.fastest:.4g}"
    if allowed > problem.fastest:
        why = f"the highest for {problem.described}; noise would allow {allowed:.4g}"
    choice = AutoChoice("method.learning_rate", _rounded(min(allowed, problem.fastest)), why)
    return with_choice(recipe, choice), (choice,)


def with_choice(recipe: Recipe, choice: AutoChoice) -> Recipe:
    """Return the recipe with the chosen value."""
    settled: Recipe = _with(recipe, choice.key.split("."), choice.value)
    return settled


def _with(section: Any, path: list[str], value: Any) -> Any:
    """Return a section, or a list of sections, with a value at a path."""
    if not path:
        return value
    first, *rest = path
    if isinstance(section, list):
        at = int(first)
        return [*section[:at], _with(section[at], rest, value), *section[at + 1 :]]
    # not validated: a recipe may not spell out every value that stands for "none"
    return section.model_copy(update={first: _with(getattr(section, first), rest, value)})


def _bias(recipe: Recipe, known: PublicFacts | None) -> Chosen:
    """Choose no bias for a linear model whose features hold a constant, except for targets with automatic settings."""
    steps = recipe.data.preprocess
    if not steps or steps[-1].kind != "bin":
        return True, ""
    if known is not None and covers(recipe) and RuleProblem(recipe, known).of_target:
        return True, "the mean of targets may be far from 0"
    if recipe.method.calibrated is not None:
        return True, "method.calibration moves it"
    return False, "bin adds a constant column"


def _batch_size(recipe: Recipe, known: PublicFacts | None) -> Chosen:
    method = recipe.method
    if method.batching in ("full", "fixed"):
        return None if method.batching == "full" else 1, ""
    assert known is not None
    size, why = min(rule.BATCH, known.records), f"of {known.records} records; at most {rule.BATCH}"
    if BATCHINGS[method.batching].sampled and covers(recipe):
        problem = RuleProblem(recipe, known)
        if problem.sampled_batch is not None:
            noise = problem.terms.least_noise
            size, why = problem.sampled_batch, f"of {known.records} records; noise multiplier about {noise:g}"
    return size, why


def _preconditioner(recipe: Recipe, known: PublicFacts | None) -> Chosen:
    """Choose a preconditioner if the recipe allows one and its matrix is small enough."""
    if known is None or not covers(recipe) or (recipe.data.stays_on_disk and not recipe.data.of_codes):
        return None, ""
    if known.features > rule.MOST_FEATURES:
        return None, ""
    if known.features < rule.FEWEST_FEATURES and not recipe.data.by_column:
        return None, f"{known.features} features, of at least {rule.FEWEST_FEATURES}"
    why, chosen = f"{known.features} features, of at most {rule.MOST_FEATURES}", rule.MOMENTS
    if recipe.data.by_column and getattr(recipe.method, "inference", None) is None:
        chosen = rule.MARGINALS
    if any(preconditioner_problems(with_choice(recipe, AutoChoice("method.preconditioner", chosen, "")))):
        return None, ""
    return chosen, why


def _calibration(recipe: Recipe, known: PublicFacts | None) -> Chosen:
    """Choose calibration for a squared loss behind counts; not of logarithms, whose mean is no number's mean."""
    given = with_choice(recipe, AutoChoice("method.calibration", Calibration(), ""))
    ruled = known is not None and covers(recipe) and isinstance(recipe.method.conditioned, Marginals)
    if not ruled or recipe.data.log_scale or any(calibration_problems(given)):
        return None, ""
    return Calibration(), "clipped residuals move predictions from the mean towards the median"


def _momentum(recipe: Recipe, known: PublicFacts | None) -> Chosen:
    if known is None or not covers(recipe):
        return SgdSettings().momentum_value, ""
    return RuleProblem(recipe, known).terms.momentum, "goes with the rule's learning rate"


def _averaging(recipe: Recipe, known: PublicFacts | None) -> Chosen:
    """Choose the last half of the steps or a moving average; none if validation accuracy may end the training early."""
    method, privacy = recipe.method, recipe.privacy
    assert isinstance(method, Gradient)
    if not covers(recipe) or privacy is None or privacy.schedule.adaptive:
        return method.average, ""
    if known is not None and RuleProblem(recipe, known).terms.least_noise is not None:
        return EmaSettings(), "recent steps count most"
    return TailIterates(), "the last half of the steps"


def _clip_norm(recipe: Recipe, known: PublicFacts | None) -> Chosen:
    if known is None or not covers(recipe):
        return recipe.required_privacy.clipping.norm_bound(None), ""
    problem = RuleProblem(recipe, known)
    if not isinstance(recipe.model, OneLayer):
        return problem.clip, "a network's"
    norm = _rounded(problem.clip * problem.size * problem.residual)
    return norm, f"clips what errors above {problem.clip:.4g} add, for {problem.described}"


def _epochs(recipe: Recipe, known: PublicFacts | None) -> Chosen:
    """Choose the epochs by `auto_rule.py` if the plan solves for the noise; otherwise spend the whole budget."""
    if known is None or not _solves_noise(recipe):
        return recipe.length, ""
    assert isinstance(recipe.method, Gradient), "the rule is one of gradient methods"
    per_epoch = recipe.method.steps_per_epoch(known.records)
    steps, why = _steps(RuleProblem(recipe, known), per_epoch)
    if per_epoch > 1:
        why = f"{steps} steps, {per_epoch} an epoch: {why}"
    return -(-steps // per_epoch), why


def _schedule(recipe: Recipe, known: PublicFacts | None) -> Chosen:
    """Choose the influence schedule for preconditioned linear models with full batches and averaging; else uniform.

    It was tested for these models only.
    """
    privacy = recipe.required_privacy
    assert isinstance(privacy.schedule, ByRule)
    initial = privacy.schedule.initial
    uniform = Uniform(initial=initial), ""
    method, steps = recipe.method, recipe.epochs
    if known is None or not covers(recipe) or recipe.method.conditioned is None or privacy.correlated is not None:
        return uniform
    assert isinstance(method, Gradient) and isinstance(method.optimizer, SgdSettings)
    if method.batching != "full" or not isinstance(method.average, TailIterates) or not isinstance(steps, int):
        return uniform
    weights = Tail(epochs=steps, momentum=method.optimizer.momentum_value, fraction=method.average.fraction)
    schedule = Influence(initial=initial, weights=weights)
    return schedule, "early steps get less noise, because each changes all weights that are averaged"


_BEFORE_PLAN: dict[str, Callable[[Recipe, PublicFacts | None], Chosen]] = {
    "model.bias": _bias,
    "method.preconditioner": _preconditioner,
    "method.calibration": _calibration,
    "method.optimizer.momentum": _momentum,
    "method.averaging": _averaging,
    "privacy.clipping.norm": _clip_norm,
    "method.batch_size": _batch_size,
    "epochs": _epochs,
    "privacy.schedule": _schedule,
}
"""What chooses each setting that a plan reads, in an order in which later ones may depend on earlier ones."""


def _steps(problem: RuleProblem, per_epoch: int) -> tuple[int, str]:
    """Return the number of steps T, and the reason."""
    privacy, terms, records = problem.recipe.privacy, problem.terms, problem.known.records
    if privacy is None or problem.signal is None or privacy.clipping.by_layer or not covers(problem.recipe):
        return terms.fewest, "the fewest of the rule"
    why = f"from {terms.fewest} to {terms.most}, for {records} records at mu {problem.signal / records:.4g}"
    most = int(rule.MOST_WORK / (records * problem.known.features))
    if terms.least_noise is not None:
        most, why = rule.MOST_EPOCHS * per_epoch, f"{why}; at most {rule.MOST_EPOCHS} epochs"
    return min(math.ceil(problem.steps), max(most, terms.fewest)), why


def _solves_noise(recipe: Recipe) -> bool:
    """Return True if the plan solves for the noise with which a given number of epochs fits the budget."""
    privacy = recipe.privacy
    gradient = isinstance(recipe.method, Gradient) and not isinstance(recipe.method, PrivateSelectionMethod)
    if privacy is None or privacy.budget is None or not gradient:
        return False
    return recipe.epochs == "auto" and bool(privacy.schedule.free_numbers())


def _rounded(value: float) -> float:
    """Round to six digits, so that a person can write the value down."""
    return float(f"{value:.6g}")
