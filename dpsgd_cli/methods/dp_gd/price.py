"""The price of full-batch descent: of every step, or of the last weights alone (`method.released: last-weights`).

Every step released: `methods/dp_sgd/price.py`.

Last weights. Notation: n the public divisor, S the sensitivity of a sum, z the noise multiplier, eta the learning rate,
m = `model.l2` + `method.weight_decay`, B the bound on a record's features (constant column included), C the clip norm.
A step is w <- P(w - eta (sum_i g_i(w) / n + m w) - eta N / n), N normal of standard deviation z S, P the projection to
the ball of `model.radius` (or nothing). The release is the weights after T steps. Nothing else that was computed from
earlier weights leaves: no average, no metric by epoch, no gradient. Checkpoints hold earlier weights: they are for
resuming on the same machine, are no part of a result, and are private.

Guarantee: the release is mu-Gaussian-DP with mu = sqrt((1 + c) / (1 - c) (1 - c^T) / (1 + c^T)) / z, where c < 1 is the
contraction below. It is charged before the first step.

*A step contracts.* Let phi be a convex loss of one number t = w.x (times a sign, or less a target) with phi'' <= h. Its
gradient phi'(t) x, clipped to norm C, is k(t) x with k = phi' clamped to [-C / |x|, C / |x|]. phi' grows, so k grows,
and by at most h a unit. So k(t) x is the gradient of a convex loss whose Hessian is at most h |x|^2 <= h B^2: clipping
to one norm keeps convexity and smoothness. (It does not with several outputs, several layers or other clipping: a
clamped vector is not a gradient.) The mean objective with its L2 term has a Hessian between m and M = m + h B^2 (n + 1)
/ n, where n + 1 covers the neighbour with one record more. So w -> w - eta gradient changes distances by at most the
factor c = max(|1 - eta m|, |1 - eta M|), which is below 1 if m > 0 and eta < 2 / M. P does not increase distances.

*Shifted interpolation* (Bok, Su and Altschuler 2024, arXiv 2403.00278; here again from its idea). Let X_t = P(f(X_t-1)
+ Z_t) and Y_t = P(g(Y_t-1) + Z'_t) be the weights on two neighbours, X_0 = Y_0, Z of standard deviation s = eta z S /
n. The maps f and g contract by c, and |f(w) - g(w)| <= eta S / n = s / z =: d for every w. Let V_0 = X_0 and V_t =
P(g(V_t-1) + l_t (f(X_t-1) - g(V_t-1)) + Z_t), with the same Z_t as X_t and 0 <= l_t <= 1, l_T = 1, so that V_T = X_T.
Then D_t = |X_t - V_t| <= (1 - l_t) (c D_t-1 + d), because |f(X) - g(V)| <= |f(X) - g(X)| + |g(X) - g(V)|. Given V_t-1,
the shift of step t has norm at most a_t = l_t (c D_t-1 + d), its direction is random, and Z_t is independent of it. A
mixture of shifts of at most a_t is as hard to tell from none as one of a_t (trade-off curves are jointly convex), and P
is post-processing. So the pair (V_t, Y_t) is as hard to tell as (V_t-1, Y_t-1) composed with a Gaussian of mu a_t / s.
After T steps, X_T = V_T against Y_T is mu-Gaussian-DP with mu^2 = sum a_t^2 / s^2 (Dong, Roth and Su 2022).

*Best shifts.* With D_t = c D_t-1 + d - a_t >= 0 and D_T = 0, sum c^(T-t) a_t = d (1 - c^T) / (1 - c). The least sum of
squares has a_t = d c^(T-t) (1 + c) / (1 + c^T), by Cauchy and Schwarz. D_t stays at least 0: a_t grows with t, so D_t
first grows from 0, and falls to 0 at T. The sum of squares is d^2 (1 + c) / (1 - c) (1 - c^T) / (1 + c^T), and d / s =
1 / z. Equality holds for a quadratic in one dimension, whose weights are normal (`tests/methods/test_last_iterate.py`).

*Groups of k*: d is k times as large, so is mu; the neighbour's M has n + k, which stays below 2 / eta where the refusal
below leaves that room for one record only, so groups are refused (`accounting/groups.py`).

*Rounding.* The proof is about exact numbers. Rounding moves the weights of a step by at most r, so that d becomes d + 2
r at most (it is one function of the weights and the noise on both sides). In float64, r / d <= 2^-51 n (n + 1000 / (1 -
c)) for up to 10^6 weights and sums that err by n 2^-53 of their terms: mu is raised by the factor 1 + 2^-50 n (n + 1000
/ (1 - c)). Other number formats are refused.

Refused, because a condition fails or nothing is proved: a loss that is not smooth, several outputs, features without a
bound, other clipping than flat, momentum, Adam, averages, changing learning rates, groups of parameters with rates or
decay of their own, changing or correlated noise, preconditioners, calibration, users, validation records, m = 0, eta >=
2 / M.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dpsgd_cli.accounting.mechanism import GaussianSum, LastIterate, last_iterate_mu
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.clipping.settings import FlatClipping
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.dp_gd.settings import DpGdMethod
from dpsgd_cli.methods.dp_sgd.price import gradient, gradient_together
from dpsgd_cli.methods.dp_sgd.settings import SgdSettings
from dpsgd_cli.methods.risks.constants import constants_of
from dpsgd_cli.schedules.settings import Uniform

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


def full_gradient(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of full-batch descent. Raises PrivacyError, with all reasons, for what is not proved."""
    assert isinstance(recipe.method, DpGdMethod)
    if recipe.method.released == "every-step":
        return gradient(recipe, facts)
    if problems := _unproved(recipe):
        raise PrivacyError(f"method.released: last-weights is not proved: {'; '.join(problems)}")
    contraction = contraction_of(recipe, facts)
    return gradient_together(recipe, facts, partial(last_weights, contraction, facts.records))


