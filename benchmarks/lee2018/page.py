"""The page: tables, pictures and what was run, said from the results themselves.

Not here: running (`runs.py`), drawing (`pictures.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.lee2018 import cases, pictures, runs
from benchmarks.lee2018.runs import Asked, Cell, Figure

_HEAD = """# DP-AGD and what it was compared with

Lee and Kifer 2018, Figures 1 to 4, and what came after. Every number comes from a recipe of `recipes/lee2018/`, at
delta = 1e-8: accuracy is that of held-out folds, as mean ± 95% half-width over trials (whose folds overlap); the
objective is that of the training folds. Each section says how many trials it has.

Settings beyond the paper were chosen by looking at Adult and Bank; no epsilon includes that choice. IPUMS-BR and
KDDCup99 have Adult's settings as they are. The narrower bounds are gains of up to 20,000 dollars on Adult, calls of up
to half an hour on Bank and the payload of one Ethernet frame on KDDCup99; the columns of IPUMS-BR have no names, so
there are none.

KDDCup99 has no row without an L2 term: L-BFGS takes too long there.

The SVM is the hinge loss; ObjPert and OutPert need a smooth one and take the Huber SVM, whose objective is another.
"""

_KINK = """It falls because the choice of a step's length gets better. At the hinge's kink, which DP-AGD reaches while
still near the majority class, single gradients point from side to side across a valley: the best length along one is
tiny or none, a better gradient does not help, and only choices with much noise go further. With `momentum` a direction
is of all gradients so far, at no cost in privacy. To see both almost without noise:
"""

_KINK_TITLE = "Why DP-AGD's accuracy falls on Adult's SVM"
_KINKED = "[why](#why-dp-agds-accuracy-falls-on-adults-svm)"
_HALVED = "choices to stay halved the steps of some trials early; `method.alpha_shrink=0.7` does not cut them so short"
_WORSE = 1.1


def head(command: str) -> list[str]:
    return [_HEAD, f"Written by `{command}`.", ""]


def trials_of(cells: Mapping[Any, Mapping[Any, Cell]]) -> str:
    """How many trials every cell of a table has, in words."""
    counts = sorted({cell.trials for row in cells.values() for cell in row.values()})
    return "; ".join(f"{count} trials: 5 folds x {count // 5} repeat{'s' * (count > 5)}" for count in counts) + "."


def table(cells: Mapping[Any, Mapping[Any, Cell]], corner: str, objective: bool = False) -> list[str]:
    """A row a key, a column a second key: accuracies, or objectives."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    named = [f"{corner.split('|')[1]} {column:g}" if isinstance(column, float) else str(column) for column in columns]
    lines = [f"| {corner.split('|')[0]} | " + " | ".join(named) + " |", "| --- |" + " --- |" * len(columns)]
    for key, row in cells.items():
        texts = [_text(row[column], objective) if column in row else "" for column in columns]
        lines.append(f"| {cases.METHODS.get(str(key), str(key))} | " + " | ".join(texts) + " |")
    return lines


def _text(cell: Cell, objective: bool) -> str:
    return f"{cell.objective:.3f}" if objective else f"{cell.accuracy:.4f} ± {cell.margin:.4f}"


def figure(found: Figure, asked: Asked) -> list[str]:
    """One data set and loss: both tables and the picture."""
    name = f"{found.data}-{found.loss}"
    pictures.figure(found, asked.out / f"{name}.png")
    text = [f"## {cases.TITLES[found.data]}, {found.loss}", "", trials_of(found.cells), ""]
    text += [f"{cases.METHODS[method]} has no row: {why}.\n" for method, why in found.failed.items()]
    text += _remarks(found)
    text += [*table(found.cells, "method|eps"), "", "Objective:", "", *table(found.cells, "method|eps", True), ""]
    return [*text, f"![accuracy and objective by epsilon]({name}.png)", ""]


def _remarks(found: Figure) -> list[str]:
    """A sentence for each kind of DP-AGD that a larger budget makes worse."""
    text = []
    for method in (name for name in cases.KINK if name in found.cells):
        row = list(found.cells[method].values())
        best, last = max(row, key=lambda cell: cell.accuracy), row[-1]
        objectives = [cell.objective for cell in row]
        falls = last.accuracy + last.margin < best.accuracy - best.margin
        said = f" accuracy falls from {best.accuracy:.4f} to {last.accuracy:.4f}" if falls else ""
        ends = f" objective ends at {last.objective:.3f}, its least being {min(objectives):.3f}"
        if falls and objectives == sorted(objectives, reverse=True):
            said += f" while its objective goes on falling, to {last.objective:.3f}, as the paper saw on Bank's SVM."
        elif falls or last.objective > _WORSE * min(objectives):
            said += f"{', and its' if falls else ''}{ends}: {_KINKED if found.loss == 'svm' else _HALVED}."
        if said:
            text += [f"{cases.METHODS[method]}: its{said}", ""]
    return text


