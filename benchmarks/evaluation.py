"""Coverage of private evaluation by simulation: intervals of metrics.

`python -m benchmarks.evaluation [SIMULATIONS] [--only NAME ...]` (default 2,000: about an hour of one processor; Adult
needs its data) writes results/evaluation/*.csv after each hundred simulations, continues files that it finds there, and
draws the page from them; with 0 simulations it only draws.

Records come from populations whose metrics are known, or with replacement from one half of Adult, measured by
`dpsgd_cli.evaluation` and compared with the truth. Columns: how often 95% intervals hold the truth, and the mean of
their half-widths; `plain`: the same without privacy, by the standard error of a mean (DeLong for the AUC).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri
from scipy.stats import rankdata

from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.evaluation import run
from dpsgd_cli.evaluation.estimates import Estimate, Measured
from dpsgd_cli.evaluation.groups import Grouping, HeldOut
from dpsgd_cli.evaluation.price import held_out_release, held_out_releases

NUMBERS = (100, 500, 2_000, 10_000)
EPSILONS = (0.5, 1.0, 3.0, 8.0)
DELTA = 1e-5
LARGE = 300_000
ROUND = 100
Z = 1.959963984540054
SINGLE = HeldOut()
OUT = Path(__file__).parent.parent / "results" / "evaluation"


@dataclass(frozen=True)
class Drawn:
    """Rows with truth `y` and margins or predictions `told` (n,), or logits (n, K); `held` says how they count."""

    y: np.ndarray
    told: np.ndarray
    held: HeldOut = SINGLE

    @property
    def weights(self) -> np.ndarray:
        """The weight of each row."""
        return np.ones(len(self.y)) if self.held.weights is None else self.held.weights

    def only(self, rows: np.ndarray) -> Drawn:
        """Return these rows, each with weight 1."""
        return Drawn(self.y[rows], self.told[rows])


Population = Callable[[int, np.random.Generator], Drawn]


def calibrated(n: int, rng: np.random.Generator) -> Drawn:
    """AUC .8, prevalence .3, calibrated margins."""
    y, d = rng.random(n) < 0.3, math.sqrt(2) * ndtri(0.8)
    return Drawn(y.astype(int), rng.normal(np.where(y, 1, -1) * d * d / 2 + math.log(3 / 7), d))


def heavy(n: int, rng: np.random.Generator) -> Drawn:
    """Balanced classes, margins with heavy tails that are not calibrated."""
    y = rng.random(n) < 0.5
    return Drawn(y.astype(int), rng.standard_t(3, n) * 1.5 + np.where(y, 1.5, -1.0))


def rare(n: int, rng: np.random.Generator) -> Drawn:
    """Prevalence .08, well separated."""
    y = rng.random(n) < 0.08
    return Drawn(y.astype(int), rng.normal(np.where(y, 1.0, -4.0), 1.5))


def four_classes(n: int, rng: np.random.Generator) -> Drawn:
    """Four classes of unequal size, with logits that are 1.6 times too large."""
    y = rng.choice(4, n, p=(0.4, 0.3, 0.2, 0.1))
    return Drawn(y, 1.6 * (rng.normal(0, 1, (n, 4)) + 1.2 * np.eye(4)[y]))


def grouped(n: int, rng: np.random.Generator) -> Drawn:
    """A tenth of the records are of group b, for which the margins are worse; metrics are those of b."""
    drawn, codes = calibrated(n, rng), (rng.random(n) < 0.1).astype(int)
    told = drawn.told + codes * rng.normal(0.5, 1.0, n)
    return Drawn(drawn.y, told, HeldOut(None, (Grouping("group", ("a", "b"), codes),)))


def users(n: int, rng: np.random.Generator) -> Drawn:
    """Users with 1 to 5 rows, whose margins share half of their variance; metrics are means over users."""
    rows = rng.integers(1, 6, n)
    whose, d = np.repeat(np.arange(n), rows), math.sqrt(2) * ndtri(0.8)
    y = rng.random(len(whose)) < np.where(rng.random(n) < 0.5, 0.1, 0.5)[whose]
    noise = (rng.normal(0, 1, n)[whose] + rng.normal(0, 1, len(whose))) / math.sqrt(2)
    margin = np.where(y, 1, -1) * d * d / 2 + math.log(3 / 7) + d * noise
    return Drawn(y.astype(int), margin, HeldOut(1 / rows[whose], (), users=True))


def adult() -> Population:
    """A logistic regression fitted to one half of Adult; records are drawn with replacement from the other half."""
    from sklearn.linear_model import LogisticRegression

    from dpsgd_cli.data.preparation import prepare
    from dpsgd_cli.recipe.loading import load_recipe
    from dpsgd_cli.training.plans import resolve_auto

    loaded = resolve_auto(load_recipe("tabular/adult", ["data.split=null", "data.evaluation=public"]))
    data = loaded.recipe.data
    made = prepare(data, loaded.base, 1, lambda trial, purpose, exact, *_: exact, "add-remove")
    x, y = np.concatenate([made.train_x, made.test_x]), np.concatenate([made.train_y, made.test_y])
    half = np.random.default_rng(0).random(len(y)) < 0.5
    margin = LogisticRegression(max_iter=300).fit(x[half], y[half]).decision_function(x[~half])
    truth = y[~half]

    def draw(n: int, rng: np.random.Generator) -> Drawn:
        rows = np.arange(len(truth)) if n == LARGE else rng.integers(0, len(truth), n)
        return Drawn(truth[rows], margin[rows])

    return draw


def normal_errors(n: int, rng: np.random.Generator) -> Drawn:
    """Targets in [-1, 1] with normal errors of standard deviation .08."""
    y = rng.normal(0, 0.3, n).clip(-1, 1)
    return Drawn(y, y - rng.normal(0, 0.08, n))


def heavy_errors(n: int, rng: np.random.Generator) -> Drawn:
    """Targets in [-1, 1] with errors of a t law with four degrees of freedom."""
    y = rng.normal(0, 0.3, n).clip(-1, 1)
    return Drawn(y, y - rng.standard_t(4, n) * 0.05)


def plain_of_classes(drawn: Drawn) -> dict[str, Estimate]:
    """Return metrics of records, from unbinned margins, with intervals by their standard errors."""
    if drawn.told.ndim == 2:
        return plain_of_many(drawn)
    y, margin, w = drawn.y, drawn.told, drawn.weights
    p = 1 / (1 + np.exp(-margin))
    clipped = p.clip(0.01, 0.99)
    right = (margin > 0) == (y == 1)
    found = {
        "accuracy": _mean(right, w),
        "sensitivity": _mean(right[y == 1], w[y == 1]),
        "specificity": _mean(right[y == 0], w[y == 0]),
        "log_loss": _mean(-np.log(np.where(y == 1, clipped, 1 - clipped)), w),
        "brier": _mean((p - y) ** 2, w),
        "calibration_gap": _mean(y - p, w),
    }
    parts = [found["sensitivity"], found["specificity"]]
    found["balanced_accuracy"] = _around(
        float(np.mean([one.value for one in parts])), math.hypot(*(one.high - one.low for one in parts)) / 4 / Z
    )
    found["auc"], found["average_precision"] = _auc(y, margin, w), _average_precision(y, margin, w)
    return found


def plain_of_many(drawn: Drawn) -> dict[str, Estimate]:
    """Return metrics of more than two classes, with intervals by their standard errors."""
    y, w = drawn.y, drawn.weights
    p = np.exp(drawn.told - drawn.told.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    right = p.argmax(axis=1) == y
    return {
        "accuracy": _mean(right, w),
        "log_loss": _mean(-np.log(p[np.arange(len(y)), y].clip(0.01, 0.99)), w),
        "calibration_gap": _mean(right - p.max(axis=1), w),
    }


def plain_of_numbers(drawn: Drawn, clamp: float) -> dict[str, Estimate]:
    """Return metrics of records, with errors clamped at `clamp`; no standard errors of R2 and quantiles."""
    raw = np.abs(drawn.y - drawn.told)
    error = np.minimum(raw, clamp)
    mse = _mean(error**2, drawn.weights)
    root = math.sqrt(mse.value or 0.0)
    ends = (float(np.quantile(raw, 0.5)), float(np.quantile(raw, 0.9)))
    return {
        "mae": _mean(error, drawn.weights),
        "rmse": _around(root, (mse.high - mse.low) / 2 / Z / max(2 * root, 1e-12)),
        "r2": Estimate(1 - (mse.value or 0.0) / drawn.y.var(), math.nan, math.nan),
        "error_quantile_50": Estimate(ends[0], math.nan, math.nan),
        "error_quantile_90": Estimate(ends[1], math.nan, math.nan),
    }


def _around(value: float, deviation: float) -> Estimate:
    return Estimate(value, value - Z * deviation, value + Z * deviation)


def _mean(values: np.ndarray, weights: np.ndarray) -> Estimate:
    if weights.sum() == 0:
        return Estimate(0.0, math.nan, math.nan)
    mean = float((values * weights).sum() / weights.sum())
    return _around(mean, math.sqrt(float((weights**2 * (values - mean) ** 2).sum())) / float(weights.sum()))


def _auc(y: np.ndarray, margin: np.ndarray, w: np.ndarray) -> Estimate:
    """Return the AUC with DeLong's standard error; with weights, by sorting and without an interval."""
    if y.min() == y.max():
        return Estimate(0.5, math.nan, math.nan)
    if (w == 1).all():
        ranks, positive = rankdata(margin), y == 1
        many, others = int(positive.sum()), int((~positive).sum())
        below = (ranks[positive] - rankdata(margin[positive])) / others
        above = 1 - (ranks[~positive] - rankdata(margin[~positive])) / many
        return _around(float(below.mean()), math.sqrt(below.var() / many + above.var() / others))
    order = np.argsort(margin, kind="stable")
    negative = np.cumsum(w[order] * (y[order] == 0)) - w[order] * (y[order] == 0) / 2
    area = (negative * w[order] * (y[order] == 1)).sum() / ((w * (y == 0)).sum() * (w * (y == 1)).sum())
    return Estimate(float(area), math.nan, math.nan)


