"""Price of private bounds and categories: one Gaussian histogram, and a threshold on the categories. Reads no data.

Notation: F columns are private, c of them categorical. The unit of privacy is a record; for users see below. A record
is in at most one cell of each numeric column (public cells, `run.py`), and has at most one category in each categorical
column; a missing value is in none. H is the vector of all counts: one for every cell of every numeric column, whether a
record is in it or not, and one for every category that some record has. Priced is the release of H + N(0, s^2) at each
count, where s = z S; but of a categorical column, only the categories whose noisy count exceeds T, with these counts.
Published is less: bounds, which are ends of public cells, and names of categories. The counts themselves leave no
trace, so their grid, whose step depends on how many categories there are, is not seen.

Sensitivity: S = sqrt(F) under add-remove and zero-out (a record adds at most 1 to at most F counts, or takes it away),
and sqrt(2 F) if records are replaced (at most F counts lose 1 and at most F others gain 1).

Theorem. Let q = Pr[N(0, 1) > (T - 1) / s] and d = c q. For every two neighbouring data sets, the pair of output
distributions is post-processing of a Gaussian mechanism of noise multiplier z together with an independent mechanism
that reveals everything with probability d and nothing otherwise ((0, d)-DP). So the release is charged as these two: a
`GaussianSum` and a `Threshold`.

Proof. Let D and D' differ in one record, which is r in D and r' in D' (or nothing in one of them), and let C be the
records that both share. Call a category of a column *old* if a record of C has it, else *new*. Old categories and
public cells are the same in D and in D'. Their counts differ by a vector of L2 norm at most S, so their noisy counts,
G and G', are a Gaussian mechanism of noise multiplier z. Which old categories are named, and with which counts, is a
function f of them. A new category has the count 1, at most one in a column and at most c in all; its noise is
independent of G. Let E (in D) and E' (in D') be the events that any new category is named. Each has a probability of
at most d, by the union bound, and outside of it the output is f(G), or f(G'). The second mechanism tells, with
probability d, which data set it is, and says nothing otherwise. Given what it tells, output f(G), and if it tells the
data set, with the conditional probability Pr[E] / d (or Pr[E'] / d) add new categories, drawn from their conditional
distribution. That has the distribution of the release on D (or D'). Nothing here depends on what was released before,
so the two charges compose as any others, also adaptively.

Users (`privacy.unit`). Neighbours differ in all rows of one user, of which at most m are used; which ones, the user's
own rows decide (`data/users.py`). A used row adds 1 / n_u to its counts, where n_u <= m is the number of used rows of
its user. So a user adds a vector that is not negative, whose numbers add up to at most 1 in each column, and whose L2
norm is at most 1 there: S is what it is for records, and a user in the place of a record changes nothing else in the
proof but the new categories. One user may have m of them in each column, each with a count of at most 1. Each is named
with probability at most q, so d = c m q, and T is computed for delta / (c m). Counts are of users.

Folds. A trial counts the records (or users) that it trains on, and no other: those of its own fold have weight 0. To
one trial the release is that of a table without its fold, so the theorem holds for the records that its statement
covers. Each trial releases its own counts and is charged for them once, in its own ledger. Which fold a record is in
depends on that record alone (`data/splits.py`), so neighbouring tables have neighbouring training parts.

Methods. The two charges come first in the ledger of any method, and what follows is charged as if it were alone: the
theorem does not depend on it. Accountants add a `GaussianSum` to Gaussians, Renyi divergences or privacy losses, and
take a `Threshold` from delta. A budget in rho has no delta, so methods with one (dp-agd, private-selection)
release bounds, not names. Refused are methods whose only theorem spends the whole (epsilon, delta) at once (objective
and output perturbation), privgene, which takes one matrix of rows for all trials, and schedules that follow the
validation accuracy.

Two consequences. The theorem is about one record or user: k of them may have a new category to themselves, whose count
is k, so nothing follows for groups from q (`accounting/groups.py` falls back on the statement as a whole). The noise of
different counts is independent, so it does not matter that the number of counts depends on the data, nor in which
order they are drawn; names are published in alphabetical order.

On the public grid the noise is z S `raised` for a factor a little above 1, and rounded by a step (`noise/run.py`).
MARGIN covers both: T is computed for noise that is larger by that factor.

Sources: Korolova, Kenthapadi, Mishra and Ntoulas 2009, "Releasing search queries and clicks privately" (counts of what
a user has, with noise, above a threshold); Wilkins, Kifer, Zhang and Karrer 2024, "Exact privacy analysis of the
Gaussian sparse histogram mechanism" (which this bound is no better than); Wilson et al. 2020, "Differentially private
SQL with bounded user contribution" (bounds from a histogram over powers of two).
"""

from __future__ import annotations

import math
from statistics import NormalDist

from dpsgd_cli.accounting.adjacency import Adjacency, replace_factor
from dpsgd_cli.accounting.mechanism import GaussianSum, Threshold

LABEL = "discovery"
"""Label of the histogram's release."""
MARGIN = 1.02
"""Factor by which a threshold counts on more noise than the ledger charges for."""


def sensitivity(adjacency: Adjacency, columns: int) -> float:
    """Return the L2 bound S on how far one record moves the counts of `columns` private columns. It is reached."""
    return math.sqrt(columns * replace_factor(adjacency))


def threshold(scale: float, delta: float, categorical: int, rows: int) -> float:
    """Return T for noise of standard deviation `scale`, such that c = `categorical` columns are named within `delta`.

    A category that nobody else has is named with probability at most `delta` / (c m). `rows` is m: how many such
    categories the unit of privacy may have in a column (1 for a record, the most used rows of a user).
    """
    return 1 + MARGIN * scale * -NormalDist().inv_cdf(delta / (categorical * rows))


def histogram(noise_multiplier: float, adjacency: Adjacency, columns: int) -> GaussianSum:
    """Return the mechanism of the noisy counts of `columns` private columns."""
    return GaussianSum(noise_multiplier, adjacency, sensitivity=sensitivity(adjacency, columns), label=LABEL)


def named(delta: float, adjacency: Adjacency) -> Threshold:
    """Return the mechanism of the names of categories, of all columns together."""
    return Threshold(0.0, delta, adjacency, "categories")
