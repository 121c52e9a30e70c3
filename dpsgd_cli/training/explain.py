"""Explanation of a trained model of a table: the shape of each column, coefficients, and quality on test records.

Everything is computed from released weights and public facts (bounds, values, settings, the ledger), so it is
post-processing and costs nothing. Test curves are of records that the result declares public.

Shapes. The effect of value v of a column is the mean output over reference records whose column is v, minus the mean of
that over the column's grid. The reference records are drawn evenly from public bounds and values, and not from the
data. For an additive model every reference gives the same shape; where rows are divided by their length, and for
networks, it is an average.

The noise of training (`deviation_of_noise`). Full-batch descent with momentum b at rate eta takes

    m_t = b m_(t-1) + g_t + e_t,    w_t = w_(t-1) - eta m_t,    e_t ~ N(0, s_t^2 I),  s_t = z_t S / B,

with sensitivity S and divisor B, and releases the mean of the last w_t. Without curvature (g_t does not depend on w),
e_t enters w_k with weight -eta (1 - b^(k - t + 1)) / (1 - b), and the mean with weight -eta / (1 - b) Tail.weight(t).
So the noise of the mean is N(0, s^2 I) with s^2 = (eta / (1 - b))^2 sum_t Tail.weight(t)^2 s_t^2.

With a quadratic loss of constant Hessian, e_t enters w_(t+k), along an eigenvector of eigenvalue h, with weight
-eta r_k, where r_k = (1 + b - eta h) r_(k-1) - b r_(k-2) and r_0 = 1. Let 0 <= eta h <= 2 (1 + b). The roots p, q of
that recursion have product b and |p + q| <= 1 + b, and r_k = sum_i p^i q^(k-i). For complex roots |r_k| is at most
(k + 1) b^(k/2), which is at most sum_i b^i by the inequality of means. For real roots |r_k| grows with |p + q|, so it
is at most that of the roots 1 and b: sum_i b^i again, the weight without curvature. So s bounds the noise in every
direction. Where the curvature changes, or gradients are clipped, this holds to first order around the final weights.
The effect c w of a public vector c has noise of deviation s |c|, or s |P c| behind a preconditioner P, times the scale
of a calibration (`calibration/run.py`), whose own noise is left out.
`tests/training/test_explain.py` compares that with the spread of 40 trainings on the same records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np

from dpsgd_cli.accounting.ledger import read_entries
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.calibration.price import LABEL as CORRECTION
from dpsgd_cli.clipping.settings import FlatClipping
from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.data.bins import BinColumns
from dpsgd_cli.data.dataset import Column
from dpsgd_cli.data.discover import Discover
from dpsgd_cli.data.preparation import held_out_of
from dpsgd_cli.data.table import target_scale
from dpsgd_cli.engine.metrics import answers_of_classes, ranked
from dpsgd_cli.engine.settings import ConvexModel, MlpModel, OneLayer
from dpsgd_cli.errors import DataError, RunError, UsageError
from dpsgd_cli.methods.dp_sgd.settings import Preconditioned, SgdSettings, TailIterates
from dpsgd_cli.preconditioning.maps import MAP
from dpsgd_cli.results import provenance, shapes, store
from dpsgd_cli.results.shapes import Coefficient, Explained, Shape, TestCurves
from dpsgd_cli.schedules.settings import Tail
from dpsgd_cli.training import intervals as of_coefficients
from dpsgd_cli.training.evaluation import reading_of
from dpsgd_cli.training.inference import Trained
from dpsgd_cli.training.intervals import Inference

_POINTS = 41
_OTHERS, _FEWEST_OTHERS = 64, 16
_MOST_COLUMNS, _FEW_COLUMNS = 200, 24
_MOST_RECORDS, _MOST_ROC = 200_000, 200
"""Pairs whose outputs are computed together: some thousand rows."""


def explain(trained: Trained, trial: int = 0) -> Explained:
    """Return the shapes of a model of a table.

    Raises UsageError if there is no such trial, and RunError if its training diverged.
    """
    trained.check_trial(trial)
    outputs, unit = _outputs_of(trained)
    columns = trained.layout.columns or ()
    texts = dict.fromkeys(column.source for column in columns if _of_text(column))
    shown = [at for at, column in enumerate(columns) if column.marks is None and not _of_text(column)]
    usable = [at for at in shown if _grid(columns[at]) is not None]
    left = [f"{quoted(column.name)} (no public bounds)" for column in columns if _grid(column) is None]
    left += [f"{quoted(name)} (buckets of words)" for name in texts]
    if not columns:
        left = ["shapes: they are for the columns of a table"]
    elif len(usable) > _MOST_COLUMNS:
        left.append(f"all but the first {_MOST_COLUMNS} of {len(usable)} columns")
    deviation, about = deviation_of_noise(trained, trial)
    others = _references(columns, _OTHERS if len(columns) <= _FEW_COLUMNS else _FEWEST_OTHERS)
    inference = _inference(trained, trial)
    effects = _effects(trained, trial, usable[:_MOST_COLUMNS], others)
    found = [_shape(trained, trial, at, *own, deviation, inference) for at, own in effects]
    found.sort(key=lambda shape: -shape.size)
    weights, about_intervals = [] if inference is None else coefficients(trained, trial), ""
    if inference is not None:
        about, about_intervals = "Bands are 95% intervals.", of_coefficients.about(weights)
    return Explained(
        trial=trial, outputs=outputs, unit=unit, about_noise=about, shapes=found,
        left_out=left, coefficients=weights, about_intervals=about_intervals,
    )  # fmt: skip


def write(directory: Path, base: Path) -> None:
    """Write the explanation beside a finished result, for its report; `base` is the folder of its recipe.

    Nothing is written without a usable model. Nothing is written either if the model may not be published, because no
    statement covers it: the report is a page that may be.
    """
    privacy = store.read_document(directory)["privacy"]
    if privacy["accountant"] is None or privacy["uncovered_steps"]:
        return
    try:
        trained = Trained.load(directory)
        trained = replace(trained, loaded=replace(trained.loaded, base=base))  # whose records are in memory still
        shapes.keep(directory, explain(trained).model_copy(update={"curves": curves_of(trained, 0)}))
    except (DataError, RunError):
        return


def coefficients(trained: Trained, trial: int) -> list[Coefficient]:
    """Return the weights of a linear model, for each feature and output, with intervals if the recipe asked for them.

    Raises UsageError for other models.
    """
    if not isinstance(trained.loaded.recipe.model, OneLayer):
        raise UsageError("coefficients are those of linear and convex models; shapes.csv is for every model")
    names = [f"feature {number}" for number in range(math.prod(trained.input_shape))]
    named = trained.pipeline(trial).layouts[-1].columns
    if named is not None and len(named) == len(names):
        names = [column.name for column in named]
    parts = [tensor.double().numpy() for tensor in trained.module(trial).state_dict().values()]
    weights = np.vstack([part.T if part.ndim == 2 else part[None] for part in parts])
    names += ["the model's own constant"] * (len(weights) - len(names))
    labels = [_label(trained, output, weights.shape[1]) for output in range(weights.shape[1])]
    inference = _inference(trained, trial)
    if inference is not None:
        return inference.coefficients(names, labels, weights)
    return [
        Coefficient(feature=name, output=label, weight=float(weights[at, output]))
        for at, name in enumerate(names)
        for output, label in enumerate(labels)
    ]


def _label(trained: Trained, output: int, outputs: int) -> str:
    if trained.data.names_of_several is not None:
        return str(trained.data.names_of_several[output])
    if trained.classes is None:
        return "target"
    return str(trained.classes[output if outputs > 1 else 1])


def deviation_of_noise(trained: Trained, trial: int) -> tuple[float | None, str]:
    """Return s, the deviation of noise in a released weight before preconditioning, and a sentence about the band.

    The first is None, and the sentence says why, where the law is not known.
    """
    recipe, records = trained.loaded.recipe, trained.bundle.about.get("records")
    method, privacy, ledger = recipe.method, recipe.privacy, trained.directory / "ledger.jsonl"
    why = None
    if privacy is None:
        why = "the training had no noise"
    elif privacy.start is not None:
        why = "the weights also hold the noise of the earlier result"
    elif trained.data.labels_are_arrays:
        why = "its law is known for one class or number a record"
    elif not (isinstance(method, Preconditioned) and method.batching == "full" and isinstance(recipe.model, OneLayer)):
        why = "its law is known for linear models and full batches"
    elif not isinstance(method.optimizer, SgdSettings) or not isinstance(method.rate, float):
        why = "its law is known for descent at a constant rate"
    elif not (method.average is None or isinstance(method.average, TailIterates)):
        why = "its law is known for the last weights, or the mean of the last"
    elif not isinstance(privacy.clipping, FlatClipping) or privacy.correlated is not None:
        why = "its law is known for flat clipping and independent noise"
    elif not isinstance(records, int) or not ledger.is_file():
        why = "the model does not say how much there was"
    if why is not None or not (isinstance(method, Preconditioned) and isinstance(method.optimizer, SgdSettings)):
        return None, f"No band of noise is shown: {why}."
    steps = [entry.release.mechanism for entry in read_entries(ledger)[trial] if entry.phase == "train"]
    sums = [one for one in steps if isinstance(one, GaussianSum)]
    if len(sums) < len(steps) or not sums or not isinstance(records, int) or not isinstance(method.rate, float):
        return None, "No band of noise is shown: its law is known for Gaussian sums."
    average = method.average
    share = average.fraction if isinstance(average, TailIterates) else 1 / len(sums)
    tail = Tail(epochs=len(sums), momentum=method.optimizer.momentum_value, fraction=share)
    noise = (tail.weight(t) * one.noise_multiplier * one.sensitivity for t, one in enumerate(sums))
    corrected = float(trained.bundle.kept.get(f"{trial}/{CORRECTION}", np.ones(1))[0])
    found = corrected * method.rate / (1 - tail.momentum) / records * math.hypot(*noise)
    return found, (
        "A band shows how far the noise of training may have moved a curve (1.96 standard deviations, roughly an upper"
        f" bound{'' if recipe.method.calibrated is None else ', without the noise of the calibration'})."
        " It does not say how well these records represent other people."
    )


def _outputs_of(trained: Trained) -> tuple[list[str], str]:
    """Return the names of the explained outputs, and the words for their scale."""
    several = trained.data.names_of_several
    if several is not None:
        return [str(name) for name in several], "log-odds of each label"
    if trained.classes is None:
        logarithmic = trained.data.log_scale
        return ["target"], "target, on its log scale" if logarithmic else "target, in its own unit"
    names = [str(label) for label in trained.classes]
    model = trained.loaded.recipe.model
    odds = not isinstance(model, ConvexModel) or model.known.probabilities
    if len(names) == 2:
        return [names[1]], f"{'log-odds' if odds else 'margin'} of {names[1]} against {names[0]}"
    return names, "logit of each class, against the mean of the classes"


def _contrasts(trained: Trained, outputs: int) -> np.ndarray:
    """Return the explained outputs as contrasts of the model's K `outputs`: (1, K) or (classes, K)."""
    if trained.data.names_of_several is not None:
        return np.eye(outputs)
    if trained.classes is None:
        return np.eye(1, outputs) * target_scale(trained.data).unit
    if outputs == 2:
        return np.array([[-1.0, 1.0]])
    return np.eye(outputs) - (1 / outputs if outputs > 2 else 0.0)