def kink(found: Mapping[str, Mapping[float, Cell]]) -> list[str]:
    """Why DP-AGD gets worse as its budget grows, and what helps."""
    changes = "model.loss=hinge model.l2=0.01 privacy.budget.epsilon=1000"
    text = [f"## {_KINK_TITLE}", "", _KINK, "```"]
    text += [f"dpsgd train lee2018/{method} {changes}" for method in cases.KINK[1:]]
    text += ["```", "", trials_of(found), ""]
    return [*text, *table(found, "hinge|eps"), "", "Objective:", "", *table(found, "hinge|eps", True), ""]


def variants(data: str, found: Mapping[str, Mapping[float, Cell]]) -> list[str]:
    """What was tried with DP-GD on one data set, and which of it was best at each budget."""
    text = [f"## What was tried with DP-GD on {cases.TITLES[data]}", "", trials_of(found), ""]
    text += [
        f"The narrower bounds are `{cases.BOUNDS[data]}`. From the fifth on, a row is the fourth but for what it says.",
        "",
        *table(found, "DP-GD, logistic|eps"),
        "",
    ]
    best = {e: max(found, key=lambda label: found[label][e].accuracy) for e in next(iter(found.values()))}
    told = [f"{label} at eps {e:g} ({found[label][e].accuracy:.4f})" for e, label in best.items()]
    return [*text, f"Best: {'; '.join(told)}. Differences within the half-widths say nothing.", ""]


def optima(data: str, found: Mapping[str, Mapping[float, Cell]]) -> list[str]:
    """What the paper's non-private number depends on."""
    paper = {"adult": 0.855, "bank": 0.895}[data]
    said = f"The paper's non-private accuracy on {cases.TITLES[data]} is {paper}."
    own = found.get(next(iter(cases.FEATURES)), {})
    if cases.PENALTIES[0] in own and cases.PENALTIES[-1] in own:
        strong, none = own[cases.PENALTIES[0]].accuracy, own[cases.PENALTIES[-1]].accuracy
        nearer = "the first" if abs(strong - paper) < abs(none - paper) else "the second"
        said += f" Its L2 term of 0.001 gives {strong:.4f} here, none gives {none:.4f} (at most 1000 steps):"
        said += f" the paper's is nearer to {nearer}."
    heading = f"## The optimum without privacy on {cases.TITLES[data]}, by L2 term"
    shown = {features: {f"l2 {penalty:g}": cell for penalty, cell in row.items()} for features, row in found.items()}
    return [heading, "", trials_of(found), said, "", *table(shown, "logistic, features|l2"), ""]


def study(key: str, found: dict[float, dict[Any, Cell]], asked: Asked) -> list[str]:
    """DP-AGD on Adult by one parameter."""
    pictures.study(key, found, asked.out / f"study-{key}.png")
    shown = {f"eps {e:g}": {f"{key} {value:g}": cell for value, cell in row.items()} for e, row in found.items()}
    text = [f"## DP-AGD on Adult by {key}", "", trials_of(found), ""]
    text += [*table(shown, "logistic|"), "", "Objective:", "", *table(shown, "logistic|", True), ""]
    return [*text, f"![accuracy and objective by {key}](study-{key}.png)", ""]


def times(figures: list[Figure], asked: Asked) -> list[str]:
    """Processor seconds of every method, for figures whose packs were all run whole, and of the paper's seven."""
    kept = runs.seconds(asked.runs)
    measured = {}
    for one in figures:
        clocks = {method: runs.clock_of(one.data, one.loss, method, asked) for method in one.cells}
        row = {method: kept[clock]["processor"] for method, clock in clocks.items() if clock in kept}
        if set(cases.OF_FIGURE_2) <= set(row):
            measured[f"{cases.TITLES[one.data]}, {one.loss}"] = row
    if not measured:
        return []
    text = [
        "## Time",
        "",
        f"Processor seconds, all threads together, of {len(asked.epsilons)} budgets with all trials:",
    ]
    text += ["", "| method | " + " | ".join(measured) + " |", "| --- |" + " ---: |" * len(measured)]
    for method, title in cases.METHODS.items():
        texts = [f"{row[method]:.0f}" if method in row else "" for row in measured.values()]
        text.append(f"| {title} | " + " | ".join(texts) + " |")
    whole = [f"{sum(row[method] for method in cases.OF_FIGURE_2) / 60:.1f}" for row in measured.values()]
    text.append("| the paper's seven (DP-AGD to SGD-MA, NonPrivate), minutes | " + " | ".join(whole) + " |")
    return [*text, ""]
