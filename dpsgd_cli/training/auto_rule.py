"""Formulas for settings that are `auto`: features, learning rate, clip norm, noise, batches, averaging and steps.

They are for linear, convex and MLP models, `cnn` and `wrn`, with clipped noisy gradients, and use public numbers alone.
`training/auto_settings.py` resolves the settings of a recipe by them.

Notation:

- n records, T steps; mu, the budget as one Gaussian mechanism; signal = n * mu.
- R, the norm of a record's features, with the constant of the model's own bias. Without that constant it is 1 after a
  preconditioner, else the public bound, else the root of the number of features.
- u, the largest residual: 1, or sqrt(2) if each class has an output of its own; max(q, 1 - q) for a quantile q.
- h, the curvature of a record's loss: 1/4 logistic, 1/2 with an output for each class, 1 squared or huber; times the
  mean of class weights, the largest of which is 1, if a prior gives it. A quantile loss has none: its slope of at most
  u counts as reached at a residual of .01, so h is u / .01.
- For a network nothing is known beforehand, so R, u and h are 1. For `cnn` and `wrn` h is the clip norm C, if that is
  below 1: most gradients are longer, so a step is about rate * C long, and the pace limits that.

The constants (`RuleConstants`) depend on the problem: linear; linear, of texts; linear, of 256 or more features without
bounds and with more than two classes; linear and preconditioned; the latter with more than two classes; linear with a
target, preconditioned by counts, by second moments, or not; MLP with a target, with classes and sampled batches, or
with classes and all records; convolutional network (`cnn`, `wrn`).

- Cosines of a numeric column (the step `bin`), for a linear model: the largest of 4, 8, 16 and 32 that is at most
  sqrt(signal) and makes at most 2,048 features, else 4.
- Grid of 2,048 steps that numbers are rounded to (also `bin`), if all records together have more than 134 million
  features and no products: rows are then kept as codes. No cosine has more than 16 waves, so each has 128 steps.
- Products of the first two cosines, or categories, of every two columns (also the step `bin`): if signal is 5,000 or
  more, and there are at most 2,048 features, with 10 records (for a target 4) and a signal of 4 for each, and 200
  million numbers in all. Smaller budgets do not pay for their noise, and fewer records do not tell what they add: of
  4,775 records at epsilon 8, with 4 to 10 a feature, log loss was .0040 higher with products (10 tables), of 10,000
  with 10 to 20 a feature .0012 (6 tables). For targets they paid at 5 a feature (prices, temperatures).
- Preconditioner, if a linear model may have one and has at most 2,048 features: by counts of single columns, for .05
  of mu^2, if `bin` makes the features; rows then keep their lengths, so that the model is additive at every budget.
  Otherwise by second moments, for .15. There is none for fewer than 8 features that are not of `bin`: rows are divided
  by their lengths, which leaves little of few numbers.
- Bias beside a constant among the features, for a target: its mean may be far from 0, and is learnt sooner this way.
- Calibration, for .05 of what the preconditioner leaves of mu^2, for a squared loss behind counts, but not of
  logarithms: clipped residuals move predictions from the mean towards the median (`calibration/price.py`).
- Momentum, and the average of the last half of the steps; for a convolutional network, and an MLP with classes and
  sampled batches, the moving one (`ema`).
- Clip norm: c R u, so that a residual is clipped at c; 1 for an MLP, .1 for a convolutional network. A small budget is
  best spent on records with small residuals, a large one on all. Probabilities allow for the clipping
  (`metrics.probabilities_by`).
    - Linear model: c = sqrt(signal / 20,000), from .5 (.4 with a preconditioner) to .7; of texts without a
      preconditioner sqrt(signal / 40,000), from .2.
    - Target, which is within [-1, 1]: c = sqrt(signal / 200,000), from .05 to .4; with counts half of that, and more
      steps.
    - Many features without bounds, as of wavelets, and more than two classes: c = .1.
- Noise: all steps together move a record's output by noise of standard deviation at most `noise`, in logits (for
  targets, a fifth of that). A step's noise on the mean gradient has standard deviation s = z S / B per coordinate, with
  sensitivity S and batch size B. So the output moves by reach s R u sqrt(T), where reach = rate / (1 - momentum). z is
  that of uniform noise of the same price.
    - Sampling error counts as noise beside it, for two classes with a preconditioner: other records of the same kind
      would have moved the mean gradient by about .2 u / sqrt(n D) per coordinate, by the same in all steps. So few
      records stop early, whatever the budget; else more budget overfits, and does worse.
- Learning rate: the highest that this noise allows, but at most pace / (h R^2), beyond which steps do not descend.
    - At a pace of 25 a preconditioned model of scaled (not binned) columns oscillates.
    - With a squared loss steps may oscillate beyond 2 (1 + momentum), 3.6 or more. So its pace is 3, or with a
      preconditioner 2 and more steps. With counts it is .8: products of dependent columns are longer than counts of
      single columns tell, and at 1.6 steps oscillated on diamonds at epsilon 8.
    - Of many features without bounds few directions are long, so curvatures along most are small: the pace is .075 D.
    - Few texts share a word, so the curvature is small along most words: the pace is 30.
    - Preconditioning makes the D directions alike, with a curvature along each of about h R^2 / D. So the pace is D /
      8, from 12 to 48, with more than two classes.
- Noise by step, with a preconditioner and full batches: `influence` on that average (`schedules/settings.py`), so
  the last steps have the most noise; else uniform.
- Steps T: at the highest rate, those that cover the distance which the noise allows; from `fewest` to `most`, or fewer
  for many records. They cost time, not budget: T steps of noise z sqrt(T) are one of z.
- Batches: all records; if the recipe asks for batches (poisson, shuffle), 8,192 records, or all if there are fewer.
- Sampled batches of a convolutional network, or an MLP with classes: so large that T steps have a noise multiplier of
  about 1, or 1.5, at which the noise of all steps together is 1.3, or 1.1, times that of full batches. A record is
  expected in at most 40 steps, or in as many as the recipe says, which may make T smaller, but not below `fewest`.
- Not chosen: augmented copies. Four copies of a digit cost four times the time and were no more accurate at epsilon 8.

The constants were chosen on synthetic tables and 43 questions about real ones, never on Adult, Bank or IPUMS. Those
for texts were chosen on folds of SST-2's training part. Pages report these data only to compare constants
(`benchmarks/rule.py`, `results/tabular/README.md`). Those for convolutional networks were chosen on scikit-learn's
digits and on synthetic drawings with `cnn`, not on MNIST or CIFAR-10 (`python -m benchmarks.rule --tables "small
digits" drawings`). Those for an MLP with sampled batches were chosen on 10,000 held-out digits of MNIST's training part
(`--tables "digits by mlp"`). Those for many features without bounds were chosen on these and on scikit-learn's
(`--tables "digits by wavelets" "small digits by wavelets"`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from dpsgd_cli.accounting.adjacency import BATCHINGS
from dpsgd_cli.accounting.budget import mu_squared_left
from dpsgd_cli.engine.settings import CnnModel, ConvexModel, MlpModel, OneLayer, WrnModel
from dpsgd_cli.preconditioning.price import Marginals, Preconditioner, SecondMoments
from dpsgd_cli.recipe.schema import Recipe

BATCH = 8192
MOST_EPOCHS = 40
"""Most expected uses of a record where batches are sized by `RuleConstants.least_noise`."""
MOMENTS: Preconditioner = SecondMoments(share=0.15)
MARGINALS: Preconditioner = Marginals(share=0.05)
PRODUCTS_FROM = 5_000
"""Least signal for products of features of two columns."""
SIGNAL_A_FEATURE = 4
"""Least signal for each feature if there are products."""
RECORDS_A_FEATURE = {True: 4, False: 10}
"""Fewest records for each feature if there are products: for a target, and for classes."""
MOST_NUMBERS = 200_000_000
"""Most features of all records together if there are products: 0.8 GB in float32."""
MOST_DENSE = 1 << 27
"""Most features of all records together, beyond which numbers are rounded to a grid, so that rows are kept as codes."""
MOST_WORK = 5e10
"""Most features of all records together times steps, beyond which there are no more steps than `fewest`."""
MOST_FEATURES = 2048
FEWEST_FEATURES = 8
"""Fewest features for a preconditioner, which keeps only the direction of a row; no limit after `bin`."""
MANY_FEATURES = 256
"""Fewest features for the constants of many features without bounds."""
OF_TARGETS = 0.2
RESOLVED = 0.01
"""Size of a residual, in units of half a target's bounds, below which steps on a quantile loss do not resolve it."""
WAVES = (4, 8, 16, 32)
"""Numbers of cosines of a column; the rule takes the most within sqrt(n mu), or within this share of it:"""
WAVES_OF_TARGETS = 0.5
"""Share of sqrt(n mu) for targets, whose residuals are clipped harder, so that small budgets pay for less."""


