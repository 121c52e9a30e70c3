"""Lee and Kifer 2018, Figures 1 to 4, with every method that they compared and what came after.

    python -m benchmarks.lee2018.reproduce --data adult bank --repeats 4

Writes `results/lee2018/README.md` with tables and pictures. Each cell is a recipe of `recipes/lee2018/` with overrides,
run by the same code as `dpsgd train`; all budgets of a method train as one pack. Finished cells are kept, so a
stopped run goes on where it was. Needs the data sets (`dpsgd data fetch adult`) and matplotlib.

Not here: what methods do, or what their parameters mean (the recipes say so).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd_cli import experiment
from dpsgd_cli.errors import DpsgdError
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.trials import Member

EPSILONS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
DATA = ("adult", "bank", "kddcup99", "ipums")
SMOOTH_SVM = ("objective-perturbation", "output-perturbation")
METHODS = {
    "dp-agd": "DP-AGD, as published",
    "objective-perturbation": "ObjPert",
    "output-perturbation": "OutPert",
    "privgene": "PrivGene",
    "sgd-adv": "SGD-Adv",
    "sgd-ma": "SGD-MA",
    "majority": "Majority",
    "non-private": "NonPrivate",
    "non-private:model.l2=0": "NonPrivate, no L2 term",
    "dp-agd-better": "DP-AGD, better split",
    "dp-gd-plain": "DP-GD, exact",
    "dp-gd": "DP-GD, exact, scaled features",
    "dp-gd-momentum": "the same with momentum",
}
STUDIES: dict[str, tuple[Any, ...]] = {
    "splits": (10, 20, 40, 60, 80, 100),
    "gamma": (0.01, 0.1, 0.2, 0.5, 1.0),
    "gradient_clip": (0.5, 1, 2, 3, 5),
    "objective_clip": (0.5, 1, 2, 3, 5),
}


@dataclass(frozen=True)
class Cell:
    """Mean and 95% half-width of accuracy on held-out folds, and mean training objective."""

    accuracy: float
    margin: float
    objective: float


def overrides(method: str, data: str, loss: str, repeats: int) -> list[str]:
    """What turns the Adult logistic recipe of `method` into that of another data set or loss."""
    changes = [f"repeats={repeats}", *method.split(":")[1:]]
    if data != "adult":
        changes.append(f"data.name={data}")
    if method == "dp-gd" and data == "bank":
        changes.append("method.learning_rate=10")
    if method == "dp-gd-momentum" and data == "bank":
        changes.append("method.learning_rate=2")
    if loss == "svm" and method != "majority":
        changes.append(f"model.loss={'huber-svm' if method in SMOOTH_SVM else 'hinge'}")
        if not method.startswith("dp-gd") and "l2" not in method:
            changes.append("model.l2=0.01")
    if not method.startswith("non-private"):
        changes.append("runtime.evaluate_every=100000")
    return changes


def run(recipes: list[tuple[str, list[str]]], out: Path) -> list[Cell]:
    """Results of recipes that may train together, in order."""
    loaded = [load_recipe(name, changes) for name, changes in recipes]
    todo = [one for one in loaded if not experiment.is_finished(one, experiment.result_directory(one, out))]
    if todo:
        members = [Member(one, experiment.plan_recipe(one)[0]) for one in todo]
        experiment.run_pack(members, experiment.Options(out))
    return [read(experiment.result_directory(one, out)) for one in loaded]


def read(directory: Path) -> Cell:
    metrics = store.read_document(directory)["metrics"]
    accuracy = metrics["test_accuracy"]
    return Cell(accuracy["mean"], accuracy["ci95"] or 0.0, metrics["nonprivate_train_objective"]["mean"])


def figure(data: str, loss: str, repeats: int, out: Path) -> dict[str, dict[float, Cell]]:
    """Every method at every budget; a method that fails is reported and left out."""
    found: dict[str, dict[float, Cell]] = {}
    for method in METHODS:
        begun = time.monotonic()
        common = overrides(method, data, loss, repeats)
        try:
            if method.startswith("non-private"):
                cell = run([("lee2018/non-private", common)], out)[0]
                found[method] = dict.fromkeys(EPSILONS, cell)
            else:
                names = [(f"lee2018/{method}", [*common, f"privacy.budget.epsilon={e}"]) for e in EPSILONS]
                found[method] = dict(zip(EPSILONS, run(names, out), strict=True))
        except DpsgdError as error:
            print(f"{data} {loss} {method}: {error}", file=sys.stderr)
            continue
        print(f"{data} {loss} {method}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return found


def studies(repeats: int, out: Path) -> dict[str, dict[float, dict[Any, Cell]]]:
    """DP-AGD on Adult with one parameter changed at a time, at each budget."""
    found: dict[str, dict[float, dict[Any, Cell]]] = {}
    for key, values in STUDIES.items():
        by_epsilon: dict[float, dict[Any, Cell]] = {epsilon: {} for epsilon in EPSILONS}
        for value in values:
            common = [*overrides("dp-agd", "adult", "logistic", repeats), f"method.{key}={value}"]
            names = [("lee2018/dp-agd", [*common, f"privacy.budget.epsilon={e}"]) for e in EPSILONS]
            for epsilon, cell in zip(EPSILONS, run(names, out), strict=True):
                by_epsilon[epsilon][value] = cell
        found[key] = by_epsilon
        print(f"study of {key} done", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, dict[float, Cell]], objective: bool) -> list[str]:
    head = "| method | " + " | ".join(f"eps {e:g}" for e in EPSILONS) + " |"
    lines = [head, "| --- |" + " --- |" * len(EPSILONS)]
    for method, cells in found.items():
        texts = [
            f"{cells[e].objective:.3f}" if objective else f"{cells[e].accuracy:.4f} ± {cells[e].margin:.4f}"
            for e in EPSILONS
        ]
        lines.append(f"| {METHODS[method]} | " + " | ".join(texts) + " |")
    return lines


def picture(found: dict[str, dict[float, Cell]], title: str, path: Path) -> None:
    """Accuracy above, objective below, over the budget on a logarithmic axis: the shape of Figures 2 and 3."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(2, 1, figsize=(7, 8), sharex=True)
    for number, (method, cells) in enumerate(found.items()):
        flat = method.startswith(("non-private", "majority"))
        style: dict[str, Any] = {"ls": "--"} if flat else {"marker": "osD^v<>pP*X"[number % 11]}
        style["color"] = plt.colormaps["tab20"](number)
        accuracy = [cells[e].accuracy for e in EPSILONS]
        margins = [cells[e].margin for e in EPSILONS]
        axes[0].errorbar(EPSILONS, accuracy, yerr=margins, label=METHODS[method], capsize=2, **style)
        axes[1].plot(EPSILONS, [cells[e].objective for e in EPSILONS], **style)
    axes[0].set(ylabel="accuracy on held-out folds", title=title)
    axes[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes[1].set(xscale="log", xlabel="epsilon", ylabel="training objective", yscale="log")
    plt.savefig(path, dpi=110, bbox_inches="tight")
    plt.close()


def study_picture(key: str, found: dict[float, dict[Any, Cell]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, 2, figsize=(10, 4))
    for epsilon, cells in found.items():
        axes[0].plot(list(cells), [c.accuracy for c in cells.values()], marker="o", label=f"eps {epsilon:g}")
        axes[1].plot(list(cells), [c.objective for c in cells.values()], marker="o")
    axes[0].set(xlabel=key, ylabel="accuracy")
    axes[1].set(xlabel=key, ylabel="training objective")
    axes[0].legend(fontsize=7)
    plt.savefig(path, dpi=110, bbox_inches="tight")
    plt.close()


def page(arguments: argparse.Namespace) -> None:
    """Run what is asked for, and write the page after each data set."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    settings = f"5 folds x {arguments.repeats} repeats, delta = 1e-8, mean ± 95% half-width over trials."
    text = ["# DP-AGD and what it was compared with", "", settings, ""]
    text += ["Every number comes from a recipe of `recipes/lee2018/`; the objective is that of the training folds.", ""]
    text += ["Settings beyond the paper were chosen by looking at Adult and Bank; no epsilon includes that choice.", ""]
    for data in arguments.data:
        for loss in arguments.loss:
            found = figure(data, loss, arguments.repeats, out / "runs")
            name = f"{data}-{loss}"
            picture(found, f"{data}, {loss}", out / f"{name}.png")
            text += [f"## {data}, {loss}", "", *table(found, False), "", "Objective:", "", *table(found, True), ""]
            text += [f"![accuracy and objective by epsilon]({name}.png)", ""]
            (out / "README.md").write_text("\n".join(text), encoding="utf-8")
    if arguments.studies:
        for key, by_epsilon in studies(arguments.repeats, out / "runs").items():
            study_picture(key, by_epsilon, out / f"study-{key}.png")
            text += [f"## DP-AGD on Adult by {key}", "", f"![accuracy and objective by {key}](study-{key}.png)", ""]
            values = list(next(iter(by_epsilon.values())))
            text += ["| eps | " + " | ".join(f"{v:g}" for v in values) + " |", "| --- |" + " --- |" * len(values)]
            text += [
                f"| {e:g} | " + " | ".join(f"{c.accuracy:.4f}" for c in cells.values()) + " |"
                for e, cells in by_epsilon.items()
            ]
            text.append("")
            (out / "README.md").write_text("\n".join(text), encoding="utf-8")
    print(out / "README.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--loss", nargs="+", choices=("logistic", "svm"), default=["logistic", "svm"])
    parser.add_argument("--repeats", type=int, default=4, help="the paper has 20")
    parser.add_argument("--out", type=Path, default=Path("results/lee2018"))
    parser.add_argument("--studies", action=argparse.BooleanOptionalAction, default=True)
    page(parser.parse_args())


if __name__ == "__main__":
    main()
