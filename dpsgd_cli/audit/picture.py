"""Picture of an audit: error rates that the claim allows, observed error rates, and refuted error rates.

It shows false negatives over false positives. No attack should get below the claim's curve. The box contains both true
rates at the stated confidence. The dashed curve is that of the last member of the claim's family that the box does not
refute.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.results.curves import COLOURS
from dpsgd_cli.results.files import write_whole

NAME = "trade-off"
_POINTS = 61
_LEAST = 1e-6


def draw(document: dict[str, Any], directory: Path) -> list[Path]:
    """Draw the trade-off curves as SVG and PNG, and return the files; none if no canary was scored."""
    found = document.get("membership")
    if found is None or "curves" not in found:
        return []
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    claim, made = document["claim"], []
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpsgd", "font.size": 10}):
        figure = Figure(figsize=(5.6, 5.2))
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        curves = found["curves"]
        label = f"claimed: epsilon {claim['epsilon']:.3g}"
        axes.plot(curves["false_positive"], curves["claimed"], color=COLOURS[0], label=label)
        axes.fill_between(curves["false_positive"], curves["claimed"], color=COLOURS[0], alpha=0.08, linewidth=0)
        bound = document["lower_bounds"].get("B")
        if bound is not None:
            axes.plot(curves["false_positive"], curves["refuted"], color=COLOURS[1], linestyle="--",
                      label=f"refuted up to: epsilon {bound:.3g}")  # fmt: skip
        rates, low, high = found["rates"], found["rates_at_least"], found["rates_at_most"]
        corner = (low["false_positive"], low["false_negative"])
        box = [high[name] - low[name] for name in ("false_positive", "false_negative")]
        axes.add_patch(Rectangle(corner, *box, color=COLOURS[2], alpha=0.35, linewidth=0,
                                 label=f"observed, {document['confidence']:.0%} each way"))  # fmt: skip
        axes.plot(rates["false_positive"], rates["false_negative"], "+", color="black")
        axes.plot([0, 1], [1, 0], color="grey", linewidth=0.8, linestyle=":", label="a blind guess")
        axes.set(xlabel="false positives", ylabel="false negatives", xlim=(0, 1), ylim=(0, 1))
        axes.set_title(f"{document['name']}: {'REFUTED' if document['refuted'] else 'not refuted'}")
        axes.legend(loc="upper right", frameon=False)
        axes.grid(alpha=0.3)
        figure.tight_layout()
        for ending in ("svg", "png"):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=ending, dpi=150, metadata={"Date": None} if ending == "svg" else {})
            made.append(directory / f"{NAME}.{ending}")
            write_whole(made[-1], drawn.getvalue())
    return made


def points() -> np.ndarray:
    """Return the false positive rates at which curves are drawn: denser near 0, where curves are steep."""
    return np.asarray(np.clip(np.linspace(0, 1, _POINTS) ** 2, _LEAST, 1 - _LEAST))