def _explained(trained: Trained, outputs: np.ndarray) -> np.ndarray:
    """Return outputs of the model (N, K) on the explained scale, (N, 1) or (N, classes)."""
    return np.asarray(outputs.astype(np.float64) @ _contrasts(trained, outputs.shape[1]).T)


def _grid(column: Column) -> list[float] | None:
    """Return the entries of a column in a matrix of records over which its shape is shown; None without any."""
    if column.values is not None:
        return [float(code) for code in range(len(column.values))]
    if column.bounds is None:
        return None
    low, high = column.bounds
    high -= column.computed is not None and column.computed.kind == "days"  # which end with the last day
    if float(low).is_integer() and float(high).is_integer() and high - low < _POINTS:
        return [float(number) for number in range(int(low), int(high) + 1)]
    return [float(value) for value in np.linspace(low, high, _POINTS)]


def _of_text(column: Column) -> bool:
    return column.computed is not None and column.computed.kind == "text"


def _references(columns: Sequence[Column], number: int) -> np.ndarray:
    """Return `number` records (n, D) drawn evenly from public bounds and values; nothing is missing in them."""
    drawn = np.random.default_rng(0)
    found = np.zeros((number, len(columns)))
    for at, column in enumerate(columns):
        if column.values is not None:
            found[:, at] = drawn.integers(0, len(column.values), number)
        elif column.bounds is not None and column.marks is None:
            found[:, at] = drawn.uniform(*column.bounds, number)
    return found


