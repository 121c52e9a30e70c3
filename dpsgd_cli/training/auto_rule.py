"""The rule for what a recipe leaves `auto`: features, learning rate, clip norm, noise, batches, averaging and steps.

For linear, convex and MLP models under clipped noisy gradients, from public numbers alone. Notation: n records, mu the
budget as one Gaussian mechanism, T the steps, R the norm of a record's features (1 where a preconditioner makes them
so; else its public bound, or the root of their number where there is none), with the constant of the model's own bias;
u the longest residual: 1, or sqrt(2) where each class has an output of its own; h the curvature of a record's loss: 1/4
logistic, 1/2 with an output for each class, 1 squared. For an MLP, of which nothing is known beforehand, R, u and h are
1. The constants (`Terms`) differ: linear; linear and preconditioned; that of more than two classes, or on directions of
synthetic images (the step `rotate`); linear of a target, preconditioned or not; MLP, of classes or a target.

- Directions of synthetic images: 8 sqrt(n mu) of strokes, n mu / 5 of dead leaves, as many as there are or at most
  8,192. What a budget does not pay for is noise.
- Cosines of a numeric column (the step `bin`), of a linear model: of 4, 8, 16 and 32 the most that are at most
  sqrt(n mu) and make at most 2,048 features, or else 4.
- A preconditioner, where a linear model may have one and has at most 2,048 features, or features that are directions:
  of second moments for .15 of mu^2, or where `bin` makes features of single columns and n mu is below 10,000, of counts
  of these for .05. A matrix tells how columns go together, but has noise in far more numbers. None for fewer than 8
  features that are not of `bin`: rows are divided by their lengths, and of few numbers little else is left.
- A constant of the model's own beside those that features hold, for a target: its mean may be far from 0, and is learnt
  sooner so.
- Momentum, and the average of the last half of the steps.
- Clip norm: clip R u, which clips a residual at `clip`: of a linear model at sqrt(n mu / 20,000), from .5 (.4 with a
  preconditioner) to .7. A small budget is better spent on records that are not far off, a large one on being right
  about all; probabilities allow for it (`metrics.probabilities_by`). Of a target, which is within [-1, 1], at sqrt(n mu
  / 200,000), from .05 to .4. Of directions of strokes at .07: what is written is told apart well, and what is left to
  learn from is small. Of those of dead leaves, which are for photographs, at sqrt(n mu / 640,000), from .07 to .35.
- Noise: all steps together move a record's output by noise of standard deviation at most `noise`, in logits (a fifth of
  that of targets). A step's noise on the mean gradient is s = z S / B a coordinate, so that is reach s R u sqrt(T),
  where reach = rate / (1 - momentum); z is that of uniform noise of the same price.
- The learning rate is what that allows, but at most pace / (h R^2): faster would not descend. (At a pace of 25 a
  preconditioned model of columns that are scaled, not binned, swings from side to side; a squared loss may beyond 2 (1
  + momentum), 3.6 or more, so it has a pace of 3, or 2 and more steps with a preconditioner.) Preconditioned directions
  are alike, D of them, so the curvature along any is about h R^2 / D: on directions of synthetic images the pace is D /
  4, of more than two classes D / 8, from 12 to 48.
- Noise by step, with a preconditioner and full batches: `influence` on that average (`schedules/settings.py`), so
  the last steps have the most; else uniform.
- Steps T: as many as the way that noise allows takes at the highest rate, from `fewest` to `most`. They cost time, not
  budget: T steps of noise z sqrt(T) are one of z.
- Batches: all records; where the recipe asks for batches (poisson, shuffle), 8,192 of them, or all if there are fewer.

Where the constants were chosen: on synthetic tables and 43 questions about real ones, never on Adult, Bank or IPUMS; of
directions on 10,000 held-out digits of MNIST's training part and 10,000 photographs of CIFAR-10's. No page reports any
of these but to compare constants (`benchmarks/rule.py`, `results/tabular/README.md`).

Not here: what is `auto` in a recipe, and each choice with its words (`training/auto_settings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from dpsgd_cli.accounting.budget import mu_squared_left
from dpsgd_cli.data.step_settings import Drawn
from dpsgd_cli.engine.settings import ConvexModel, MlpModel, OneLayer
from dpsgd_cli.preconditioning.settings import Marginals, Preconditioner, SecondMoments
from dpsgd_cli.recipe.schema import Recipe

BATCH = 8192
MOMENTS: Preconditioner = SecondMoments(share=0.15)
MARGINALS: Preconditioner = Marginals(share=0.05)
MATRIX_FROM = 10_000
"""The n mu from which a noisy matrix of a table's features tells more than counts of its columns."""
MOST_FEATURES = 2048
FEWEST_FEATURES = 8
"""Of fewer that no step made of columns, a row's direction, which a preconditioner leaves, tells little."""
OF_TARGETS = 0.2
WAVES = (4, 8, 16, 32)


