"""What a recipe leaves `auto`: one rule for features, learning rate, clip norm, noise, batches, averaging and steps.

It reads what is public before any record is used, and nothing else: the recipe, the numbers of training records,
features and outputs, the bound on a record's features that the public bounds give, and the budget. So it costs nothing,
and neighbouring data of the same public facts get the same settings, to the bit.

The rule, for linear, convex and MLP models under clipped noisy gradients. Notation: n records, mu the budget as one
Gaussian mechanism, T the steps, R the norm of a record's features (1 where a preconditioner makes them so; else its
public bound, or the root of their number where there is none), with the constant of the model's own bias; u the longest
residual: 1, or sqrt(2) where each class has an output of its own; h the curvature of a record's loss: 1/4 logistic, 1/2
with an output for each class, 1 squared. For an MLP, of which nothing is known beforehand, R, u and h are 1. The
constants (`Terms`) differ: linear; linear and preconditioned; that on directions of synthetic images (the step
`rotate`); MLP.

- Directions of synthetic images: 8 sqrt(n mu) of strokes, n mu / 5 of dead leaves, as many as there are or at most
  8,192. What a budget does not pay for is noise.
- Cosines of a numeric column (the step `bin`), of a linear model: of 4, 8, 16 and 32 the most that are at most
  sqrt(n mu) and make at most 2,048 features, or else 4.
- A preconditioner, where a linear model may have one and has at most 2,048 features, or features that are directions:
  of second moments for .15 of mu^2, or where `bin` makes features of single columns and n mu is below 10,000, of counts
  of these for .05. A matrix tells how columns go together, but has noise in far more numbers.
- Momentum, and the average of the last half of the steps.
- Clip norm: clip R u, which clips a residual at `clip`: of a linear model at sqrt(n mu / 20,000), from .5 (.4 with a
  preconditioner) to .7. A small budget is better spent on records that are not far off, a large one on being right
  about all; probabilities allow for it (`metrics.probabilities_by`). Of directions of strokes at .07: what is written
  is told apart well, and what is left to learn from is small. Of those of dead leaves, which are for photographs, at
  sqrt(n mu / 640,000), from .07 to .35.
- Noise: all steps together move a record's output by noise of standard deviation at most `noise`, in logits (a fifth of
  that of targets, which are within [-1, 1]). A step's noise on the mean gradient is s = z S / B a coordinate, so that
  is reach s R u sqrt(T), where reach = rate / (1 - momentum); z is that of uniform noise of the same price.
- The learning rate is what that allows, but at most pace / (h R^2): faster would not descend. (At a
  pace of 25 a preconditioned model of columns that are scaled, not binned, swings from side to side.) Preconditioned
  directions are alike, D of them: the curvature along any is about h R^2 / D, and the pace is `pace` D.
- Noise by step, with a preconditioner and full batches: `influence` on that average (`recipe/schema/schedule.py`), so
  the last steps have the most; else uniform.
- Steps T: as many as the way that noise allows takes at the highest rate, from `fewest` to `most`. They cost time, not
  budget: T steps of noise z sqrt(T) are one of z.
- Batches: all records; where the recipe asks for batches (poisson, shuffle), 8,192 of them, or all if there are fewer.

A recipe that gives its own learning rate gets what goes with any: clip norm 1, the last weights, no momentum.

Where the constants were chosen: on synthetic tables and 21 real ones, never on Adult, Bank or IPUMS; of directions on
10,000 held-out digits of MNIST's training part and 10,000 photographs of CIFAR-10's. No page reports any of these
(`benchmarks/rule.py`).

Not here: what is public of data (`data/preparation.py`), when the rule is asked (`joint.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpsgd_cli.privacy.budget import mu_squared_left
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.recipe.loading import Choice
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.agreement import preconditioner_problems
from dpsgd_cli.recipe.schema.clipping import FlatClipping
from dpsgd_cli.recipe.schema.gradient import (
    Gradient,
    Marginals,
    Preconditioned,
    Preconditioner,
    SecondMoments,
    SgdSettings,
    TailIterates,
)
from dpsgd_cli.recipe.schema.method import PrivateSelectionMethod
from dpsgd_cli.recipe.schema.model import ConvexModel, MlpModel, OneLayer
from dpsgd_cli.recipe.schema.schedule import ByRule, Influence, Tail, Uniform
from dpsgd_cli.recipe.schema.steps import DIRECTIONS, WAVES_UNTOLD, Drawn

BATCH = 8192
MOMENTS: Preconditioner = SecondMoments(share=0.15)
MARGINALS: Preconditioner = Marginals(share=0.05)
MATRIX_FROM = 10_000
"""The n mu from which a noisy matrix of a table's features tells more than counts of its columns."""
MOST_FEATURES = 2048
OF_TARGETS = 0.2
WAVES = (4, 8, 16, 32)


