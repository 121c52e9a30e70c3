"""Checks across the sections of a recipe: the needs of each method. A problem is a line that begins with its key.

The plan checks the conditions of a guarantee (`methods/dp_sgd/price.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dpsgd_cli.accounting.adjacency import NEIGHBOURS
from dpsgd_cli.accounting.budget import RhoBudget
from dpsgd_cli.clipping.settings import FlatClipping
from dpsgd_cli.common.text_format import any_of, count
from dpsgd_cli.data.step_settings import Pca, Scale
from dpsgd_cli.discovery.settings import Discovery
from dpsgd_cli.engine.settings import (
    LOSS_TASKS,
    ConvexModel,
    HuggingFaceModel,
    LinearModel,
    LossSettings,
    NamedLoss,
    OneLayer,
)
from dpsgd_cli.methods.dp_agd import DpAgdMethod
from dpsgd_cli.methods.dp_sgd.settings import (
    DpGdMethod,
    DpSgdMethod,
    GdMethod,
    Gradient,
    Preconditioned,
    SgdMethod,
)
from dpsgd_cli.methods.experiment import Experiment, FullBatch, Privacy
from dpsgd_cli.methods.least_squares import LeastSquaresMethod
from dpsgd_cli.methods.pate.settings import PateMethod
from dpsgd_cli.methods.perturbation import OFF_GRID, ObjectivePerturbationMethod
from dpsgd_cli.methods.settings import METHODS, PythonMethod
from dpsgd_cli.preconditioning.price import Marginals
from dpsgd_cli.schedules.settings import DEFAULT_SCHEDULES

Problems = Iterator[str]


def method_problems(recipe: Experiment) -> Problems:
    """Yield every conflict between the recipe's method and its other sections, one line each."""
    for check in _CHECKS:
        yield from check(recipe)
    if recipe.method.conditioned is not None:
        yield from preconditioner_problems(recipe)


def _evaluation(recipe: Experiment) -> Problems:
    """Refuse a private evaluation whose proof (`evaluation/price.py`) does not cover the recipe."""
    data, where = recipe.data, "data.evaluation: private (also the default for a table of your own)"
    public = "state evaluation: public, which declares the held-out records public"
    if not data.measured_privately:
        return
    if recipe.privacy is None:
        yield "data.evaluation: private measures at the price of a private training; without privacy, leave it out"
    elif recipe.folds is not None:
        yield f"{where}: with folds each record trains some trials and measures another; leave folds out, or {public}"
    elif data.split is None or data.split.test == 0:
        yield f"{where} measures records that a coin held out; give data.split, say {{test: 0.2}}, or {public}"
    else:
        if isinstance(data.split.test, int) and NEIGHBOURS[recipe.adjacency].counted:
            yield (
                "data.split.test: a cut to an exact count moves a second record where one is removed, so held-out"
                " records that are private (also the default for a table of your own) need a fraction, say 0.2; or"
                f" {public}"
            )
        if data.public is not None and data.public.cut_from == "test":
            yield (
                "data.public: is cut from the held-out records, which are private; cut it from: train, or give a path,"
                f" or {public}"
            )
        if data.task == "regression" and data.target_bounds is None:
            yield f"data.target_bounds: missing; {where} bounds errors by them; give them, or {public}"


def _rows(recipe: Experiment) -> Problems:
    """Refuse to leave rows out where a record's place decides its part: a row less would move all behind it."""
    if recipe.data.rows is not None and recipe.privacy is not None and not NEIGHBOURS[recipe.adjacency].counted:
        yield (
            f"data.rows: a row that is left out moves the places of others, which {recipe.adjacency} goes by; use"
            " privacy.adjacency: add-remove, or leave such rows out of the file"
        )


def _updates(recipe: Experiment) -> Problems:
    """Refuse rates by step and groups of parameters where a method makes updates of its own."""
    method = recipe.method
    if not isinstance(method, Gradient):
        return
    own = not isinstance(method, SgdMethod | GdMethod | DpSgdMethod | DpGdMethod | PythonMethod) or method.one_by_one
    for key, given in (("groups", method.groups), ("learning_rate", getattr(method.rate, "by_step", False))):
        if given and own:
            yield f"method.{key}: {method.kind} makes updates of its own; use dp-sgd with larger batches"