def _average_precision(y: np.ndarray, margin: np.ndarray, w: np.ndarray) -> Estimate:
    order = np.argsort(-margin, kind="stable")
    hits = np.cumsum(w[order] * y[order])
    precision = hits / np.cumsum(w[order])
    return Estimate(float((precision * w[order] * y[order]).sum() / max(hits[-1], 1e-12)), math.nan, math.nan)


Row = dict[str, Any]
Sums = dict[str, np.ndarray]


class Cell:
    """Sums over the simulations of one population, number of records and epsilon."""

    def __init__(self, population: str, draw: Population, large: Drawn, n: int, epsilon: float) -> None:
        self.population, self.draw, self.n, self.epsilon = population, draw, n, epsilon
        self.large, self.done, self.sums = large, 0, dict[str, np.ndarray]()
        self.numbers = population.endswith("errors")
        self.release = held_out_releases(held_out_release("gaussian", epsilon, DELTA, "add-remove"), self.numbers)
        self.by_clamp: dict[float, dict[str, Estimate]] = {}
        self.truth = {} if self.numbers else plain_of_classes(large)

    def more(self, simulations: int) -> None:
        """Add simulations."""
        for _ in range(simulations):
            rng = np.random.default_rng([self.done, self.n, int(self.epsilon * 10)])
            drawn, stream = self.draw(self.n, rng), SeededStreams(self.done)
            self.done += 1
            if self.numbers:
                found = run.measure_numbers(drawn.y, drawn.told, (-1.0, 1.0), self.release, stream, self.n)
                clamp = found.clamp or 2.0
                if clamp not in self.by_clamp:
                    self.by_clamp[clamp] = plain_of_numbers(self.large, clamp)
                truth, plain = self.by_clamp[clamp], plain_of_numbers(drawn, clamp)
                metrics = found.metrics
            else:
                outputs = drawn.told if drawn.told.ndim == 2 else drawn.told[:, None]
                found = run.measure_classes(drawn.y, outputs, self.release, stream, len(drawn.y), drawn.held)
                metrics = _metrics_of(found)
                own = drawn.only(_of_group(drawn)) if drawn.held.groupings else drawn
                truth, plain = self.truth, plain_of_classes(own) if len(own.y) else {}
            for name, value in truth.items():
                self._count(name, value.value or 0.0, metrics[name], plain.get(name))

    def _count(self, name: str, truth: float, own: Estimate, plain: Estimate | None) -> None:
        added = [own.low <= truth <= own.high, (own.high - own.low) / 2, own.value is not None, 0.0, 0.0, 0]
        if plain is not None and not math.isnan(plain.low):
            added[3:] = [plain.low <= truth <= plain.high, (plain.high - plain.low) / 2, 1]
        self.sums[name] = self.sums.get(name, np.zeros(6)) + np.array(added, dtype=float)

    def rows(self) -> Iterator[Row]:
        """Yield a row for each metric."""
        for name, (held, wide, shown, plain, plainly, known) in self.sums.items():
            yield {
                "population": self.population,
                "records": self.n,
                "epsilon": self.epsilon,
                "metric": name,
                "simulations": self.done,
                "coverage": round(held / self.done, 4),
                "half_width": round(wide / self.done, 5),
                "with_point": round(shown / self.done, 3),
                "plain_coverage": round(plain / known, 4) if known else "",
                "plain_half_width": round(plainly / known, 5) if known else "",
                "plain_simulations": int(known),
            }

    def restore(self, rows: pd.DataFrame) -> None:
        """Continue from the cell's rows of a file."""
        own = rows[(rows["records"] == self.n) & (rows["epsilon"] == self.epsilon)]
        for row in own.fillna(0).to_dict("records"):
            self.done, known = row["simulations"], row["plain_simulations"]
            private = [row[key] * self.done for key in ("coverage", "half_width", "with_point")]
            plain = [row[key] * known for key in ("plain_coverage", "plain_half_width")]
            self.sums[row["metric"]] = np.array([round(private[0]), *private[1:], round(plain[0]), plain[1], known])