@dataclass(frozen=True)
class Terms:
    """The constants of the rule for one kind of problem."""

    noise: float
    pace: float
    momentum: float
    fewest: int
    most: int
    clips: tuple[float, float] = (0.5, 0.7)
    """The least and the most at which a residual is clipped; between them at sqrt(n mu / whole)."""
    whole: float = 20_000
    paid: Callable[[float], float] = lambda signal: 8 * math.sqrt(signal)
    """How many directions of synthetic images an n mu pays for."""
    alike: bool = False
    """Whether the curvature along each feature is that of all over their number; `pace` is then of one feature."""


LINEAR = Terms(noise=1.25, pace=6, momentum=0.9, fewest=200, most=400)
PRECONDITIONED = Terms(noise=1.4, pace=12, momentum=0.8, fewest=50, most=100, clips=(0.4, 0.7))
STROKES = Terms(noise=1.6, pace=0.25, momentum=0.8, fewest=50, most=100, clips=(0.07, 0.07), alike=True)
DEAD_LEAVES = replace(STROKES, clips=(0.07, 0.35), whole=640_000, paid=lambda signal: signal / 5)
DRAWN: dict[Drawn, Terms] = {"strokes": STROKES, "dead-leaves": DEAD_LEAVES}
MLP = Terms(noise=0.6, pace=2, momentum=0.9, fewest=100, most=200)


@dataclass(frozen=True)
class Known:
    """What is public of the data. `bound` is on the norm of the features, None where there is none; `outputs` are K,
    or 1."""

    records: int
    features: int
    outputs: int
    bound: float | None


@dataclass(frozen=True)
class _Problem:
    """What the rule knows of a recipe that it covers and its data."""

    recipe: Recipe
    known: Known

    @property
    def terms(self) -> Terms:
        if isinstance(self.recipe.model, MlpModel):
            return MLP
        if self.recipe.preconditioner is None:
            return LINEAR
        if self.drawn is None:
            return PRECONDITIONED
        return DRAWN[self.drawn]

    @property
    def drawn(self) -> Drawn | None:
        """The images whose directions features are; None where they are of none."""
        drawn = [step.rotate.images for step in self.recipe.data.preprocess or () if step.rotate is not None]
        return drawn[-1] if drawn else None

    @property
    def size(self) -> float:
        """R."""
        if isinstance(self.recipe.model, MlpModel):
            return 1.0
        own = math.sqrt(self.known.features) if self.known.bound is None else self.known.bound
        return math.hypot(own if self.recipe.preconditioner is None else 1.0, float(has_bias(self.recipe)))

    @property
    def signal(self) -> float | None:
        """n mu; None without a budget."""
        privacy = self.recipe.privacy
        if privacy is None or privacy.budget is None:
            return None
        return self.known.records * math.sqrt(mu_squared_left(privacy.budget, ()))

    @property
    def clip(self) -> float:
        """Where a residual is clipped."""
        least, most = self.terms.clips
        return least if self.signal is None else min(max(math.sqrt(self.signal / self.terms.whole), least), most)

    @property
    def residual(self) -> float:
        """u."""
        return self.recipe.model.by_residual(self.known.outputs) if isinstance(self.recipe.model, OneLayer) else 1.0

    @property
    def unit(self) -> float:
        """What an output is measured in: a logit, or a part of the range of the targets, which is [-1, 1]."""
        squared = self.known.outputs == 1 and not (
            isinstance(self.recipe.model, ConvexModel) and self.recipe.model.loss != "squared"
        )
        return OF_TARGETS if squared else 1.0

    @property
    def fastest(self) -> float:
        """The highest rate. Of the losses with a kink, whose slopes are clipped, as of the logistic one."""
        model, curvature = self.recipe.model, 1.0
        if isinstance(model, ConvexModel):
            curvature = 1.0 if model.loss == "squared" else 0.25
        elif self.known.outputs > 1 and not isinstance(model, MlpModel):
            curvature = 0.5
        pace = self.terms.pace * (self.known.features if self.terms.alike else 1)
        return pace / (curvature * self.size**2)

    @property
    def described(self) -> str:
        """R, in words."""
        if self.recipe.preconditioner is None and self.known.bound is None:
            return f"{self.known.features} features without bounds"
        return f"features of norm {self.size:.4g}"

    def reach(self, noise: float) -> float:
        """The longest rate / (1 - momentum) at which noise of this standard deviation on a mean, all steps together,
        moves an output as little as it may."""
        return self.terms.noise * self.unit / (noise * self.size * self.residual)


