"""Text without a model trained before: what is trained on SST-2, and the table of its page.

    DPSGD_DATA=... python -m benchmarks.finetune.page    # writes results/finetune/nonprivate.csv

The private rows come from `python -m benchmarks.pages train finetune`. Their words are in `page.md`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.finetune.adapters import ADAPTERS
from benchmarks.pages import RESULTS
from benchmarks.pages.drawing import errorbars, over_epsilon
from benchmarks.pages.rows import MISSING, Rows, markdown
from benchmarks.pages.spec import Spec

SPEC = Spec(Path(__file__).with_name("page.yaml"))
CASES, METRICS = SPEC.cases, SPEC.metrics
FEATURES = [row["name"] for row in SPEC.content["tables"]["table"]["rows"]]
EPSILONS = (1.0, 3.0, 8.0)
AIMS = {1.0: 73.5, 3.0: 77.5, 8.0: 79.0}
NONPRIVATE = RESULTS / "finetune" / "nonprivate.csv"


def said(rows: Rows) -> Mapping[str, str]:
    """Return the table, and its numbers that the text repeats."""
    own = [rows.summary("sst2", f"{FEATURES[0]}, epsilon {epsilon:g}") for epsilon in EPSILONS]
    return {
        **SPEC.said(rows),
        "aims": ", ".join(f"{aim:g} at {epsilon:g}" for epsilon, aim in AIMS.items()),
        "missed": ", ".join(
            f"{epsilon:g}"
            for epsilon, found in zip(EPSILONS, own, strict=True)
            if found is None or 100 * found.mean < AIMS[epsilon]
        )
        or "none",
        "nonprivate": markdown(
            ("without privacy", "test accuracy, percent"),
            [(name, f"{100 * value:.2f}") for name, value in _nonprivate()] or [(MISSING, "")],
        ),
        "numbers": f"{_numbers():,}",
        "adapters": markdown(
            ("what trains", "numbers trained", "bytes of the result's model", "test accuracy, percent"),
            _adapters() or [(MISSING, "", "", "")],
        ),
    }


def _numbers() -> int:
    """Return how many numbers the transformer has: it is built as its recipe says."""
    from dpsgd_cli.common.plugins import load_attribute, trusting
    from dpsgd_cli.engine.settings import PythonModel
    from dpsgd_cli.recipe.loading import load_recipe

    loaded = load_recipe("finetune/sst2-transformer")
    model, text = loaded.recipe.model, loaded.recipe.data.text
    assert isinstance(model, PythonModel) and text is not None
    with trusting():
        made = load_attribute(loaded.base / model.file, model.factory)((text.length,), 2, **model.arguments)
    return sum(own.numel() for own in made.parameters())


def _adapters() -> list[tuple[str, ...]]:
    if not ADAPTERS.is_file():
        return []
    return [tuple(map(str, row)) for row in pd.read_csv(ADAPTERS, dtype=str).itertuples(index=False, name=None)]


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """Return accuracy against epsilon for each kind of features, with the models without privacy as lines."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in FEATURES:
        points = {epsilon: rows.summary("sst2", f"{name}, epsilon {epsilon:g}") for epsilon in EPSILONS}
        errorbars(axes, points, marker="o", capsize=3, label=name)
    for (name, value), style in zip(_nonprivate(), ("k--", "k:"), strict=True):
        axes.plot(EPSILONS, [value] * len(EPSILONS), style, label=f"{name}, not private")
    over_epsilon(axes, EPSILONS, ylabel="test accuracy", title="SST-2, 6,920 sentences for training")
    axes.legend(fontsize=8)
    return {"sst2": figure}


def _nonprivate() -> list[tuple[str, float]]:
    if not NONPRIVATE.is_file():
        return []
    return list(pd.read_csv(NONPRIVATE).itertuples(index=False, name=None))


def measure() -> Iterator[tuple[str, float]]:
    """Yield the test accuracy of logistic regressions without privacy; five folds of the training part choose C."""
    import scipy.sparse
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegressionCV

    from dpsgd_cli.data.column_settings import Computed
    from dpsgd_cli.data.computed_columns import features

    (train, y), (test, truth) = (_sentences(part) for part in ("train", "test"))
    rule = Computed("sentence", "text", buckets=8192, words=1, rarity="en", lexicon="vader")
    own = [scipy.sparse.csr_matrix(features(texts, rule)) for texts in (train, test)]
    counting = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\S+", lowercase=False)
    for name, (x, new) in {
        "words, rarity and sentiment": own,
        "TF-IDF of words": (counting.fit_transform(train), counting.transform(test)),
    }.items():
        model = LogisticRegressionCV(
            Cs=[0.3, 1, 3, 10, 30], l1_ratios=(0,), cv=5, scoring="accuracy", max_iter=1000, use_legacy_attributes=False
        )
        yield name, float(model.fit(x, y).score(new, truth))


def _sentences(part: str) -> tuple[list[str], list[str]]:
    from dpsgd_cli.data import card_files

    lines = (card_files.folder() / "sst2" / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
    pairs = [line.rsplit("\t", 1) for line in lines]
    return [text for text, _ in pairs], [label for _, label in pairs]


if __name__ == "__main__":
    with NONPRIVATE.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("model", "accuracy"), *measure()])