@dataclass(frozen=True)
class RuleConstants:
    """Constants of the formulas for one kind of problem."""

    noise: float
    rate_limits: tuple[float, float]
    """Least and largest pace; between them it is `of_feature` times the number of features."""
    momentum: float
    fewest: int
    most: int
    clips: tuple[float, float] = (0.5, 0.7)
    """Least and largest clip of a residual; between them it is sqrt(signal / clip_scale_n_mu)."""
    clip_scale_n_mu: float = 20_000
    of_feature: float = 0.0
    sampling: float = 0.0
    """Sampling error of a mean gradient, in units of u / sqrt(n D) by coordinate."""
    least_noise: float | None = None
    """Noise multiplier that sampled batches of a network of images are sized for; None: batches of `BATCH`."""


LINEAR = RuleConstants(noise=1.25, rate_limits=(6, 6), momentum=0.9, fewest=200, most=400)
PRECONDITIONED = RuleConstants(
    noise=1.4, rate_limits=(12, 12), momentum=0.8, fewest=50, most=100, clips=(0.4, 0.7), sampling=0.2
)
TEXTS = replace(LINEAR, rate_limits=(30, 30), clips=(0.2, 0.7), clip_scale_n_mu=40_000)
FEATURES = replace(LINEAR, noise=5, rate_limits=(6, math.inf), of_feature=0.075, clips=(0.1, 0.1))
CLASSES = replace(PRECONDITIONED, noise=2.8, rate_limits=(12, 48), of_feature=0.125, sampling=0)
_of_targets = partial(replace, noise=0.7, rate_limits=(3, 3), clips=(0.05, 0.4), clip_scale_n_mu=200_000)
TARGETS = _of_targets(LINEAR)
PRECONDITIONED_TARGETS = replace(_of_targets(PRECONDITIONED), rate_limits=(2, 2), fewest=100, most=200, sampling=0)
COLUMNS_TARGETS = replace(
    TARGETS, noise=0.5, rate_limits=(0.8, 0.8), momentum=0.9, fewest=200, most=1000, clip_scale_n_mu=800_000
)
MLP = RuleConstants(noise=0.6, rate_limits=(2, 2), momentum=0.9, fewest=100, most=200, clips=(1, 1))
MLP_TARGETS = replace(MLP, rate_limits=(0.5, 0.5))
MLP_SAMPLED = replace(MLP, noise=0.2, rate_limits=(0.5, 0.5), most=8000, least_noise=1.5)
CONVOLUTIONAL = RuleConstants(
    noise=0.2, rate_limits=(0.2, 0.2), momentum=0.9, fewest=100, most=4000, clips=(0.1, 0.1), least_noise=1.0
)