def _start(recipe: Experiment) -> Problems:
    """Refuse to start from a result where a method has a start of its own, or where test records are trained on."""
    method, privacy = recipe.method, recipe.privacy
    if privacy is None or privacy.start is None:
        return
    if not isinstance(method, DpSgdMethod | DpGdMethod) or method.one_by_one:
        yield f"privacy.start: {method.kind} does not start from given weights in this way; use dp-sgd or dp-gd"
    if recipe.folds is not None:
        yield "folds: each record is tested in one fold and trained on in others; with privacy.start, leave them out"


def _several(recipe: Experiment) -> Problems:
    """Refuse labels that are arrays, and losses, where a method, a unit or a measurement is of one label a record."""
    data, method, model = recipe.data, recipe.method, recipe.model
    several = data.labels_are_arrays
    loss: LossSettings | None = None if isinstance(model, ConvexModel) else model.loss
    if several and data.measured_privately:
        yield (
            f"data.evaluation: private measures one class or number a record, not data.task: {data.task}; give test"
            " records of their own or evaluation: public, which declare held-out records public, or split: {test: 0}"
        )
    if several and recipe.privacy is not None and recipe.privacy.unit is not None:
        yield "privacy.unit: a user's rows have one label each; leave this out, or use one row for each user"
    wanted = {"token-classification": ["token-classification"], "next-token": ["causal-lm"]}.get(
        data.task, ["sequence-classification", "image-classification"]
    )
    if isinstance(model, HuggingFaceModel) and model.task not in wanted:
        yield f"model.task: {model.task} does not go with data.task: {data.task}; use {' or '.join(wanted)}"
    if several and isinstance(model, ConvexModel):
        yield "model.kind: convex has one output; use linear, which has one for each label"
    if isinstance(model, ConvexModel) or (not several and loss is None):
        return
    if not isinstance(method, SgdMethod | GdMethod | DpSgdMethod | DpGdMethod):
        yield f"method.kind: {method.kind} has a loss of its own; use dp-sgd or dp-gd"
    kind = loss.kind if isinstance(loss, NamedLoss) else loss
    if isinstance(kind, str) and data.task not in LOSS_TASKS[kind]:
        yield f"model.loss: {kind} does not go with data.task: {data.task}"
    below = data.target_bounds is not None and data.target_bounds[0] < 0
    if kind == "poisson" and (below or data.log_scale):
        yield "model.loss: poisson is for counts; give data.target_bounds from 0 on, without a log scale"


def _inference(recipe: Experiment) -> Problems:
    """Refuse intervals whose law or price (`intervals/`) does not cover the recipe."""
    method, model, privacy, where = recipe.method, recipe.model, recipe.privacy, "method.inference"
    if not isinstance(method, Preconditioned | LeastSquaresMethod) or method.inference is None or privacy is None:
        return
    if privacy.unit is not None:
        yield f"{where}: its law is of independent records, and users have several; leave it out"
    if isinstance(method, LeastSquaresMethod):
        return
    if not isinstance(model, ConvexModel) or model.loss != "logistic" or model.l2 or model.radius is not None:
        yield (
            f"{where}: is for model {{kind: convex, loss: logistic}} without l2 and radius; for numbers use method"
            " dp-least-squares"
        )
    if recipe.data.weights is not None:
        yield f"{where}: its law is of records that weigh alike; leave class weights out"
    if getattr(method, "weight_decay", None):
        yield f"{where}: its law is of a loss without penalty; leave method.weight_decay out"
    if method.batching != "full":
        yield f"{where}: is for full batches; use method dp-gd, or batching: full"
    yield from _of_share(where, privacy)


def _of_share(where: str, privacy: Privacy) -> Problems:
    """Refuse what gets a share of the budget before training where there is none, or where a run chooses its noise."""
    if privacy.budget is None or privacy.budget_covers == "training":
        yield f"{where}: gets a share of privacy.budget, which must cover the total; give it"
    if privacy.schedule.adaptive:
        yield f"privacy.schedule: {where} is for schedules that are fixed beforehand; use another"


