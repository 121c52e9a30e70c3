"""PATE on MNIST and Adult beside DP-SGD, as a page with its table of trials.

    DPSGD_DATA=... make reproduce-pate            (or: python -m benchmarks.pate.reproduce --help)

Trains every case and writes `results/pate/trials.csv`, then the page and its pictures from that file alone
(`--page-only` draws them again without training). Cases of one pack share teachers, which are trained once a seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

NOISE = "threshold: 200, threshold_noise: 150"
OF_ADULT = "threshold: 300, threshold_noise: 200"


@dataclass(frozen=True)
class Case:
    """One row of the page: what is trained, and its name there."""

    data: str
    name: str
    recipe: str
    changes: tuple[str, ...] = ()


def pate(data: str, name: str, aggregation: str, queries: int) -> Case:
    """PATE with other aggregation or queries than the shipped recipe's."""
    changes = (f"method.aggregation={{{aggregation}}}", f"method.queries={queries}")
    return Case(data, name, f"pate/{data}-confident", changes)


def dp_gd(data: str, epsilon: float) -> Case:
    """Full-batch DP-SGD with momentum on the same features, judged by the same records."""
    return Case(
        data,
        f"DP-SGD, full batches, epsilon {epsilon:g}",
        f"pate/{data}-dp-sgd",
        (f"privacy.budget.epsilon={epsilon}",),
    )


PACKS: tuple[tuple[Case, ...], ...] = (
    (
        pate("mnist", "confident-gnmax, as published", f"kind: confident-gnmax, {NOISE}, noise: 40", 640),
        pate("mnist", "gnmax, noise 40", "kind: gnmax, noise: 40", 640),
        pate("mnist", "lnmax, noise 20", "kind: lnmax, noise: 20", 640),
        pate("mnist", "propose-test-release", "kind: propose-test-release, epsilon: 0.1, delta: 1e-9", 640),
    ),
    (
        pate("mnist", "confident-gnmax, 1,500 queries", f"kind: confident-gnmax, {NOISE}, noise: 40", 1500),
        pate("mnist", "gnmax, noise 100", "kind: gnmax, noise: 100", 1500),
    ),
    *((dp_gd("mnist", epsilon),) for epsilon in (1.0, 2.0, 4.0, 6.0)),
    (
        pate("adult", "confident-gnmax, as published", f"kind: confident-gnmax, {OF_ADULT}, noise: 40", 1500),
        pate("adult", "gnmax, noise 100", "kind: gnmax, noise: 100", 1500),
    ),
    *((dp_gd("adult", epsilon),) for epsilon in (0.5, 2.0, 4.0, 6.5)),
)
COLUMNS = {
    "epsilon": "epsilon (stated)",
    "spent_epsilon": "spent of it",
    "nonprivate_epsilon_data_dependent": "by votes (not private)",
    "answered": "answered",
    "answers_right": "answers right",
    "test_accuracy": "student",
    "nonprivate_ensemble_right": "ensemble (not private)",
    "nonprivate_teachers_right": "mean teacher (not private)",
}


def train(packs: Sequence[Sequence[Case]], out: Path, repeats: int) -> pd.DataFrame:
    """A row a trial."""
    from dpsgd_cli import experiment
    from dpsgd_cli.recipe.loading import load_recipe, recipe_hash
    from dpsgd_cli.trials import Member

    rows = []
    for cases in packs:
        loaded = [load_recipe(case.recipe, (*case.changes, f"repeats={repeats}")) for case in cases]
        todo = [one for one in loaded if not experiment.is_finished(one, experiment.result_directory(one, out))]
        if todo:
            experiment.run_pack([Member(one, experiment.plan_recipe(one)[0]) for one in todo], experiment.Options(out))
        for case, one in zip(cases, loaded, strict=True):
            found = pd.read_csv(experiment.result_directory(one, out) / "trials.csv")
            found.insert(0, "recipe", recipe_hash(one.recipe))
            found.insert(0, "case", case.name)
            found.insert(0, "data", case.data)
            rows.append(found)
            print(f"{case.data}: {case.name}: {found['test_accuracy'].mean():.4f}", flush=True)
    kept = ["data", "case", "recipe", "trial", "seed", "test_accuracy", *(c for c in COLUMNS if c != "test_accuracy")]
    return pd.concat(rows).reindex(columns=kept)


def table(rows: pd.DataFrame) -> str:
    """One line a case: means over trials, and the half-width of the student's 95% interval."""
    from dpsgd_cli.results.result import summarise

    lines = ["| case | " + " | ".join(COLUMNS.values()) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for case, own in rows.groupby("case", sort=False):
        cells = []
        for column in COLUMNS:
            mean: Any = own[column].mean()
            if pd.isna(mean):
                cells.append("")
            elif column == "test_accuracy":
                told = summarise(own[column].tolist())
                cells.append(f"{mean:.4f} +- {told['ci95'] or 0:.4f}")
            else:
                cells.append(f"{mean:.0f}" if column == "answered" else f"{mean:.3f}")
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: pd.DataFrame, data: str, path: Path) -> None:
    """Student accuracy against epsilon, as stated and by votes; labels answered, and how many of them are right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    means = rows.drop(columns=["recipe", "trial", "seed", "data"]).groupby("case", sort=False).mean()
    means = means[means["test_accuracy"] > 0.5]  # propose-test-release answers nothing: it stands in the table
    votes = means[means["answered"].notna()]
    others = means[means["answered"].isna()]
    left.plot(others["epsilon"], others["test_accuracy"], "k.-", label="DP-SGD on the same features")
    for number, (case, row) in enumerate(votes.iterrows()):
        left.plot(row["epsilon"], row["test_accuracy"], "o", color=f"C{number}", label=str(case))
        if pd.notna(row["nonprivate_epsilon_data_dependent"]):
            left.plot(
                row["nonprivate_epsilon_data_dependent"], row["test_accuracy"], "o", mfc="none", color=f"C{number}"
            )
        right.plot(row["answered"], row["answers_right"], "o", color=f"C{number}")
        right.plot(row["answered"], row["nonprivate_ensemble_right"], "_", color=f"C{number}", markersize=14)
    left.set(title=data, xlabel="epsilon (full: stated; hollow: by votes, not private)", ylabel="test accuracy")
    right.set(title="dot: released; bar: no noise (not private)", xlabel="queries answered", ylabel="labels right")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def write(out: Path) -> None:
    """The page and its pictures, from `trials.csv`."""
    rows = pd.read_csv(out / "trials.csv")
    page = (Path(__file__).parent / "page.md").read_text(encoding="utf-8")
    for data in rows["data"].unique():
        own = rows[rows["data"] == data]
        draw(own, data, out / f"{data}.png")
        page = page.replace(f"<!-- {data} -->", f"{table(own)}\n\n![{data}]({data}.png)")
    (out / "README.md").write_text(page, encoding="utf-8")


def main() -> None:
    """Train, then write the page."""
    parser = argparse.ArgumentParser(description="Reproduce PATE.")
    parser.add_argument("--out", type=Path, default=Path("results/pate"), help="where the page and runs/ go")
    parser.add_argument("--repeats", type=int, default=5, help="trials of each case")
    parser.add_argument("--page-only", action="store_true", help="train nothing")
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    if not settings.page_only:
        found = train(PACKS, settings.out / "runs", settings.repeats)
        found.to_csv(settings.out / "trials.csv", index=False)
    write(settings.out)
    print(f"wrote {settings.out / 'README.md'}")


if __name__ == "__main__":
    main()
