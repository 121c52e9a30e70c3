"""Mechanisms: frozen records of what was released, which answer what one use costs.

A mechanism states the noise, the sensitivity that the noise is relative to, the sample of the data, and the adjacency.
Ledgers list mechanisms with counts. Accountants (`accounting/accountants/`) ask a mechanism for what one use costs:
`mu` of Gaussian DP, `rho` of zCDP, its Renyi `divergence` by order, or its dominating `losses` in both directions. The
answer is None where nothing is proved, and inf where no finite number bounds the use.

The batching decides what ONE count of a `GaussianSum` means:

============  =========================================================================================
full          One noisy sum over all records.
poisson       One noisy sum over a batch that holds each record independently with `sampling_rate`.
fixed         One noisy sum over a batch of fixed size, drawn uniformly without replacement.
shuffle       One EPOCH: noisy sums over all the disjoint batches of a random partition whose choice
              does not depend on the data. By parallel composition it costs one Gaussian
              (Yu et al. 2019, Theorem 2 and Corollary 1).
random-       One EPOCH of T = 1 / `sampling_rate` steps. Each record is in one of them, drawn uniformly and
allocation    independently of all other records (`accounting/allocation_pairs.py`).
============  =========================================================================================

If noise is correlated across steps, one count covers all the steps that a record may take part in once: see
`CorrelatedSums`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from dpsgd_cli.accounting.adjacency import BATCHINGS, NEIGHBOURS, Adjacency, Batching, BatchingKind
from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.errors import PrivacyError

if TYPE_CHECKING:  # NumPy
    from dpsgd_cli.accounting.losses import Pair

PureSource = Literal["laplace", "exponential", "pure"]
_ROUNDING = 1e-9


@dataclass(frozen=True)
class GaussianSum:
    """Gaussian noise on a sum of per-record vectors, each of bounded L2 norm.

    `noise_multiplier` is the standard deviation of the noise over the L2 sensitivity OF THE SUM under `adjacency` (>=
    0; 0 means no privacy). `sensitivity` (> 0) is that L2 sensitivity. It does not change the price; it is recorded so
    that the noise can be re-derived (`noise_multiplier * sensitivity`). `sampling_rate` is in [0, 1]: the inclusion
    probability (poisson), the batch size over the data size (fixed), 1 over the steps of an epoch (random-allocation),
    and 1 for full and shuffle.
    """

    kind: ClassVar[str] = "gaussian"
    noise_multiplier: float
    adjacency: Adjacency
    batching: Batching = "full"
    sampling_rate: float = 1.0
    sensitivity: float = 1.0
    label: str = "gradient"

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a subclass without a kind of its own: accountants would take it for its parent's kind."""
        super().__init_subclass__()
        if "kind" not in vars(cls):
            raise TypeError(f"mechanism {cls.__name__} must state its kind")

    def __post_init__(self) -> None:
        _require(self.noise_multiplier >= 0, "noise_multiplier", self.noise_multiplier, "at least 0")
        _require(0 <= self.sampling_rate <= 1, "sampling_rate", self.sampling_rate, "in [0, 1]")
        _require(0 < self.sensitivity < math.inf, "sensitivity", self.sensitivity, "positive and finite")
        _require_one_of(Adjacency, "adjacency", self.adjacency)
        _require_one_of(Batching, "batching", self.batching)
        if not self.sampled:
            _require(self.sampling_rate == 1, "sampling_rate", self.sampling_rate, f"1 for {self.batching} batching")
        elif self.by_allocation:
            whole = self.sampling_rate > 0 and abs(1 / self.sampling_rate / self.steps - 1) < _ROUNDING
            _require(whole, "sampling_rate", self.sampling_rate, "1 over the number of steps of an epoch")

    @property
    def batches(self) -> BatchingKind:
        """The batching's record: everything that depends on the batching."""
        return BATCHINGS[self.batching]

    @property
    def sampled(self) -> bool:
        """True if the batch is a random sample whose rate amplifies the guarantee."""
        return self.batches.sampled

    @property
    def by_allocation(self) -> bool:
        """True if one use is an epoch in which each record is in one secret step."""
        return self.batches.by_epoch and self.sampled

    @property
    def steps(self) -> int:
        """Number of steps of an epoch in which each record is in one step, drawn uniformly."""
        return round(1 / self.sampling_rate)

    @property
    def comes_and_goes(self) -> bool:
        """True for the standard Poisson-subsampled Gaussian: a record is present or absent, not replaced."""
        return self.batching == "poisson" and not NEIGHBOURS[self.adjacency].replaced

    @property
    def unsampled_noise(self) -> float:
        """Noise multiplier of an unsampled Gaussian that dominates one use (hockey-stick divergences are convex)."""
        return self.noise_multiplier

    @property
    def mu(self) -> float | None:
        """Return 1/z, also for an epoch of shuffled batches (given the partition, only one of them differs)."""
        if self.sampled:
            return None
        return 1 / self.noise_multiplier if self.noise_multiplier**2 > 0 else math.inf

    @property
    def rho(self) -> float | None:
        """Return 1/(2 z^2), also for one epoch of shuffled batches (Yu et al. 2019, Theorem 2)."""
        if self.sampled:
            return None
        variance = self.noise_multiplier**2
        return 1 / (2 * variance) if variance > 0 else math.inf

    def divergence(self, order: float) -> float | None:
        """Return the bound of the batching."""
        kind, replaced = self.batches, NEIGHBOURS[self.adjacency].replaced
        if kind.divergence is None:
            return None
        return kind.divergence(self.sampling_rate, self.noise_multiplier, replaced, order)

    def losses(self) -> Pair:
        """Return the losses of the batching."""
        replaced = NEIGHBOURS[self.adjacency].replaced
        return self.batches.losses(self.sampling_rate, self.noise_multiplier, replaced)

    def scaled(self, factor: float) -> GaussianSum:
        """Return the mechanism with `factor` times as much noise."""
        return dataclasses.replace(self, noise_multiplier=factor * self.noise_multiplier)