def calibration_problems(recipe: Experiment) -> Problems:
    """Yield why a calibration's proof (`calibration/price.py`) does not cover the recipe, or nothing is corrected."""
    method, model, privacy, where = recipe.method, recipe.model, recipe.privacy, "method.calibration"
    if recipe.method.calibrated is None or privacy is None:
        return
    assert isinstance(method, Preconditioned)
    if isinstance(model, ConvexModel):
        squared = model.loss == "squared" and model.radius is None
    else:
        squared = isinstance(model, LinearModel) and model.loss in (None, "squared")
    if not squared or recipe.data.task != "regression" or not isinstance(model, OneLayer) or not model.has_bias:
        yield f"{where}: is for numbers, a linear or convex model with loss squared and a bias, and no radius"
    if recipe.data.target_bounds is None:
        yield f"{where}: needs data.target_bounds; give them"
    if privacy.unit is not None:
        yield f"{where}: is priced for records, and users have several; leave it out"
    yield from _of_share(where, privacy)
    if type(privacy.clipping) is not FlatClipping:
        yield f"{where}: needs privacy.clipping.kind flat, whose norm bounds residuals"
    if method.learning_rate == "theorem":
        yield f"{where}: is beyond the theorem of method.learning_rate; leave it out"


def _weights(recipe: Experiment) -> Problems:
    """Refuse class weights where a method takes losses that do not know them, and costs without probabilities."""
    data, method, model = recipe.data, recipe.method, recipe.model
    if data.weights is not None:
        if not isinstance(method, SgdMethod | GdMethod | DpSgdMethod | DpGdMethod):
            yield f"data.class_weights: method {method.kind} weighs all records alike; leave this out, or use dp-gd"
        elif method.learning_rate == "theorem":
            yield "data.class_weights: the theorem of method.learning_rate is for losses without weights; give a number"
    if data.costs is not None and isinstance(model, ConvexModel) and not model.known.probabilities:
        yield f"data.costs: loss {model.loss} gives no probabilities to weigh; use logistic"


def _off_grid(recipe: Experiment) -> Problems:
    """Refuse, without a seed, releases that cannot be put on the public grid (`engine/digits.py`)."""
    if recipe.seed is None and isinstance(recipe.method, ObjectivePerturbationMethod):
        yield f"method.kind: objective-perturbation needs a seed, as an experiment: {OFF_GRID}"


def _discovery(recipe: Experiment) -> Problems:
    """Refuse what is not proved, or not possible, with private bounds and categories."""
    columns, privacy, settings = recipe.data.private_columns, recipe.privacy, recipe.data.discovery
    if not columns:
        if settings is not None:
            yield "data.discovery: no bounds or categories are private; leave it out"
        return
    settings = settings or Discovery()
    where = f"data.{'categorical' if any(columns.values()) else 'bounds'}"
    if privacy is None:
        yield f"{where}: private is a release, which needs a privacy section; list the values, or bounds, themselves"
        return
    bins = [step.bin for step in recipe.data.preprocess or () if step.bin is not None]
    whole = [name for name, names in columns.items() if not names and any(one.holds_whole(name) for one in bins)]
    if whole:
        yield f"bin.integers: {', '.join(whole)}: numbers are moved to [0, 1] by private bounds; leave it out"
    kinds = ("names",) if any(columns.values()) else ("bounds", "names")
    if recipe.method.described.discovers not in kinds or privacy.schedule.adaptive:
        covered = any_of(sorted(kind for kind, one in METHODS.items() if one.descriptor.discovers in kinds))
        yield (
            f"{where}: private goes with {covered} and a schedule that is known beforehand; the budget of other methods"
            f" covers no release before them{', or no delta' if any(columns.values()) else ''}"
        )
    if settings.noise_multiplier == "auto" and (privacy.budget is None or privacy.budget_covers == "training"):
        yield (
            "data.discovery.noise_multiplier: auto is a share of privacy.budget, which must cover the total; give both,"
            " or a number"
        )
    if any(columns.values()) and isinstance(privacy.budget, RhoBudget):
        yield "privacy.budget: names of categories cost a delta, which only epsilon and delta cover; give those"


def _by_steps(word: str = " and ") -> str:
    """Return the names of the methods that train step by step, joined by `word`."""
    return word.join(sorted(kind for kind, one in METHODS.items() if one.descriptor.minibatch))


def _rounding(recipe: Experiment) -> Problems:
    """Refuse rounded passes unless batches have one public width: `engine/precision.py` proves no other pass."""
    dtype = recipe.runtime.dtype
    if dtype in ("bfloat16", "tf32") and not recipe.method.described.minibatch:
        yield f"runtime.dtype: {dtype} is for {_by_steps()}, not {recipe.method.kind}; use float32"