def is_open(recipe: Recipe) -> bool:
    """Whether anything is left to choose."""
    method, privacy = recipe.method, recipe.privacy
    settings: list[Any] = [recipe.epochs, *_of_features(recipe).values()]
    if isinstance(recipe.model, OneLayer):
        settings.append(recipe.model.bias)
    if isinstance(method, Gradient):
        settings += [method.learning_rate, method.batch_size, method.averaging]
        settings += [getattr(method.optimizer, "momentum", None), getattr(method, "preconditioner", None)]
    if privacy is not None:
        settings.append(privacy.schedule.kind)
    if privacy is not None and isinstance(privacy.clipping, FlatClipping):
        settings.append(privacy.clipping.norm)
    return any(isinstance(value, str) and value == "auto" for value in settings)


def covers(recipe: Recipe) -> bool:
    """Whether the rule chooses the learning rate, and with it everything else that is auto."""
    method = recipe.method
    return (
        isinstance(method, Gradient)
        and method.described.by_rule
        and recipe.model.by_rule
        and recipe.privacy is not None
        and recipe.privacy.clipping.plain
        and method.learning_rate == "auto"
        and isinstance(method.optimizer, SgdSettings)
    )


def asks(recipe: Recipe) -> bool:
    """Whether what is open needs to know of the data."""
    sampled = isinstance(recipe.method, Gradient) and recipe.method.batch_size == "auto"
    turned = any(key.endswith("components") and value == "auto" for key, value in _of_features(recipe).items())
    return covers(recipe) or turned or (sampled and recipe.method.batching != "full") or _solves_noise(recipe)


def has_bias(recipe: Recipe) -> bool:
    """Whether a linear model has a constant of its own, said or chosen."""
    assert isinstance(recipe.model, OneLayer)
    steps = recipe.data.preprocess
    return recipe.model.has_bias and not (recipe.model.bias == "auto" and steps and steps[-1].kind == "bin")


def features(recipe: Recipe, known: Known | None, count: Callable[[Recipe], int]) -> tuple[Recipe, tuple[Choice, ...]]:
    """The recipe with its features settled; `count` says how many another recipe has."""
    told: list[Choice] = []
    ruled = known is not None and covers(recipe) and isinstance(recipe.model, OneLayer)
    signal = _Problem(recipe, known).signal if known is not None and ruled else None
    for key, value in _of_features(recipe).items():
        if value == "auto":
            choose = _waves if key.endswith("waves") else _directions
            choice = choose(recipe, key, signal, count)
            recipe = settled_as(recipe, choice)
            told.append(choice)
    return recipe, tuple(choice for choice in told if choice.why)


def _of_features(recipe: Recipe) -> dict[str, Any]:
    """What steps say of how many features there are, by their keys."""
    found: dict[str, Any] = {}
    for number, step in enumerate(recipe.data.preprocess or ()):
        at = f"data.preprocess.{number}"
        found |= {f"{at}.bin.waves": step.bin.waves} if step.bin and step.bin.cosines is not None else {}
        found |= {f"{at}.rotate.components": step.rotate.components} if step.rotate else {}
    return found


def _waves(recipe: Recipe, key: str, signal: float | None, count: Callable[[Recipe], int]) -> Choice:
    if signal is None:
        return Choice(key, WAVES_UNTOLD, "")
    root, (least, *more) = math.sqrt(signal), WAVES
    of = ", ".join(map(str, WAVES))
    choice = Choice(key, least, f"of {of} the most within sqrt(n mu), {root:.4g}, and {MOST_FEATURES} features")
    for waves in more:
        finer = replace(choice, value=waves)
        if waves <= root and count(settled_as(recipe, finer)) <= MOST_FEATURES:
            choice = finer
    return choice


def _directions(recipe: Recipe, key: str, signal: float | None, count: Callable[[Recipe], int]) -> Choice:
    """All that there are, at most `DIRECTIONS`, unless the budget pays for fewer."""
    there = count(recipe)
    if signal is None:
        return Choice(key, there, "")
    step = (recipe.data.preprocess or ())[int(key.split(".")[2])].rotate
    assert step is not None
    paid = round(DRAWN[step.images].paid(signal))
    most = f"at most {DIRECTIONS}" if there == DIRECTIONS else f"there are {there}"
    return Choice(key, min(max(paid, 1), there), f"n mu is {signal:,.0f}; {most}")