@dataclass(frozen=True)
class CorrelatedSums(GaussianSum):
    """Noisy sums of several steps with correlated noise; together they are one `GaussianSum` with the same numbers.

    One count is, for batching poisson, a cycle of `bands` steps; a record is in one of them, with `sampling_rate`. For
    shuffle and random-allocation it is an epoch, and for full the part of an epoch's price that no draw hides. The sum
    of a single step is not a release of its own and has no price. `correlation` is the kind of `privacy.noise`, for the
    reader. The noise y of a step has standard deviation `noise_multiplier` times `sensitivity`; where a use of a record
    moves C g by more or less than a sum, `sensitivity` says by how much.

    Notation: steps t = 0, 1, ...; g_t the sum of clipped vectors of the step's batch, moved by one record by at most
    S; y_t independent normals of standard deviation z S in every coordinate; C lower triangular, its columns of L2 norm
    at most 1. The release is g + C^-1 y.

    Guarantee (poisson): b = `bands`, and C has no entries b or more below the diagonal. Before training, each record is
    put into one of b groups by a draw of its own, which is data-independent. Step t holds each record of group t mod b
    independently with probability q = `sampling_rate`, and no other record. Then the first n steps are at most
    ceil(n / b) Poisson-subsampled Gaussians of noise multiplier z and rate q, adaptively composed, under add-remove and
    zero-out.

    Proof (Choquette-Choo et al. 2023, arXiv 2306.08153, section 4 and appendix: amplification for banded matrices; its
    adaptive streams by Denisov et al. 2022). C is public and invertible. Multiply the release by C, step by step, which
    is possible because C is lower triangular: the result is C g + y. Fix the record in question, all other records'
    groups and coins, and the record's group j. All these have one distribution in both data sets, so by joint convexity
    a bound for each choice bounds the whole. An absent record has a group too, which is not used. Groups are drawn
    record by record, so the groups of the others do not reveal it.

    The record's step s = j + r b moves rows s, ..., s + b - 1 of C g and no others, by v_k = C[s + k, s] u. Here u,
    |u| <= S, is its clipped vector at the weights of step s, which is fixed when the rows before s are. These blocks of
    rows are disjoint and in order. Within one block, given all that was released before it, the rows less the
    contribution of the other records are B v + y, where B is 1 with probability q. The others' contribution to a row is
    a function of earlier rows and of their own coins, the same function in both data sets. So the block is computed
    from B v + y, where |v| <= S max_s |C[:, s]| <= S. After a rotation, that is a number N(B |v|, z^2 S^2) and noise
    that carries no information: the Poisson-subsampled Gaussian. There are at most ceil((n - j) / b) blocks, so at most
    ceil(n / b). Under zero-out u is swapped for nothing, which is the same pair.

    Changing noise. If y_t has a standard deviation z_t S of its own, fixed beforehand, z is the least z_t of the rows
    of a block. A use that is charged for the cycle r of steps r b, ..., (r + 1) b - 1 takes the least z_t of steps r b
    to (r + 2) b - 2: whatever its group, a record that this cycle samples moves only those. Noise z_t C_l on layer l
    instead of z_t S is charged as for a single step (`ClippingKind.charged`): sum |u_l|^2 / (z_t C_l)^2 is at most
    M / z_t^2. Nothing here depends on how many records a group holds: q is each record's own, whatever its group.

    Stopping. The rows of the first n steps are released by the first ceil(n / b) cycles. So the charges made as cycles
    begin cover a training that stops after any step, by any rule that sees only releases.

    Theorem (any pattern). A record is in the steps of a set that is drawn from a public law, w_p for the set p, by
    itself and independently of all data. Let m_p = sum of the columns s in p of |C|, the matrix of absolute values.
    Then P = sum_p w_p N(m_p, z^2 I) against Q = N(0, z^2 I) dominates all steps together, in both directions. It does
    so however each step's weights are computed from earlier releases. Adjacency add-remove, zero-out; replace-one for
    one set, with S twice the bound.

    Proof. Multiply by C and fix the others' sets, as above. Under Q the ratio of P to Q after row t is R_t = sum_p w_p
    L_p, where row t multiplies L_p by exp(<x, v_p> / z - |v_p|^2 / 2 z^2). Here x is standard normal and v_p = sum over
    s <= t in p of C[t, s] u_s. The u_s, |u_s| <= 1, are the record's vectors over S, which depend on earlier rows only,
    and not on p. So, given earlier rows, <v_p, v_q> <= m_p[t] m_q[t], whatever the u_s are. For a convex f let F_t(L) =
    E f(sum_p w_p L_p Y_p), with Y_p the product of the factors of rows after t in the pair of the theorem. All second
    derivatives of F_t in L are means of w_p w_q Y_p Y_q f'' and so no less than 0. So, given earlier rows, E F_t after
    row t only grows with each covariance (Kahane's inequality, `losses.py`), and is at most F_(t-1). By
    induction E f(R_n) <= F_0(1), its value for the pair. H_a(P, Q) = E (R - a)_+ and H_a(Q, P) = E (1 - a R)_+ are such
    means. In the same way any pair whose products m_p . m_q are no smaller dominates this one.

    Guarantee (shuffle): the partition of the records into the steps of an epoch is drawn once, independently of the
    data, and is the same in every epoch. So there is one set, of steps T apart, T steps an epoch, and m.m is the sum of
    the products of all pairs of its columns. Epoch e adds the square of its own column and twice its products with
    earlier ones, which is charged as a Gaussian of its own: squares of Gaussians add up. Adjacency zero-out,
    replace-one. Nothing is amplified.

    Guarantee (random-allocation): each record is put into one of p groups once, as above, and in every epoch into one
    of the T / p steps of that group (t mod p), uniformly. The group may be revealed. Let a(d) be the largest product of
    columns of |C| that are d or more apart. Two sets differ in an epoch by p steps or more, and steps of epochs i and j
    are at least (|i - j| - 1) T + p apart. So products of two sets are no larger than those of this pair. Each epoch is
    a random allocation (`allocation_pairs.py`) among T / p orthogonal vectors of square 1 - a(p); all sets share a
    Gaussian shift of square K a(p) + 2 sum_(i < j) a((j - i - 1) T + p), K epochs. In it R is a product of independent
    factors, so it is the composition of the two. Epoch e adds its allocation and, as batching full, a(p) + 2 sum_(j =
    1..e) a((j - 1) T + p). If C has p bands, a(p) = 0. Adjacency add-remove, zero-out. (Schuchardt and Kalinin 2026,
    arXiv 2601.21636, bound such pairs in other ways.)

    Changing noise, in both. A product of columns s <= s' has rows from s' on alone, so an epoch is charged the least
    z_t of its own rows and of those after it that its columns reach.
    """

    kind: ClassVar[str] = "correlated"
    correlation: str = "banded"
    bands: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.bands >= 1, "bands", self.bands, "at least 1")
        known = self.batching in ("poisson", "shuffle", "random-allocation", "full")
        _require(known, "batching", self.batching, "poisson, shuffle, random-allocation or full")