def _compiling(recipe: Experiment) -> Problems:
    if recipe.runtime.compile is not True:
        return
    if not recipe.method.described.minibatch:
        kind = recipe.method.kind
        yield f"runtime.compile: the steps of {_by_steps()} are compiled, not those of {kind}; leave it false"
    if recipe.runtime.dtype == "tf32":
        yield "runtime.compile: a program cannot round products of passes alone, as tf32; use auto, bfloat16 or float32"


def _unit(recipe: Experiment) -> Problems:
    """Refuse, for users as unit, everything whose sensitivity is proved for one record but not for all of a user's."""
    unit = None if recipe.privacy is None else recipe.privacy.unit
    if unit is None:
        return
    if not recipe.method.described.by_unit:
        proved = any_of(sorted(kind for kind, one in METHODS.items() if one.descriptor.by_unit))
        fixed = ", batching fixed" if recipe.method.batching == "fixed" else ""
        yield (
            f"privacy.unit: nothing is proved of method {recipe.method.kind}{fixed} where all rows of a user are"
            f" protected together; use {proved}, or leave this out"
        )
    if unit.column == recipe.data.target:
        yield "privacy.unit.column: is the target; name the column that says whose a row is"
    cut = recipe.data.validation
    if cut is not None and not cut.public:
        yield (
            "data.validation: a look at private records is charged for one record, and a user has many;"
            " use public: true, or leave it out"
        )
    for step in recipe.data.preprocess or ():
        if isinstance(step.step, Pca) and step.step.noise_multiplier is not None:
            yield (
                "data.preprocess: the noise of pca is charged for one record, and privacy.unit protects all rows of a"
                " user; use of: public"
            )
    if recipe.data.augment is not None:
        yield "data.augment: is for single records; leave it out, or privacy.unit"
    if recipe.runtime.dtype in ("bfloat16", "tf32"):
        yield f"runtime.dtype: {recipe.runtime.dtype} is proved for single records; use float32 or float64"
    if recipe.runtime.compile is True:
        yield "runtime.compile: is for single records; leave it false, or leave privacy.unit out"


def _augment(recipe: Experiment) -> Problems:
    if recipe.data.augment is None:
        return
    if not recipe.method.described.minibatch:
        yield f"data.augment: method {recipe.method.kind} does not augment; use {_by_steps(' or ')}"
    if recipe.data.features is not None:
        yield "data.augment: data.features are made once, from images as they are; leave one of the two out"
    if recipe.model.kind == "convex":
        yield "data.augment: the convex problem is that of the records as they are; use model.kind: linear"


def preconditioner_problems(recipe: Experiment) -> Problems:
    """Yield the unmet needs of a preconditioner, and what is not proved or defined in combination with one."""
    method, model, privacy = recipe.method, recipe.model, recipe.privacy
    where = "method.preconditioner"
    if privacy is not None and privacy.start is not None:
        yield f"{where}: maps the rows, and privacy.start has weights for rows as they are; give null"
    if privacy is not None and privacy.budget is None:
        yield f"{where}: gets a share of privacy.budget, which is missing; give it, or leave this out"
    if privacy is not None and privacy.budget_covers == "training":
        yield f"privacy.budget_covers: {where} is a share of the whole budget; use total"
    if privacy is not None and privacy.schedule.adaptive:
        yield f"privacy.schedule: {where} is for schedules that are fixed beforehand; use another"
    if model.kind not in ("linear", "convex"):
        yield f"{where}: is for model.kind linear or convex, not {model.kind}; leave it out"
    elif recipe.data.labels_are_arrays or (not isinstance(model, ConvexModel) and model.loss is not None):
        yield f"{where}: is for the usual loss of one class or number a record; leave it out"
    elif isinstance(model, ConvexModel) and (model.l2 or model.radius is not None):
        yield f"{where}: changes what l2 and radius mean; leave model.l2 and model.radius out"
    if getattr(method, "learning_rate", None) == "theorem":
        yield f"method.learning_rate: theorem is for rows as they are, without {where}; give a number"
    if privacy is not None and privacy.unit is not None:
        yield f"{where}: its sums are proved for single rows, not for all rows of a user; give null"
    if isinstance(method, Gradient) and method.one_by_one:
        yield f"{where}: is for steps over many records, not one by one; leave it out, or draw more"
    if isinstance(recipe.method.conditioned, Marginals) and not recipe.data.by_column:
        yield (
            f"{where}: marginals are of columns, which preprocess: bin makes features of; put it last, without pairs,"
            " or use second-moment"
        )
    if recipe.data.augment is not None:
        yield f"{where}: takes the rows as they are; leave data.augment out"
    if recipe.runtime.dtype in ("bfloat16", "tf32"):
        yield f"runtime.dtype: {where} is proved for float32 and float64; use one of them"