def before_plan(recipe: Recipe, known: Known | None) -> tuple[Recipe, tuple[Choice, ...]]:
    """The recipe with everything settled that a plan reads; `known` may be None where no rule `asks`."""
    told: list[Choice] = []
    for choose in (_bias, _batch_size, _preconditioner, _momentum, _averaging, _clip_norm, _epochs, _schedule):
        choice = choose(recipe, known)
        if choice is not None:
            recipe = settled_as(recipe, choice)
            told.append(choice)
    if isinstance(recipe.method, Gradient) and recipe.method.learning_rate == "auto" and not covers(recipe):
        recipe = settled_as(recipe, Choice("method.learning_rate", recipe.method.rate, ""))
    return recipe, tuple(choice for choice in told if choice.why)


def after_plan(recipe: Recipe, known: Known, plan: Plan) -> tuple[Recipe, tuple[Choice, ...]]:
    """The recipe with its learning rate settled, of which no plan depends."""
    method = recipe.method
    if not covers(recipe):
        return recipe, ()
    assert isinstance(method, Gradient) and isinstance(method.optimizer, SgdSettings)
    problem, sampling = _Problem(recipe, known), plan.sampling
    # sqrt(T) z of the uniform noise of this price: T / sqrt(sum z_t^-2)
    noise, spent = _multipliers(plan), sampling.steps_per_epoch * math.fsum(z**-2 for z in _multipliers(plan))
    steps = sampling.steps_per_epoch * len(noise) / math.sqrt(spent)
    allowed = (1 - method.optimizer.kept) * problem.reach(steps * plan.sensitivity / sampling.batch_size)
    why = f"noise moves an output by {problem.terms.noise * problem.unit:g}; at most {problem.fastest:.4g}"
    if allowed > problem.fastest:
        why = f"the highest for {problem.described}; noise would allow {allowed:.4g}"
    choice = Choice("method.learning_rate", _rounded(min(allowed, problem.fastest)), why)
    return settled_as(recipe, choice), (choice,)


def settled_as(recipe: Recipe, choice: Choice) -> Recipe:
    """The recipe with this value."""
    settled: Recipe = _with(recipe, choice.key.split("."), choice.value)
    return settled


def _with(section: Any, path: list[str], value: Any) -> Any:
    """A section, or a list of them, with a value at a path."""
    if not path:
        return value
    first, *rest = path
    if isinstance(section, list):
        at = int(first)
        return [*section[:at], _with(section[at], rest, value), *section[at + 1 :]]
    return section.model_copy(update={first: _with(getattr(section, first), rest, value)})


def _bias(recipe: Recipe, known: Known | None) -> Choice | None:
    """A linear model needs no constant of its own where the features hold one."""
    if not isinstance(recipe.model, OneLayer) or recipe.model.bias != "auto":
        return None
    return Choice("model.bias", has_bias(recipe), "" if has_bias(recipe) else "bin adds a constant column")


def _batch_size(recipe: Recipe, known: Known | None) -> Choice | None:
    method = recipe.method
    if not isinstance(method, Gradient) or method.batch_size != "auto":
        return None
    if method.batching in ("full", "fixed"):
        return Choice("method.batch_size", None if method.batching == "full" else 1, "")
    assert known is not None
    return Choice("method.batch_size", min(BATCH, known.records), f"of {known.records} records; at most {BATCH}")


def _preconditioner(recipe: Recipe, known: Known | None) -> Choice | None:
    """Where nothing forbids it, and its matrix is small enough."""
    method, key = recipe.method, "method.preconditioner"
    if not isinstance(method, Preconditioned) or method.preconditioner != "auto":
        return None
    on_disk = (recipe.data.path or "").endswith(".npy")
    if known is None or not covers(recipe) or on_disk:
        return Choice(key, None, "")
    most = MOST_FEATURES if _Problem(recipe, known).drawn is None else DIRECTIONS
    if known.features > most:
        return Choice(key, None, "")
    why, chosen = f"{known.features} features, of at most {most}", MOMENTS
    signal = _Problem(recipe, known).signal
    if recipe.data.by_column and signal is not None and signal < MATRIX_FROM:
        why, chosen = f"{why}; n mu is {signal:,.0f}, below {MATRIX_FROM:,}", MARGINALS
    if preconditioner_problems(settled_as(recipe, Choice(key, chosen, ""))):
        return Choice(key, None, "")
    return Choice(key, chosen, why)