def _inference(trained: Trained, trial: int) -> Inference | None:
    """Return the intervals of a trial, whose coding is chosen on drawn reference records; None without intervals."""
    columns = trained.layout.columns or ()
    if not columns or not Inference.asked(trained, trial):
        return None
    drawn = _references(columns, 4 * math.prod(trained.input_shape) + _OTHERS)
    return Inference(trained, trial, trained.inputs(drawn, trial, exactly=True))


def _effects(
    trained: Trained, trial: int, wanted: Sequence[int], others: np.ndarray
) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    """Yield the number of each wanted column, its effects (G, outputs), and their directions (G, D) in the inputs.

    The product of a direction with the weights is the effect of a value of the grid.
    """
    columns = trained.layout.columns or ()
    pipeline = trained.pipeline(trial)
    last, features = pipeline.steps[-1] if pipeline.steps else None, None
    if isinstance(trained.loaded.recipe.model, OneLayer) and not trained.bundle.cuts and isinstance(last, BinColumns):
        before = [step for step in pipeline.steps[:-1] if not isinstance(step, Discover)]
        features = None if before else last.additive(pipeline.layouts[-2])
    if features is None:
        for at in wanted:
            grid = _grid(columns[at]) or []
            rows = np.repeat(others[None], len(grid), axis=0)
            rows[:, :, at] = np.array(grid)[:, None]
            flat = rows.reshape(-1, others.shape[1])
            found = _explained(trained, trained.outputs(flat, trial, exactly=True)).reshape(len(grid), len(others), -1)
            inputs = trained.inputs(flat, trial, exactly=True).astype(np.float64)
            directions = inputs.reshape(len(grid), len(others), -1).mean(axis=1)
            yield at, (found.mean(axis=1), directions - directions.mean(axis=0))
        return
    # of an additive model: no other column matters, so all columns move at once
    grids = {at: _grid(columns[at]) or [] for at in wanted}
    rows = np.repeat(others[:1], max(map(len, grids.values()), default=0), axis=0)
    for at, grid in grids.items():
        rows[: len(grid), at] = grid
    inputs = trained.inputs(rows, trial, exactly=True).astype(np.float64)
    weight = next(iter(trained.module(trial).state_dict().values())).double().numpy()
    for at, grid in grids.items():
        directions = np.zeros((len(grid), inputs.shape[1]))
        own = inputs[: len(grid), features[at]]
        directions[:, features[at]] = own - own.mean(axis=0)
        yield at, (_explained(trained, directions @ weight.T), directions)