def _validation(recipe: Experiment) -> Problems:
    cut, privacy = recipe.data.validation, recipe.privacy
    follows = privacy is not None and privacy.schedule.adaptive
    if recipe.method.kind == "private-selection":
        if privacy is not None and privacy.schedule not in DEFAULT_SCHEDULES:
            yield "privacy.schedule: method private-selection has candidates instead; leave this out"
        if recipe.data.task != "classification":
            yield "method.kind: private-selection counts wrong predictions; it is for classification"
    if follows and cut is None:
        yield "privacy.schedule: validation needs data.validation, say {records: 1000, public: true}"
    if follows and recipe.data.task != "classification":
        yield "privacy.schedule: validation follows an accuracy; use another schedule for regression"
    if cut is not None and not cut.public and not follows:
        yield "data.validation: nothing looks at these private records; declare them public or leave it out"
    if cut is not None and not cut.public and cut.fraction is not None and NEIGHBOURS[recipe.adjacency].counted:
        yield (
            f"data.validation.fraction: under {recipe.adjacency} the size of a fraction depends on the records, and a"
            " private count is published as a share of it; give data.validation.records"
        )
    if cut is not None and recipe.folds is not None:
        yield "folds: cross-validation uses all records; leave data.validation out"


def _public(recipe: Experiment) -> Problems:
    method = recipe.method
    steps = [entry.step for entry in recipe.data.preprocess or ()]
    asks = any(isinstance(step, Pca) and step.of == "public" for step in steps)
    if asks and recipe.data.public is None:
        yield "data.public: missing; pca of: public takes its covariance, say {from: test, records: 1000}"
    if not isinstance(method, PateMethod):
        return
    if recipe.data.public is None:
        yield "data.public: missing; method pate labels public records, say {from: test, records: 9000}"
    if recipe.data.task != "classification":
        yield "method.kind: pate counts votes for classes; it is for classification"
    if recipe.folds is not None:
        yield "folds: method pate cuts the records into parts of its own; leave folds out"
    if method.teachers.model is not None and method.teachers.model.kind == "python":
        yield "method.teachers.model: a model of your own is for teachers and student; give it as model"
    if "convex" in (recipe.model.kind, getattr(method.teachers.model, "kind", None)):
        yield "model.kind: method pate trains models with an output a class; use linear instead of convex"


def _privacy(recipe: Experiment) -> Problems:
    kind, privacy, described = recipe.method.kind, recipe.privacy, recipe.method.described
    if privacy is None:
        if described.privacy == "needed":
            yield f"method: {kind} needs a privacy section"
        return
    length, clashes = privacy.schedule.length, [] if privacy.clipping.plain else [*_clipping(recipe)]
    if described.privacy == "refused":
        private = "dp-gd" if kind == "gd" else "dp-sgd"
        yield f"privacy: method {kind} has no privacy; leave this section out or use {private}"
    elif length is not None and isinstance(recipe.epochs, int) and recipe.epochs > length:
        yield f"privacy.schedule: lists noise for {count(length, 'epoch')}, but epochs is {recipe.epochs}; list more"
    elif clashes:
        yield from clashes
    elif privacy.correlated is not None and not described.correlates:
        yield f"privacy.noise: method {kind} draws its noise step by step; leave this out, or use dp-sgd"
    elif isinstance(recipe.method, FullBatch):
        # a resolved recipe holds the defaults of an unset norm and schedule
        own = (("clipping", (FlatClipping(), FlatClipping(norm=1.0))), ("schedule", DEFAULT_SCHEDULES))
        agd = isinstance(recipe.method, DpAgdMethod)
        where = "method.gradient_clip and method.objective_clip" if agd else "the method"
        for key, unsaid in own:
            if getattr(privacy, key) not in unsaid:
                yield f"privacy.{key}: method {kind} has its own; leave this out (see {where})"