def _metrics_of(found: Measured) -> dict[str, Estimate]:
    return found.groups["group"]["b"].metrics if found.groups else found.metrics


def _of_group(drawn: Drawn) -> np.ndarray:
    return drawn.held.groupings[0].codes == 1


POPULATIONS: dict[str, Population] = {
    one.__name__: one for one in (calibrated, heavy, rare, four_classes, grouped, users, normal_errors, heavy_errors)
}


def cells_of(name: str) -> Sequence[Cell]:
    """Return the cells of a population."""
    draw = adult() if name == "adult" else POPULATIONS[name]
    large = draw(LARGE, np.random.default_rng(0))
    large = large.only(_of_group(large)) if large.held.groupings else large
    if name.endswith("errors"):
        large = large.only(np.arange(100_000))
    return [Cell(name, draw, large, n, epsilon) for n in NUMBERS for epsilon in EPSILONS]


def page() -> str:
    """Return the page of all files: findings, coverage of intervals, widths."""
    tables = [pd.read_csv(path) for path in sorted(OUT.glob("*.csv"))]
    rows = pd.concat([table for table in tables if "metric" in table], ignore_index=True)
    least = rows.loc[rows["coverage"].idxmin()]
    lines = [
        "# Private evaluation: coverage",
        "",
        f"**Findings.** {(rows['coverage'] >= 0.93).sum()} of {len(rows)} cells (population, metric, number of held-out"
        f" records, epsilon; at least {rows['simulations'].min()} simulations each) have 95% intervals that hold the"
        f" truth in at least 93% of simulations. The least coverage is {least['coverage']:.1%}:"
        f" {_words(least['metric'])} of {least['population']}, n {least['records']}, epsilon {least['epsilon']}.",
        "",
        "`python -m benchmarks.evaluation` repeats all of this, and continues what is there; its file describes"
        " the populations. delta is 1e-5. The standard error of a coverage of 95% is .005 in 2,000 simulations, .022 in"
        " 100. The truth of grouped records and of errors comes from 30,000 to 100,000 draws. Its own error takes up"
        " to four points from private and plain intervals alike at n 10,000.",
        "",
        "## Coverage of 95% intervals",
        "",
        "Least, mean and greatest over the four epsilons and all numbers of records; plain: mean without privacy.",
        "",
        "| population | simulations | metric | least | mean | greatest | plain |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for (population, metric), own in rows.groupby(["population", "metric"], sort=False):
        plain = own["plain_coverage"].mean()
        found = [f"{one:.3f}" for one in own["coverage"].agg(["min", "mean", "max"])]
        beside = "" if pd.isna(plain) else f"{plain:.3f}"
        cells = [population, str(own["simulations"].iloc[0]), _words(metric), *found, beside]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Widths",
        "",
        "Mean half-width of the 95% intervals, with the plain one in brackets.",
        "",
        "| population | metric | epsilon | " + " | ".join(f"n {n:,}" for n in NUMBERS) + " |",
        "| --- | --- | ---: |" + " ---: |" * len(NUMBERS),
    ]
    wide = rows.set_index(["population", "metric", "epsilon"]).sort_index(kind="stable")
    for population, metric in ((population, metric) for population, names in WIDTHS.items() for metric in names):
        for epsilon in EPSILONS:
            own = wide.loc[(population, metric, epsilon)]
            told = [f"{row.half_width} ({'-' if pd.isna(row.plain_half_width) else row.plain_half_width})"
                    for row in own.itertuples()]  # fmt: skip
            lines.append(f"| {population} | {_words(metric)} | {epsilon:g} | {' | '.join(told)} |")
    return "\n".join([*lines, ""])