@dataclass(frozen=True)
class GroupSum(GaussianSum):
    """One noisy sum over a Poisson batch, of which K = `size` records belong to one group: no ledger holds it.

    Each of the K records is in the batch independently with probability q = `sampling_rate`. `sensitivity` and
    `noise_multiplier` z are those of one record, not of the group.

    Guarantee (add-remove and zero-out of all K records): P = sum_j w_j N(j, z^2) against Q = N(0, z^2), in both
    directions, w_j = Pr[Binomial(K, q) = j], dominates a step, in units of `sensitivity` S.

    Proof. Fix the other records' coins, which have one law in both data sets (joint convexity). If the set A of the
    group's records is drawn, the sum moves by a fixed vector v_A with |v_A| <= |A| S. So the outputs are
    P' = sum_A w_A N(v_A, s^2 I) against Q' = N(0, s^2 I), s = z S. Under Q' the ratio dP'/dQ' is sum_A w_A L_A, a sum
    with weights that are no less than 0 of exponentials of Gaussians, each of mean 1, whose logarithms have the
    covariances v_A.v_B / s^2. For each a >= 0, H_a(P', Q') = E (R - a)_+ and H_a(Q', P') = E (1 - a R)_+ are means of
    convex functions of that ratio R. They only grow with each covariance (Kahane's inequality, as in
    `accounting/losses.py`), and no covariance exceeds |A| |B| / z^2, that of v_A = |A| S in one dimension. There
    A enters through its size j alone, whose law is w. Steps compose adaptively (Zhu, Dong and Wang 2022, Theorem 10).
    The mixture: Ganesh 2024 (arXiv 2401.10294); Charles et al. 2024 (arXiv 2407.07737).

    A group with fewer records is covered: w then is smaller in the usual order, and covariances do not change.
    Nothing is proved here for records that are replaced.
    """

    kind: ClassVar[str] = "grouped"
    size: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.size >= 1, "size", self.size, "at least 1")
        _require(self.batching == "poisson", "batching", self.batching, "poisson")
        _require(not NEIGHBOURS[self.adjacency].replaced, "adjacency", self.adjacency, "add-remove or zero-out")

    @property
    def comes_and_goes(self) -> bool:
        return False

    @property
    def unsampled_noise(self) -> float:
        return self.noise_multiplier / self.size

    def divergence(self, order: float) -> float:
        from dpsgd_cli.accounting.renyi import grouped_divergence

        return grouped_divergence(self.size, self.sampling_rate, self.noise_multiplier, order)

    def losses(self) -> Pair:
        from dpsgd_cli.accounting.losses import grouped_pair

        return grouped_pair(self.size, self.sampling_rate, self.noise_multiplier)