def _momentum(recipe: Recipe, known: Known | None) -> Choice | None:
    method, key = recipe.method, "method.optimizer.momentum"
    if not isinstance(method, Gradient) or getattr(method.optimizer, "momentum", None) != "auto":
        return None
    if known is None or not covers(recipe):
        return Choice(key, SgdSettings().kept, "")
    return Choice(key, _Problem(recipe, known).terms.momentum, "goes with the rule's learning rate")


def _averaging(recipe: Recipe, known: Known | None) -> Choice | None:
    """None where the validation accuracy ends the training: nobody knows which half is the last."""
    method, key, privacy = recipe.method, "method.averaging", recipe.privacy
    if not isinstance(method, Gradient) or method.averaging != "auto":
        return None
    if not covers(recipe) or privacy is None or privacy.schedule.adaptive:
        return Choice(key, method.average, "")
    return Choice(key, TailIterates(), "the last half of the steps")


def _clip_norm(recipe: Recipe, known: Known | None) -> Choice | None:
    key, privacy = "privacy.clipping.norm", recipe.privacy
    if privacy is None or not isinstance(privacy.clipping, FlatClipping) or privacy.clipping.norm != "auto":
        return None
    if known is None or not covers(recipe):
        return Choice(key, privacy.clipping.norm_bound(None), "")
    problem = _Problem(recipe, known)
    if isinstance(recipe.model, MlpModel):
        return Choice(key, 1.0, "an MLP's")
    norm = _rounded(problem.clip * problem.size * problem.residual)
    return Choice(key, norm, f"a residual of {problem.clip:.4g} with {problem.described}")


def _epochs(recipe: Recipe, known: Known | None) -> Choice | None:
    """By the rule where noise is solved for; else until the budget is spent, which has no use for a rule."""
    if recipe.epochs != "auto":
        return None
    if known is None or not _solves_noise(recipe):
        return Choice("epochs", recipe.length, "")
    steps, why = _steps(_Problem(recipe, known))
    per_epoch = -(-known.records // (recipe.method.batch or known.records))
    if per_epoch > 1:
        why = f"{steps} steps, {per_epoch} an epoch: {why}"
    return Choice("epochs", -(-steps // per_epoch), why)


def _schedule(recipe: Recipe, known: Known | None) -> Choice | None:
    """Of full batches whose last weights are averaged, where that was tried: of preconditioned linear models."""
    key, privacy = "privacy.schedule", recipe.privacy
    if privacy is None or not isinstance(privacy.schedule, ByRule):
        return None
    initial, uniform = privacy.schedule.initial, Choice(key, Uniform(initial=privacy.schedule.initial), "")
    method, steps = recipe.method, recipe.epochs
    if known is None or not covers(recipe) or recipe.preconditioner is None or privacy.correlated is not None:
        return uniform
    assert isinstance(method, Gradient) and isinstance(method.optimizer, SgdSettings)
    if method.batching != "full" or not isinstance(method.average, TailIterates) or not isinstance(steps, int):
        return uniform
    weights = Tail(epochs=steps, momentum=method.optimizer.kept, fraction=method.average.fraction)
    schedule = Influence(initial=initial, weights=weights)
    return Choice(key, schedule, "less noise in early steps, which all weights of the average have")


def _steps(problem: _Problem) -> tuple[int, str]:
    """T, and why."""
    privacy, terms, records = problem.recipe.privacy, problem.terms, problem.known.records
    if privacy is None or problem.signal is None or privacy.clipping.by_layer or not covers(problem.recipe):
        return terms.fewest, "the fewest of the rule"
    # T steps of noise C sqrt(T) / (n mu) come to T C / (n mu)
    way = problem.reach(privacy.clipping.norm_bound(None) / problem.signal)
    steps = math.ceil(way * (1 - terms.momentum) / problem.fastest)
    why = f"from {terms.fewest} to {terms.most}, for {records} records at mu {problem.signal / records:.4g}"
    return min(max(steps, terms.fewest), terms.most), why


def _multipliers(plan: Plan) -> Sequence[float]:
    """The noise of each epoch; of a plan that follows what it sees, at most so many epochs of the first."""
    return plan.noise_multipliers if plan.epochs else plan.noise_multipliers[:1] * plan.most_epochs


def _solves_noise(recipe: Recipe) -> bool:
    """Whether a plan looks for the noise with which a given number of epochs fits the budget."""
    privacy = recipe.privacy
    gradient = isinstance(recipe.method, Gradient) and not isinstance(recipe.method, PrivateSelectionMethod)
    if privacy is None or privacy.budget is None or not gradient:
        return False
    return recipe.epochs == "auto" and bool(privacy.schedule.free_numbers())


def _rounded(value: float) -> float:
    """To six digits, so that a person can write it down."""
    return float(f"{value:.6g}")