def _words(metric: str) -> str:
    return metric.replace("_", " ")


WIDTHS = {
    "calibrated": ("accuracy", "log_loss", "auc", "average_precision"),
    "adult": ("accuracy", "auc"),
    "grouped": ("accuracy",),
    "users": ("accuracy",),
    "normal_errors": ("mae", "rmse"),
}
"""Metrics of the table of widths."""


def main() -> None:
    """Simulate in rounds over all populations, and write after each."""
    names = [*POPULATIONS, "adult"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulations", type=int, nargs="?", default=2000)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    asked = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    every: dict[Path, Sequence[Cell]] = {}
    for name in asked.only if asked.simulations else ():
        path, cells = OUT / f"{name.replace(' ', '-').replace('_', '-')}.csv", cells_of(name)
        if path.exists():
            rows = pd.read_csv(path)
            for cell in cells:
                cell.restore(rows)
        every[path] = cells
    for wanted in range(ROUND, asked.simulations + ROUND, ROUND):
        for path, cells in every.items():
            for cell in cells:
                cell.more(min(wanted, asked.simulations) - cell.done)
            found = pd.DataFrame([row for cell in cells for row in cell.rows()])
            found.to_csv(path, index=False)
            print(path.name, found["simulations"][0], file=sys.stderr, flush=True)
    (OUT / "README.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