@dataclass(frozen=True)
class PublicFacts:
    """Public facts about the data. `bound` is on the norm of a record's features, or None; `outputs` is K, or 1."""

    records: int
    features: int
    outputs: int
    bound: float | None


@dataclass(frozen=True)
class RuleProblem:
    """A recipe that the formulas cover, and the public facts about its data."""

    recipe: Recipe
    known: PublicFacts

    @property
    def terms(self) -> RuleConstants:
        if isinstance(self.recipe.model, CnnModel | WrnModel):
            return CONVOLUTIONAL
        if isinstance(self.recipe.model, MlpModel):
            if self.of_target:
                return MLP_TARGETS
            return MLP_SAMPLED if BATCHINGS[self.recipe.method.batching].sampled else MLP
        if self.recipe.method.conditioned is None:
            if self.of_target:
                return TARGETS
            many = self.known.bound is None and self.known.features >= MANY_FEATURES and self.known.outputs > 2
            return TEXTS if self.recipe.data.of_texts else FEATURES if many else LINEAR
        counts = isinstance(self.recipe.method.conditioned, Marginals)
        if self.of_target:
            return COLUMNS_TARGETS if counts else PRECONDITIONED_TARGETS
        return CLASSES if self.known.outputs > 2 else PRECONDITIONED

    @property
    def size(self) -> float:
        """Return R, the norm of a record's features, with the constant of the model's own bias; 1 for an MLP."""
        model = self.recipe.model
        if not isinstance(model, OneLayer):
            return 1.0
        own = math.sqrt(self.known.features) if self.known.bound is None else self.known.bound
        return math.hypot(own if self.recipe.method.conditioned is None else 1.0, float(model.has_bias))

    @property
    def of_target(self) -> bool:
        """Return True if the loss is one of a target's residual: the squared error, or that of a convex model."""
        model = self.recipe.model
        return self.known.outputs == 1 and not (isinstance(model, ConvexModel) and not model.known.residual)

    @property
    def level(self) -> float | None:
        """Return the level q of a quantile loss; None for any other."""
        model = self.recipe.model
        return model.quantile if isinstance(model, ConvexModel) and model.loss == "quantile" else None

    @property
    def signal(self) -> float | None:
        """Return signal = n * mu; None without a budget."""
        privacy = self.recipe.privacy
        if privacy is None or privacy.budget is None:
            return None
        return self.known.records * math.sqrt(mu_squared_left(privacy.budget, ()))

    @property
    def clip(self) -> float:
        """Return c, the bound at which a residual is clipped; for a quantile 1, which its slopes do not pass."""
        if self.level is not None:
            return 1.0
        model, (least, most) = self.recipe.model, self.terms.clips
        if isinstance(model, ConvexModel) and model.loss == "huber":
            most = min(most, model.huber_width)
        scale = 0.0 if self.signal is None else math.sqrt(self.signal / self.terms.clip_scale_n_mu)
        return min(max(scale, least), most)

    @property
    def residual(self) -> float:
        """Return u, the largest residual, or slope of a quantile's loss."""
        if self.level is not None:
            return max(self.level, 1 - self.level)
        return self.recipe.model.by_residual(self.known.outputs) if isinstance(self.recipe.model, OneLayer) else 1.0

    @property
    def unit(self) -> float:
        """Return the unit of an output: 1 for logits; `OF_TARGETS` for targets, which are within [-1, 1]."""
        return OF_TARGETS if self.of_target else 1.0

    @property
    def fastest(self) -> float:
        """Return the highest learning rate. Losses with a kink, whose slopes are clipped, count as logistic ones."""
        model, curvature = self.recipe.model, 1.0
        if self.terms.least_noise is not None:
            curvature = min(self.norm, 1.0)
        elif self.level is not None:
            curvature = self.residual / RESOLVED
        elif isinstance(model, ConvexModel):
            curvature = 1.0 if self.of_target else 0.25
        elif self.known.outputs > 1 and not isinstance(model, MlpModel):
            curvature = 0.5
        least, most = self.terms.rate_limits
        pace = min(max(self.terms.of_feature * self.known.features, least), most)
        return pace / (curvature * self.size**2)

    @property
    def norm(self) -> float:
        """Return the clip norm C; 1 if each layer has its own."""
        clipping = self.recipe.required_privacy.clipping
        return 1.0 if clipping.by_layer else clipping.norm_bound(None)

    @property
    def steps(self) -> float:
        """Return the number of steps at the highest rate that cover the distance which the noise allows."""
        if self.signal is None or self.recipe.required_privacy.clipping.by_layer:
            return self.terms.fewest
        # T steps of noise C sqrt(T) / (n * mu) add up to T C / (n * mu)
        way = self.effective_step(self.norm / self.signal)
        return min(max(way * (1 - self.terms.momentum) / self.fastest, self.terms.fewest), self.terms.most)

    @property
    def sampled_batch(self) -> int | None:
        """Return the size of sampled batches for `least_noise`; None where batches are not sized by it.

        In the limit of many steps mu = rate sqrt(T (exp(1 / z^2) - 1)) for T steps of noise multiplier z (Bu et al.
        2020, "Deep learning with Gaussian differential privacy"). A record is expected in rate T steps.
        """
        least, signal, given = self.terms.least_noise, self.signal, self.recipe.epochs
        if least is None or signal is None:
            return None
        mu, spent = signal / self.known.records, math.expm1(least**-2)
        epochs = given if isinstance(given, int) else min(mu * math.sqrt(self.steps / spent), MOST_EPOCHS)
        rate = max(epochs / self.steps, mu**2 / (epochs * spent))
        return max(1, round(self.known.records * min(rate, epochs / self.terms.fewest, 1.0)))

    @property
    def described(self) -> str:
        """Return R in words."""
        if self.recipe.method.conditioned is None and self.known.bound is None:
            return f"{self.known.features} features without bounds"
        return f"features of norm {self.size:.4g}"

    def effective_step(self, noise: float, steps: int = 1) -> float:
        """Return the largest rate / (1 - momentum) for which noise moves an output by at most `terms.noise` units.

        `noise` is the standard deviation of the noise on the sum of mean gradients of all `steps`, by coordinate. That
        of their sampling error, which is the same in all steps, is `terms.sampling` u / sqrt(n D) for each of them.
        """
        sampled = steps * self.residual * self.terms.sampling / math.sqrt(self.known.records * self.known.features)
        return self.terms.noise * self.unit / (math.hypot(noise, sampled) * self.size * self.residual)
