"""The paper's pictures: accuracy and objective over the budget, and over one parameter of DP-AGD.

Not here: the numbers (`runs.py`). matplotlib is imported where a picture is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lee2018 import cases
from benchmarks.lee2018.runs import Cell, Figure


def figure(found: Figure, path: Path) -> None:
    """Accuracy above, objective below, over the budget on a logarithmic axis: the shape of Figures 2 and 3."""
    plt = _pyplot()
    _, axes = plt.subplots(2, 1, figsize=(7, 8), sharex=True)
    for method, cells in found.cells.items():
        number = list(cases.METHODS).index(method)
        flat = method.startswith(("non-private", "majority"))
        style: dict[str, Any] = {"ls": "--"} if flat else {"marker": "osD^v<>pP*X"[number % 11]}
        style["color"] = plt.colormaps["tab20"](number)
        epsilons = list(cells)
        accuracy, margins = [c.accuracy for c in cells.values()], [c.margin for c in cells.values()]
        axes[0].errorbar(epsilons, accuracy, yerr=margins, label=cases.METHODS[method], capsize=2, **style)
        axes[1].plot(epsilons, [c.objective for c in cells.values()], **style)
    axes[0].set(ylabel="accuracy on held-out folds", title=f"{cases.TITLES[found.data]}, {found.loss}")
    axes[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes[1].set(xscale="log", xlabel="epsilon", ylabel="training objective", yscale="log")
    plt.savefig(path, dpi=110, bbox_inches="tight")
    plt.close()


def study(key: str, found: dict[float, dict[Any, Cell]], path: Path) -> None:
    """Accuracy and objective over one parameter, a line a budget: the shape of Figure 1."""
    plt = _pyplot()
    _, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for epsilon, cells in found.items():
        axes[0].plot(list(cells), [c.accuracy for c in cells.values()], marker="o", label=f"eps {epsilon:g}")
        axes[1].plot(list(cells), [c.objective for c in cells.values()], marker="o")
    axes[0].set(xlabel=key, ylabel="accuracy on held-out folds")
    axes[1].set(xlabel=key, ylabel="training objective", yscale="log")
    axes[0].legend(fontsize=7)
    plt.savefig(path, dpi=110, bbox_inches="tight")
    plt.close()


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
