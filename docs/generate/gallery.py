"""The gallery: real pages, made by the commands that it shows. `python -m docs.generate.gallery` makes them again."""

from __future__ import annotations

import csv
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EPSILONS = (0.1, 1.0, 8.0)
FILES = {
    "patients.yaml": """name: patients
data:
  path: patients.csv
  target: malignant
  classes: ["no", "yes"]
  bounds: {mean radius: [5, 30], mean texture: [5, 40], mean concavity: [0, 0.5]}
  split: {test: 0.2}
  evaluation: private
  preprocess: [{bin: {}}]
model: {kind: linear}
method: {kind: dp-sgd, batching: full}
privacy: {budget: {epsilon: 2, delta: 1.0e-5}}
""",
    "full.yaml": """name: full
data: {name: digits}
model: {kind: linear}
method: {kind: dp-sgd, batching: full}
privacy: {budget: {epsilon: 3, delta: 1.0e-5}, noise_source: seeded}
seed: 0
""",
}
"""Recipes of the gallery; the table is that of [the start](../start.md)."""


@dataclass(frozen=True)
class Exhibit:
    """A page or picture of the gallery: its file name there, what it shows, its commands, and what they make."""

    name: str
    title: str
    says: str
    commands: tuple[str, ...]
    made: str


EXHIBITS = (
    Exhibit(
        "report.html",
        "Report of a result",
        "What is guaranteed to whom, what every attacker gains at most, how good the model is, what must not be"
        " published, and how to check it again.",
        ("dpsgd train quickstart",),
        "results/quickstart-*/report.html",
    ),
    Exhibit(
        "table.html",
        "Report of a table with private evaluation",
        "The same for a table of your own: metrics with intervals, measured on held-out records with noise, and the"
        " shape that the model learnt of each column with the noise of training as a band.",
        ("dpsgd train patients.yaml --out tables",),
        "tables/patients-*/report.html",
    ),
    Exhibit(
        "explain.html",
        "Explanation of a model",
        "Shapes by column, computed from the released weights alone.",
        ("dpsgd explain tables/patients-* --out explained",),
        "explained/explained.html",
    ),
    Exhibit(
        "comparison.html",
        "Comparison on equal budgets",
        "Accuracy by epsilon with intervals, side by side, without running several guarantees into one.",
        ("dpsgd compare quickstart full.yaml --epsilon 1,3 --repeats 5 --out compared --report comparison.html",),
        "comparison.html",
    ),
    Exhibit(
        "sweep.html",
        "Page of a sweep",
        "Every cell of a grid with its price, and what the whole sweep costs together.",
        ("dpsgd sweep sweeps/ci --out swept",),
        "swept/ci-*.report.html",
    ),
    Exhibit(
        "audit.md",
        "Audit of a claim",
        "Attacks on the program that trained, and the epsilon that they prove from below.",
        ("dpsgd audit results/quickstart-* --quick",),
        "results/audits/quickstart-*/audit.md",
    ),
    Exhibit(
        "attacker.svg",
        "What an attacker can do",
        "The highest true positive rate at each false positive rate that the guarantee leaves possible.",
        ("dpsgd account quickstart --over false-positives=0.01:0.99:0.02 --plot attacker.svg",),
        "attacker.svg",
    ),
)


def make(folder: Path) -> None:
    """Run every command in `folder`, in order; raise CalledProcessError for one that fails."""
    from sklearn.datasets import load_breast_cancer

    folder.mkdir(parents=True, exist_ok=True)
    table = load_breast_cancer(as_frame=True).frame[["mean radius", "mean texture", "mean concavity", "target"]]
    table["malignant"] = table.pop("target").map({0: "yes", 1: "no"})
    table.to_csv(folder / "patients.csv", index=False)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for exhibit in EXHIBITS:
        for command in exhibit.commands:
            typed = command.replace("dpsgd ", f"{sys.executable} -m dpsgd_cli ", 1)
            subprocess.run(typed, shell=True, cwd=folder, env=environment, check=True, capture_output=True)


def made(folder: Path) -> Path:
    """Return the folder with all exhibits; make them if they are not there yet, which takes a minute."""
    if not all(list(folder.glob(exhibit.made)) for exhibit in EXHIBITS):
        if folder.exists():
            shutil.rmtree(folder)
        make(folder)
    return folder


def pages(folder: Path) -> dict[str, str | bytes]:
    """Return the exhibits, and the page that shows them, by their paths in the site."""
    found: dict[str, str | bytes] = {}
    told = [
        "# Gallery",
        "Each page below is as a command made it. Reports, comparisons, sweeps and explanations are single files that"
        " need nothing else: open them, send them, keep them.",
    ]
    for exhibit in EXHIBITS:
        (file,) = folder.glob(exhibit.made)
        found[f"gallery/{exhibit.name}"] = file.read_bytes()
        picture = f"![{exhibit.title}]({exhibit.name})" if exhibit.name.endswith(".svg") else ""
        commands = "\n".join(exhibit.commands)
        told += [f"## [{exhibit.title}]({exhibit.name})", exhibit.says, picture, f"```sh\n{commands}\n```"]
    shapes = found["gallery/explain.html"]
    assert isinstance(shapes, bytes)
    found["gallery/shapes.svg"] = shapes[shapes.index(b"<svg") : shapes.index(b"</svg>") + 6]
    found["gallery/peers.svg"] = peers()
    recipes = "\n\n".join(f"`{name}`:\n\n```yaml\n{text}```" for name, text in FILES.items())
    told += ["## The recipes", "Files that the commands above name.", recipes]
    found["gallery/index.md"] = "\n\n".join(filter(None, told)) + "\n"
    return found


def peers() -> str:
    """Return a picture of mean accuracy on Adult by epsilon, of every tool of results/tabular."""
    from dpsgd_cli.results.charts import COLOURS, Chart, beside

    found: dict[str, dict[float, list[float]]] = {}
    with (ROOT / "results" / "tabular" / "trials.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            private = float(row["epsilon"]) in EPSILONS
            if private and row["data"] == "adult" and not row["tool"].startswith("dpsgd, by rule,"):
                tool = found.setdefault(row["tool"].replace("by rule", "automatic"), {})
                tool.setdefault(float(row["epsilon"]), []).append(float(row["accuracy"]))
    chart = Chart(
        640, 360, "epsilon", "accuracy on Adult", names=[f"{epsilon:g}" for epsilon in EPSILONS], low_legend=True
    )
    for number, (name, values) in enumerate(found.items()):
        colour = COLOURS[number % len(COLOURS)]
        means = [statistics.fmean(values[epsilon]) for epsilon in EPSILONS]
        chart.line(range(len(means)), means, colour, name)
        chart.line(range(len(means)), means, colour, kind="points")
    return beside([chart], 1)


if __name__ == "__main__":
    shutil.rmtree(ROOT / "build" / "gallery", ignore_errors=True)
    make(ROOT / "build" / "gallery")