@dataclass(frozen=True)
class PureDP:
    """A release that is epsilon-DP. `source` names the mechanism, for accountants that have a tighter bound for it.

    `laplace`: ONE number plus Laplace noise of scale (its sensitivity)/epsilon. `exponential`: the exponential
    mechanism, or any other that is epsilon-bounded-range. `pure`: anything else, report-noisy-min included.
    """

    kind: ClassVar[str] = "pure"
    epsilon: float
    adjacency: Adjacency
    source: PureSource = "pure"
    label: str = "selection"

    def __post_init__(self) -> None:
        _require(self.epsilon >= 0, "epsilon", self.epsilon, "at least 0")
        _require_one_of(Adjacency, "adjacency", self.adjacency)
        _require_one_of(PureSource, "source", self.source)

    @property
    def mu(self) -> float:
        """Return 2 Phi^-1(e^epsilon / (1 + e^epsilon)), rounded up.

        The trade-off curve of mu-GDP is convex and meets that of epsilon-DP at its corner (Dong, Roth and Su 2022,
        Proposition 2.10 and Definition 2.6). Below epsilon 1e-4, where that formula loses its digits, sqrt(pi/2)
        epsilon, which is larger: with c = sqrt(pi/8), Phi(c epsilon) - 1/2 >= epsilon/4 - pi epsilon^3/192, and
        e^epsilon / (1 + e^epsilon) - 1/2 = tanh(epsilon/2)/2 <= epsilon/4 - epsilon^3/48 + epsilon^5/480.
        """
        if self.epsilon == 0:
            return 0.0
        if self.epsilon < 1e-4:
            return math.sqrt(math.pi / 2) * self.epsilon * (1 + 1e-15)
        from statistics import NormalDist  # takes longer to load than most queries to answer

        tail = 1 / (1 + math.exp(self.epsilon)) if self.epsilon < 700 else 0.0
        # rounding error of 1 / (1 + e^epsilon) relative to 1/2
        rounding = 1 + 1e-15 / min(self.epsilon, 1.0)
        return -2 * NormalDist().inv_cdf(tail) * rounding if tail > 0 else math.inf

    @property
    def rho(self) -> float:
        """Return eps^2/8 for the exponential mechanism (Cesar and Rogers 2021, Lemma 3.2), for any other eps^2/2.

        The latter by Bun and Steinke 2016, Proposition 1.4.
        """
        return self.epsilon**2 / (8 if self.source == "exponential" else 2)

    def divergence(self, order: float) -> float:
        """Return that of randomised response, but of Laplace noise, or at most alpha eps^2/8, by the `source`."""
        from dpsgd_cli.accounting.renyi import laplace_divergence, pure_divergence

        if self.source == "laplace":
            return laplace_divergence(self.epsilon, order)
        return pure_divergence(self.epsilon, order, self.source == "exponential")

    def losses(self) -> Pair:
        from dpsgd_cli.accounting.losses import pure_pair

        return pure_pair(self.epsilon, self.source, 0.0)