def _clipping(recipe: Experiment) -> Problems:
    """Refuse clipping that is not plain, where proofs are for given bounds only or code clips by itself."""
    method, clipping = recipe.method, recipe.required_privacy.clipping
    if getattr(method, "learning_rate", None) == "theorem":
        yield f"method.learning_rate: theorem is for privacy.clipping flat, not {clipping.kind}; give a number"
    if isinstance(method, Gradient) and method.one_by_one:
        yield f"privacy.clipping: {clipping.kind} is not for steps over single records; use kind: flat, or draw more"
    if clipping.in_units and not method.described.adaptive_clipping:
        yield (
            f"privacy.clipping: method {method.kind} has no bound that {clipping.kind} could find; use flat, or dp-sgd"
        )


def _epochs(recipe: Experiment) -> Problems:
    method, fixed = recipe.method, isinstance(recipe.epochs, int)
    if isinstance(method, Gradient) and method.described.privacy == "refused" and not fixed:
        yield f"epochs: method {method.kind} has no budget to stop at; give a number"
    elif isinstance(method, FullBatch) and fixed:
        yield f"epochs: method {method.kind} has its own length; leave this out"


def _model(recipe: Experiment) -> Problems:
    method, model, data = recipe.method, recipe.model, recipe.data
    unbounded = data.target_bounds is None
    if method.described.only_convex and model.kind != "convex":
        yield f"model: method {method.kind} is for kind: convex, not {model.kind}"
    elif isinstance(method, LeastSquaresMethod) and model.kind != "linear":
        yield f"model: method {method.kind} solves for kind: linear, not {model.kind}"
    elif model.kind != "convex":
        if data.task == "regression" and recipe.privacy is not None and unbounded:
            yield (
                "data.target_bounds: missing; give [low, high] of the target, in its own unit and from public"
                " knowledge: training scales it to [-1, 1], for steps of a bounded gradient do not reach far"
            )
        elif getattr(method, "learning_rate", None) == "theorem":
            yield "method.learning_rate: theorem is for model.kind: convex; give a number"
    elif model.known.residual != (data.task == "regression"):
        yield f"model.loss: {model.loss} does not go with data.task: {data.task}"
    elif not unbounded and model.target_bound != 1:
        yield "model.target_bound: data.target_bounds scales targets to [-1, 1] already; leave this out"
    elif model.known.residual and data.path is not None and unbounded and "target_bound" not in model.model_fields_set:
        yield (
            "data.target_bounds: missing; give [low, high] of the target, in its own unit and from public knowledge:"
            " training scales it to [-1, 1] and clamps what is outside (or give model.target_bound, and scale it"
            " yourself)"
        )


def _on_disk(recipe: Experiment) -> Problems:
    """Refuse rows on disk where all of them are needed at once."""
    method = recipe.method
    if not recipe.data.stays_on_disk:
        return
    where, remedy = "data.on_disk" if recipe.data.on_disk else "data.path", "save features and labels as one npz file"
    remedy = "leave on_disk out" if recipe.data.on_disk else remedy
    what = ["folds hold"] * (recipe.folds is not None)
    if not method.descriptor.distributable or method.batching == "fixed":
        what.append(f"method {method.kind}{', one record a step,' * (method.batching == 'fixed')} holds")
    elif recipe.method.inferred is not None:
        what.append("method.inference holds")
    for own in what:
        yield f"{where}: {own} all rows in memory, and these rows stay on disk; {remedy}"


def _folds(recipe: Experiment) -> Problems:
    if recipe.folds is None:
        return
    if recipe.data.split is not None or recipe.data.test_path is not None:
        yield "folds: cross-validation uses all records; leave data.split and data.test_path out"
    for step in recipe.data.preprocess or ():
        if isinstance(step.step, Pca) or (isinstance(step.step, Scale) and step.step.by != "bounds"):
            yield (
                f"folds: preprocess step {step.kind} would be fitted on rows that a fold holds out; use steps that"
                " act on each record alone"
            )


_CHECKS: tuple[Callable[[Experiment], Problems], ...] = (
    *(_privacy, _epochs, _model, _folds, _validation, _public, _augment, _rounding, _compiling, _unit, _off_grid),
    *(_on_disk, _weights, _discovery, _evaluation, _several, _updates, _rows, _start, _inference, calibration_problems),
)