def _shape(
    trained: Trained,
    trial: int,
    at: int,
    effects: np.ndarray,
    directions: np.ndarray,
    deviation: float | None,
    inference: Inference | None,
) -> Shape:
    column = (trained.layout.columns or ())[at]
    grid = _grid(column) or []
    effects = effects - effects.mean(axis=0)
    contrasts = _contrasts(trained, next(iter(trained.bundle.weights[trial].values())).shape[0])  # of a linear model
    noise = (
        None
        if deviation is None
        else _noise(trained, trial, directions, deviation * float(np.linalg.norm(contrasts[0])))
    )
    intervals = None if inference is None else inference.shapes(directions, list(contrasts))
    known = [ends[0] is not None for ends in intervals or ()]
    effects -= effects[known].mean(axis=0) if any(known) else 0.0
    of_days = column.computed is not None and column.computed.kind == "days"
    first = datetime.fromisoformat(column.computed.first).date() if of_days and column.computed else None
    return Shape(
        column=column.name,
        first_day=first,
        values=grid if column.values is None else list(column.values),
        effects=effects.tolist(),
        noise=None if noise is None else noise.tolist(),
        intervals=intervals,
        size=float(effects.std(axis=0).max()),
    )


def _noise(trained: Trained, trial: int, directions: np.ndarray, deviation: float) -> np.ndarray:
    """Return the deviation of training noise in effects along `directions` (groups, D), (groups,).

    `deviation` is that of a contrast of released weights before preconditioning.
    """
    whitened = trained.bundle.kept.get(f"{trial}/{MAP}")
    if whitened is not None:
        directions = directions @ whitened.astype(np.float64)
    if trained.bundle.cuts:
        cut = trained.bundle.cuts[trial].double().numpy()
        directions = directions - (directions @ cut) @ cut.T
    return np.asarray(deviation * np.linalg.norm(directions, axis=1))


