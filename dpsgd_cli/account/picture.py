"""Pictures of a series of `dpsgd account`: the requested curves with a legend.

The table has more columns (rho, noise, other bounds), too many for a picture. The scale is logarithmic if the curves
end at very different values. Imported for `--plot` alone, because matplotlib is slow to load.
"""

from __future__ import annotations

import math

import matplotlib as mpl

from dpsgd_cli.account.answers import FALSE_POSITIVES, Series
from dpsgd_cli.errors import RunError
from dpsgd_cli.results.pictures import COLOURS, DASHES

_FAR_APART = 20.0
_UPWARDS = {"order": "Renyi divergence", FALSE_POSITIVES: "true positives"}


def draw(series: Series, path: str) -> None:
    """Draw a line for each column of `series.shown` into `path`, whose ending selects the format.

    Raises RunError if the picture cannot be written.
    """
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    ends = []
    for number, name in enumerate(series.shown):
        values = [math.nan if value is None else value for value in series.columns[name]]
        ends += [value for value in values if value > 0 and math.isfinite(value)][-1:]
        colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        axes.plot(series.points, values, label=name, color=colour, linestyle=dashes)
    if ends and max(ends) > _FAR_APART * min(ends):
        axes.set_yscale("log")
    axes.set_xlabel(series.axis)
    axes.set_ylabel(_UPWARDS.get(series.axis, "epsilon"))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot write the picture: {error}") from None
    finally:
        pyplot.close(figure)