def _unproved(recipe: Recipe) -> list[str]:
    """Return the settings of a recipe that break a condition of the theorem, each with what to use."""
    method, privacy, model = recipe.method, recipe.required_privacy, recipe.model
    assert isinstance(method, DpGdMethod)
    plain = isinstance(method.optimizer, SgdSettings) and method.optimizer.momentum == 0
    wanted = {
        "model.kind must be convex (one output)": isinstance(model, ConvexModel),
        "privacy.clipping.kind must be flat": type(privacy.clipping) is FlatClipping,
        "method.optimizer must be {kind: sgd, momentum: 0}": plain,
        "method.averaging must be null": method.averaging is None,
        "method.preconditioner must be null": method.preconditioner is None,
        "method.calibration must be null": method.calibration is None,
        "method.groups must be left out": not method.groups,
        "method.learning_rate must be one number": isinstance(method.learning_rate, float | int),
        "privacy.schedule.kind must be uniform": isinstance(privacy.schedule, Uniform),
        "privacy.noise must be left out": privacy.correlated is None,
        "privacy.unit must be left out": privacy.unit is None,
        "data.validation must be left out": recipe.data.validation is None,
        "epochs must be a number": isinstance(recipe.epochs, int),
        "runtime.evaluate_every must be at least epochs, so that metrics are of the last weights": (
            not isinstance(recipe.epochs, int) or recipe.runtime.evaluate_every >= recipe.epochs
        ),
        "runtime.dtype must be float64": recipe.runtime.dtype == "float64",
    }
    return [text for text, holds in wanted.items() if not holds]


def contraction_of(recipe: Recipe, facts: Facts) -> float:
    """Return c < 1 of a step: max(|1 - eta m|, |1 - eta M|). Raises PrivacyError if the step does not contract."""
    method, model = recipe.method, recipe.model
    assert isinstance(method, DpGdMethod) and isinstance(model, ConvexModel)
    assert isinstance(method.learning_rate, float | int)
    if facts.feature_bound is None:
        raise PrivacyError(
            "method.released: last-weights needs a public bound on the norm of a record's features: scale by bounds, or"
            " add unit-norm to data.preprocess"
        )
    least = model.l2 + method.weight_decay
    curvature = constants_of(model, facts.feature_bound).smoothness
    most = least + curvature * (facts.records + 1) / facts.records
    if not 0 < least <= most < float("inf"):
        raise PrivacyError(
            f"method.released: last-weights needs a smooth loss and model.l2 above 0; {model.loss} with l2 {least:g} is"
            f" between {least:g}- and {most:g}-curved"
        )
    eta = float(method.learning_rate)
    contraction = max(abs(1 - eta * least), abs(1 - eta * most))
    if not contraction < 1:
        raise PrivacyError(
            f"method.learning_rate is {eta:g}, but must be below {2 / most:.6g} (2 / curvature): larger steps do not"
            " contract, and then the last weights are not proved to cost less than every step"
        )
    return contraction


def last_weights(contraction: float, records: int, step: GaussianSum, steps: int) -> LastIterate:
    """Return the one mechanism of `steps` secret steps, each with the noise of `step`, on at most `records` records."""
    rounding = 1 + 2.0**-50 * records * (records + 1000 / (1 - contraction))
    noise = step.noise_multiplier
    whole = 1 / (rounding * last_iterate_mu(noise, contraction, steps)) if noise else 0.0
    return LastIterate(
        whole,
        step.adjacency,
        sensitivity=step.sensitivity,
        label=step.label,
        step_noise=noise,
        contraction=contraction,
        length=steps,
    )
