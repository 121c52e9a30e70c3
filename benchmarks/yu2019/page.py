"""The page of the reproduction: published numbers beside ours, and the pictures. Reads result directories only.

Not here: what is trained (`cases.py`), training (`reproduce.py`), drawing (`pictures.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.yu2019 import pictures
from benchmarks.yu2019.cases import DECAYS, EPOCHS, NON_PRIVATE_AS_IN_THE_PAPER, SCHEDULES, cases
from benchmarks.yu2019.runs import Found, Results, interval

PUBLISHED = {
    "uniform": 0.919,
    "time": 0.931,
    "step": 0.929,
    "exponential": 0.929,
    "polynomial": 0.932,
    "validation": 0.930,
}
PUBLISHED_EPOCHS = {**EPOCHS, "validation": 64}
SAME_LENGTH = {"time": 0.925, "step": 0.925, "exponential": 0.929, "polynomial": 0.926}
WITHOUT = {
    "uniform": 0.970,
    "time": 0.957,
    "step": 0.954,
    "exponential": 0.965,
    "polynomial": 0.959,
    "validation": 0.964,
}
TABLE_3 = {
    "time": (0.0760, 0.0441, 0.0281, 0.0190, 0.0132, 0.0093, 0.0067, 0.0048),
    "step": (0.5459, 0.7008, 0.7922, 0.8510, 0.8910, 0.9190, 0.9400, 0.9560),
    "exponential": (0.0442, 0.0282, 0.0193, 0.0138, 0.0101, 0.0075, 0.0056, 0.0041),
    "polynomial": (6.2077, 3.5277, 2.1948, 1.4317, 0.9549, 0.6382, 0.4167, 0.1626),
}
TABLE_4 = {1: 0.931, 2: 0.921, 3: 0.898}
CANCER = {"uniform": "about .92", "exponential": "about .95", "validation": "about .94", "non-private": ".96"}
CIFAR = {
    "uniform": "about .39, from the shares of the gap that the text gives",
    "exponential": "uniform + .02",
    "validation": "uniform + .04",
    "non-private": ".58",
    "exponential, 1,000 hidden units": "",
}


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    lines: Sequence[str]


def write(out: Path, repeats: int) -> None:
    """Draw the pictures and write `out/README.md`."""
    out.mkdir(parents=True, exist_ok=True)
    results = Results(cases(repeats), out / "runs")
    drawn = pictures.draw(results, out)
    parts: list[Callable[[Results], Section]] = [
        _table_2, _same_length, _without_privacy, _as_published, _table_3, _table_4, _cancer, _cifar,
    ]  # fmt: skip
    lines = [
        "# Yu et al. 2019, reproduced",
        "",
        "Lei Yu, Ling Liu, Calton Pu, Mehmet Emre Gursoy and Stacey Truex, *Differentially Private Model Publishing",
        f"for Deep Learning*. Written by `make reproduce-yu2019`: {repeats} trials of each training (400 on Cancer),",
        "where the paper has 10. Ours are means with the 95% interval of the mean; every run is in `runs/` where the",
        f"command was run. {results.state()}",
    ]
    for part in parts:
        section = part(results)
        lines += ["", f"## {section.title}", "", *section.lines]
    lines += ["", "## Figures", "", *(line for name, text in drawn for line in (f"![{text}]({name})", "", text, ""))]
    (out / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _accuracy(found: Found | None) -> str:
    return "not run" if found is None else interval(found.metric("test_accuracy"))


def _close(found: Found | None, published: float) -> str:
    mean = None if found is None else found.metric("test_accuracy")["mean"]
    return "" if mean is None else f"{mean - published:+.3f}"


def _table_2(results: Results) -> Section:
    rows = []
    for kind in SCHEDULES:
        found = results.get("table2", kind)
        epochs = "" if found is None else found.epochs()
        rho = "" if found is None else f"{found.document['privacy']['rho']:.6g}"
        train = "" if found is None else interval(found.metric("nonprivate_train_accuracy"))
        rows.append(
            [kind, str(PUBLISHED_EPOCHS[kind]), epochs, f"{PUBLISHED[kind]:.3f}", _accuracy(found),
             _close(found, PUBLISHED[kind]), train, rho]
        )  # fmt: skip
    header = (
        "schedule",
        "epochs, paper",
        "ours",
        "test accuracy, paper",
        "ours",
        "difference",
        "training accuracy",
        "rho",
    )
    said = [
        "",
        "Ours clip the whole gradient at 1, whiten the 60 directions by the released covariance, and learn at .15, so",
        "that all noise is accounted for within rho 0.78125. Where the PCA (rho 0.001953125) does not fit beside the",
        "paper's epochs it is outside the budget, as in the paper, and in the total that is shown. The noise of",
        "`validation` follows what it released, so its rho is its budget, and not what its trials spent of that.",
    ]
    return Section("Table II: schedules at rho = 0.78125 on MNIST", [*_rows(header, rows), *said])


def _same_length(results: Results) -> Section:
    rows = []
    for kind in DECAYS:
        control, decayed = results.get("control", kind), results.get("table2", kind)
        gain = "" if control is None or decayed is None else interval(decayed.minus(control, "test_accuracy"))
        theirs = f"{PUBLISHED[kind] - SAME_LENGTH[kind]:+.3f}"
        rows.append([kind, str(EPOCHS[kind]), f"{SAME_LENGTH[kind]:.3f}", _accuracy(control), theirs, gain])
    header = ("control of", "epochs", "test accuracy, paper", "ours", "what the decay adds, paper", "ours (same seeds)")
    return Section("Table II, last row: uniform noise for the same number of epochs", _rows(header, rows))


def _without_privacy(results: Results) -> Section:
    both = [results.get("table2", name) for name in ("non-private", NON_PRIVATE_AS_IN_THE_PAPER)]
    rows = []
    for kind in SCHEDULES:
        epochs = PUBLISHED_EPOCHS[kind]
        ours = ["not run" if found is None else interval(found.at_epoch("test_accuracy", epochs)) for found in both]
        rows.append([kind, str(epochs), f"{WITHOUT[kind]:.3f}", *ours])
    header = ("as long as", "epochs", "test accuracy, paper", "ours", "ours at the paper's rate, not whitened")
    said = [
        "",
        "The paper learns at a constant 0.05 on directions of the PCA as they are; ours, as in all recipes above, at",
        ".15 on whitened ones. Without noise that alone is worth what the two last columns differ by.",
    ]
    return Section("Table II: no privacy", [*_rows(header, rows), *said])


def _as_published(results: Results) -> Section:
    rows = []
    for kind in ("uniform", *DECAYS):
        found, kept = results.get("as-published", kind), results.get("table2", kind)
        rho = "" if found is None else f"{found.document['privacy']['rho']:.4g}"
        epsilon = "" if found is None else f"{found.document['privacy']['epsilon']:.3f}"
        rows.append([kind, f"{PUBLISHED[kind]:.3f}", _accuracy(found), rho, epsilon, _accuracy(kept)])
    header = ("schedule", "paper", "ours, as published", "its rho", "its epsilon", "ours at rho 0.78125")
    said = [
        "",
        "The published code clips each of the two layers at 4 and adds noise 4 sigma to each, but accounts for one",
        "Gaussian of multiplier sigma. The two layers together are one of sigma / sqrt(2): twice the rho it states.",
    ]
    return Section("The published noise, and what it honestly costs", [*_rows(header, rows), *said])


def _table_3(results: Results) -> Section:
    del results
    rows = [
        [kind, *(f"{k:.4f} ({pictures.solved(kind, 30 + 10 * i):.4f})" for i, k in enumerate(row))]
        for kind, row in TABLE_3.items()
    ]
    header = ("decay", *(f"{n} epochs" for n in range(30, 101, 10)))
    said = ["", "Published, and in brackets what `decay: auto` gives, which spends the budget fully."]
    return Section("Table III: the decay rate for a number of epochs", [*_rows(header, rows), *said])


def _table_4(results: Results) -> Section:
    rows = []
    for layers, published in TABLE_4.items():
        found = results.get("hidden", "200") if layers == 1 else results.get("layers", str(layers))
        rows.append([str(layers), f"{published:.3f}", _accuracy(found)])
    said = ["", "The paper's layers have 1000 units; ours have 200, because two layers of 1000 cost ten times one."]
    return Section("Table IV: hidden layers", [*_rows(("layers", "paper", "ours"), rows), *said])


def _cancer(results: Results) -> Section:
    rows = [
        [kind, said, _accuracy(found), "" if found is None else found.epochs()]
        for kind, said in CANCER.items()
        for found in [results.get("cancer", kind)]
    ]
    lines = _rows(("schedule", "paper (read from Figure 14 and the text)", "ours", "epochs"), rows)
    one, two = results.get("cancer", "exponential"), results.get("cancer", "uniform")
    if one is not None and two is not None:
        lines += ["", f"Exponential minus uniform, same seeds: {interval(one.minus(two, 'test_accuracy'))}."]
    return Section("Cancer (Wisconsin original), rho = 0.4", lines)


def _cifar(results: Results) -> Section:
    rows = [
        [kind, said, _accuracy(found), "" if found is None else found.epochs()]
        for kind, said in CIFAR.items()
        for found in [results.get("cifar", kind)]
    ]
    said = [
        "",
        "The paper's features are those of VGG16 trained on ImageNet; 1,000 hidden units are trained on 60 of their",
        "components, in batches of 200. Ours are a wavelet scattering transform, which needs no data, and one dense",
        "layer is trained on them in batches of 8,000: the noise of an epoch is the same for any size. The last row",
        "has the paper's 1,000 hidden units, on 243 pooled features: a network of 254,010 numbers, each with noise.",
        "The test set here is the first 1,000 records where only those are on disk.",
    ]
    return Section("CIFAR-10, frozen features", [*_rows(("schedule", "paper", "ours", "epochs"), rows), *said])