@dataclass(frozen=True)
class Terms:
    """The constants of the rule for one kind of problem."""

    noise: float
    paces: tuple[float, float]
    """The least and the most pace; between them it is `of_feature` times the number of features."""
    momentum: float
    fewest: int
    most: int
    clips: tuple[float, float] = (0.5, 0.7)
    """The least and the most at which a residual is clipped; between them at sqrt(n mu / whole)."""
    whole: float = 20_000
    paid: Callable[[float], float] = lambda signal: 8 * math.sqrt(signal)
    """How many directions of synthetic images an n mu pays for."""
    of_feature: float = 0.0


LINEAR = Terms(noise=1.25, paces=(6, 6), momentum=0.9, fewest=200, most=400)
PRECONDITIONED = Terms(noise=1.4, paces=(12, 12), momentum=0.8, fewest=50, most=100, clips=(0.4, 0.7))
CLASSES = replace(PRECONDITIONED, noise=2.8, paces=(12, 48), of_feature=0.125)
_of_targets = partial(replace, noise=0.7, paces=(3, 3), clips=(0.05, 0.4), whole=200_000)
TARGETS = _of_targets(LINEAR)
PRECONDITIONED_TARGETS = replace(_of_targets(PRECONDITIONED), paces=(2, 2), fewest=100, most=200)
STROKES = Terms(noise=1.6, paces=(0, math.inf), of_feature=0.25, momentum=0.8, fewest=50, most=100, clips=(0.07, 0.07))
DEAD_LEAVES = replace(STROKES, clips=(0.07, 0.35), whole=640_000, paid=lambda signal: signal / 5)
DRAWN: dict[Drawn, Terms] = {"strokes": STROKES, "dead-leaves": DEAD_LEAVES}
MLP = Terms(noise=0.6, paces=(2, 2), momentum=0.9, fewest=100, most=200)
MLP_TARGETS = replace(MLP, paces=(0.5, 0.5))


@dataclass(frozen=True)
class Known:
    """What is public of the data. `bound` is on the norm of the features, None where there is none; `outputs` are K,
    or 1."""

    records: int
    features: int
    outputs: int
    bound: float | None


@dataclass(frozen=True)
class Covered:
    """A recipe for which the rule is, and what it knows of its data."""

    recipe: Recipe
    known: Known

    @property
    def terms(self) -> Terms:
        if isinstance(self.recipe.model, MlpModel):
            return MLP_TARGETS if self.squared else MLP
        if self.recipe.preconditioner is None:
            return TARGETS if self.squared else LINEAR
        if self.drawn is not None:
            return DRAWN[self.drawn]
        if self.squared:
            return PRECONDITIONED_TARGETS
        return CLASSES if self.known.outputs > 2 else PRECONDITIONED

    @property
    def drawn(self) -> Drawn | None:
        """The images whose directions features are; None where they are of none."""
        drawn = [step.rotate.images for step in self.recipe.data.preprocess or () if step.rotate is not None]
        return drawn[-1] if drawn else None

    @property
    def size(self) -> float:
        """R."""
        model = self.recipe.model
        if not isinstance(model, OneLayer):
            return 1.0
        own = math.sqrt(self.known.features) if self.known.bound is None else self.known.bound
        return math.hypot(own if self.recipe.preconditioner is None else 1.0, float(model.has_bias))

    @property
    def squared(self) -> bool:
        """Whether the loss is squared, of one target."""
        model = self.recipe.model
        return self.known.outputs == 1 and not (isinstance(model, ConvexModel) and not model.known.residual)

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
        return OF_TARGETS if self.squared else 1.0

    @property
    def fastest(self) -> float:
        """The highest rate. Of the losses with a kink, whose slopes are clipped, as of the logistic one."""
        model, curvature = self.recipe.model, 1.0
        if isinstance(model, ConvexModel):
            curvature = 1.0 if self.squared else 0.25
        elif self.known.outputs > 1 and not isinstance(model, MlpModel):
            curvature = 0.5
        least, most = self.terms.paces
        pace = min(max(self.terms.of_feature * self.known.features, least), most)
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