@dataclass(frozen=True)
class ApproximateDP:
    """A release that is known to be (epsilon, delta)-DP and nothing more (objective perturbation, ...)."""

    kind: ClassVar[str] = "approximate"
    epsilon: float
    delta: float
    adjacency: Adjacency
    label: str = "solution"

    def __post_init__(self) -> None:
        _require(self.epsilon >= 0, "epsilon", self.epsilon, "at least 0")
        _require(0 <= self.delta < 1, "delta", self.delta, "in [0, 1)")
        _require_one_of(Adjacency, "adjacency", self.adjacency)

    @property
    def mu(self) -> float:
        return math.inf

    @property
    def rho(self) -> float:
        return 0.0 if self.epsilon == self.delta == 0 else math.inf

    def divergence(self, order: float) -> float:
        return math.inf

    def losses(self) -> Pair:
        from dpsgd_cli.accounting.losses import pure_pair

        return pure_pair(self.epsilon, "pure", self.delta)


@dataclass(frozen=True)
class Threshold(ApproximateDP):
    """The event that a noisy count of one record alone passes the threshold above which its category is named.

    The noisy counts are a `GaussianSum` of their own, before or after this release: `discovery/price.py` has the
    theorem. `delta` bounds the probability of the event; `epsilon` is 0. Nothing is proved for groups of records, who
    may share a category: `groups.py` refuses it.
    """

    kind: ClassVar[str] = "threshold"
    label: str = "categories"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.epsilon == 0, "epsilon", self.epsilon, "0")


@dataclass(frozen=True)
class ZeroConcentrated:
    """Releases that are rho-zCDP together, with nothing more known: what a filter in rho admits.

    Their Renyi divergence is at most alpha rho at every order alpha (Bun and Steinke 2016, Definition 1.1).
    """

    kind: ClassVar[str] = "zcdp"
    rho: float
    adjacency: Adjacency
    label: str = "budget"

    def __post_init__(self) -> None:
        _require(self.rho >= 0, "rho", self.rho, "at least 0")
        _require_one_of(Adjacency, "adjacency", self.adjacency)

    @property
    def mu(self) -> None:
        return None

    def divergence(self, order: float) -> float:
        return order * self.rho

    def losses(self) -> None:
        return None