def curves_of(trained: Trained, trial: int) -> TestCurves:
    """Return quality on the recipe's own test records, which are public; none if there are none, or not any more.

    There is none for folds, whose records are the training records of other trials, and none where the held-out records
    are private (`data.evaluation`).
    """
    recipe = trained.loaded.recipe
    if recipe.data.measured_privately or recipe.folds is not None:
        return TestCurves()
    if recipe.data.labels_are_arrays or not isinstance(recipe.model, OneLayer | MlpModel):
        return TestCurves()
    try:
        document = trained.document
        if document is not None and provenance.check_unchanged(document, trained.loaded, trained.directory):
            return TestCurves()
        part = held_out_of(recipe.data, trained.loaded.base, folds=False)
    except (DataError, RunError, UsageError):
        return TestCurves()
    if not 0 < len(part) <= _MOST_RECORDS:
        return TestCurves()
    outputs = trained.outputs(part.x, trial)
    if trained.classes is None:
        return TestCurves(predicted=_predicted(target_scale(trained.data).outward(part.y), trained.decided(outputs)))
    told = answers_of_classes(part.y, outputs, reading_of(recipe, max(2, outputs.shape[1])))
    if told.scores is None or told.scores.ndim > 1 or np.ptp(told.truth) == 0:
        return TestCurves()
    false, true = ranked(told.truth == 1, told.scores)
    # points that are as far apart in the list of scores
    chosen = np.unique(np.linspace(0, len(false) - 1, _MOST_ROC).round().astype(int))
    return TestCurves(roc=[(float(false[at] / false[-1]), float(true[at] / true[-1])) for at in chosen])


def _predicted(truth: np.ndarray, told: np.ndarray) -> list[tuple[float, float, float, float]]:
    groups = np.array_split(np.argsort(told, kind="stable"), min(15, max(1, len(told) // 20)))
    found = []
    for group in groups:
        low, high = np.quantile(truth[group], [0.1, 0.9])
        found.append((float(told[group].mean()), float(truth[group].mean()), float(low), float(high)))
    return found