Mechanism = GaussianSum | PureDP | ApproximateDP | ZeroConcentrated
KINDS: dict[str, type[Mechanism]] = {
    cls.kind: cls for cls in (GaussianSum, CorrelatedSums, PureDP, ApproximateDP, Threshold, ZeroConcentrated)
}


LISTED = (*KINDS.values(), GroupSum)
"""All classes of mechanisms; a group's is in no ledger. Accountants refuse any other, whatever it derives from."""


@dataclass(frozen=True)
class Release:
    """A mechanism used `count` times on the same data (adaptively)."""

    mechanism: Mechanism
    count: int = 1

    def __post_init__(self) -> None:
        _require(self.count >= 0 and int(self.count) == self.count, "count", self.count, "a whole number >= 0")


def to_record(release: Release) -> dict[str, Any]:
    """Return the JSON object of one ledger line; `from_record` inverts it exactly."""
    return {**mechanism_record(release.mechanism), "count": release.count}


def mechanism_record(mechanism: Mechanism) -> dict[str, Any]:
    """Return the JSON object of a mechanism; `from_record` reads it with `counted=False`."""
    return {"mechanism": mechanism.kind, **vars(mechanism)}


def from_record(record: dict[str, Any], counted: bool = True) -> Release:
    """Read one ledger line, or a mechanism if `counted` is False. Keys of the ledger (trial, epoch, ...) are ignored.

    Raises PrivacyError for an unknown mechanism and for a missing or impossible value.
    """
    if not isinstance(record, dict):
        raise PrivacyError(f"a JSON object was expected, not {quoted(record)}")
    kind = record.get("mechanism")
    if not isinstance(kind, str) or kind not in KINDS:
        raise PrivacyError(f"unknown mechanism {quoted(kind)}; known: {', '.join(KINDS)}")
    fields = {field.name: field.type for field in dataclasses.fields(KINDS[kind]) if field.name != "label"}
    missing = [name for name in (*fields, *(("count",) if counted else ())) if name not in record]
    if missing:
        raise PrivacyError(f"damaged {kind} record: {', '.join(missing)} missing; nothing is taken for granted")
    fields |= {"label": "str"} if "label" in record else {}
    try:
        values = {name: _typed(name, record[name], _READ.get(f, "text")) for name, f in fields.items()}
        return Release(KINDS[kind](**values), whole_number("count", record["count"] if counted else 1))
    except (TypeError, PrivacyError) as error:
        raise PrivacyError(f"damaged {kind} record: {error}") from None


_LARGEST = 2**53
"""The largest count. Accountants multiply by counts as floating-point numbers, which are exact up to here."""


def whole_number(name: str, value: object) -> int:
    """Return `value` if it is a whole number from 0 to 2^53; raise PrivacyError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise PrivacyError(f"{name} is {quoted(value)}, but must be a whole number from 0 to 2^53")
    return value


_READ: dict[Any, str] = {"float": "number", "int": "whole number"}
"""JSON type of a field, by the name of its Python type; all other fields are text."""


def _typed(name: str, value: object, wanted: str) -> Any:
    """Return `value` as a float, a whole number or text, as `wanted` says.

    Raises PrivacyError for a value that is not of that JSON type, or is too large for it.
    """
    if wanted == "whole number":
        return whole_number(name, value)
    if wanted == "text" and isinstance(value, str):
        return value
    if wanted == "number" and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise PrivacyError(f"{name} is {quoted(value)}, but must be a {wanted}")


def merge(releases: list[Release]) -> list[Release]:
    """Add up the counts of equal mechanisms, keeping the order of first use; drop those that were not used."""
    counts: dict[Mechanism, int] = {}
    for release in releases:
        counts[release.mechanism] = counts.get(release.mechanism, 0) + release.count
    return [Release(mechanism, count) for mechanism, count in counts.items() if count]


def _require(condition: bool, name: str, value: object, bound: str) -> None:
    if not condition or (isinstance(value, float) and math.isnan(value)):
        raise PrivacyError(f"{name} is {quoted(value)}, but must be {bound}")


def _require_one_of(names: Any, name: str, value: object) -> None:
    known = get_args(names)
    _require(value in known, name, value, f"one of {', '.join(known)}")
