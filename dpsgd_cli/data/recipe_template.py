"""Draft of a recipe for a user's own file: the apparent role of each column, and gaps that only a person can fill.

The draft holds facts that were read from the file: column names, categories, classes, and which columns have missing
values. If you train with it, you publish them with the result and declare them public; each such line says so. Bounds
are never read, because the least and the largest value are those of single records. You fill them in, and
`recipe/check.py` refuses a recipe that lacks them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml

from dpsgd_cli.common.sections import TO_FILL_IN
from dpsgd_cli.common.text_format import quoted, suggested
from dpsgd_cli.common.yaml_tree import CoreDumper
from dpsgd_cli.data import opening, own_arrays, own_table, table, table_files
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

Task = Literal["classification", "regression"]
MOST_CATEGORIES = 50
MOST_CLASSES = 20
READ = "read from the file: keep it only if it is public knowledge"
_OPEN = f"[{', '.join(TO_FILL_IN)}]"
_ROW_NUMBERS, _ALIKE, _DATES, _TEXTS = "row numbers", "one value throughout", "dates", "text, in too many values"
_NESTED = "lists or objects"


@dataclass(frozen=True)
class Drafted:
    """The apparent content of a file.

    `numeric` are its numeric columns (none for an array), and `gaps` those of them with missing values. `categorical`
    has the values of each categorical column, `dropped` the reason for each column left out. `classes` is None if the
    targets are numbers.
    """

    records: int
    numeric: Sequence[str]
    gaps: Sequence[str]
    categorical: dict[str, list[Any]]
    dropped: dict[str, str]
    classes: list[Any] | None
    is_array: bool = False
    bytes_only: bool = False


def draft(path: Path, target: str, task: Task | None, shown: str) -> str:
    """Return the text of a recipe for the file at `path`, which the recipe calls `shown`.

    Raises DataError with every reason why the file cannot be trained on.
    """
    kind = opening.kind_of(path)
    if kind == opening.ARRAYS:
        return _text(_of_arrays(path, target, task), target, shown)
    if kind not in table_files.KINDS:
        raise DataError(
            f"{path}: a recipe is drafted for {', '.join((*table_files.KINDS, opening.ARRAYS))}, not {kind}"
        )
    return _text(_of_table(path, kind, target, task), target, shown)


def _of_table(path: Path, kind: str, target: str, task: Task | None) -> Drafted:
    first = table_files.read_table(path, kind, text_columns={target})
    if target not in first.columns:
        raise DataError(
            f"{path}: --target names {quoted(target)}, which is no column{suggested(target, first.columns)}"
        )
    names = [name for name in first.columns if name != target]
    dropped = {name: why for name in names if (why := _useless(first[name])) is not None}
    text_columns = [name for name in names if name not in dropped and _is_words(first[name])]
    # read again as text, as training does: otherwise the reader converts cells that look like other types
    frame = table_files.read_table(path, kind, text_columns={target, *text_columns})
    categorical = {name: list(own_table.found_values([frame], name)) for name in text_columns}
    dropped |= {name: _TEXTS for name, values in categorical.items() if len(values) > MOST_CATEGORIES}
    categorical = {name: values for name, values in categorical.items() if name not in dropped}
    numeric = [name for name in names if name not in dropped and name not in categorical]
    problems = []
    for name in numeric:
        try:
            table.to_numbers(first[name], filling=0.0)
        except DataError as error:
            problems.append(f"{path.name}: {error}")
    if not numeric and not categorical:
        reasons = ", ".join(f"{quoted(name)} ({why})" for name, why in dropped.items())
        problems.append(f"{path.name} has no column to learn from; its others are {reasons}")
    classes = None
    try:
        classes = _classes(frame[target], task, path)
    except DataError as error:
        problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    gaps = [name for name in numeric if table.gaps(first[name]).any()]
    return Drafted(len(frame), numeric, gaps, categorical, dropped, classes)


def _of_arrays(path: Path, target: str, task: Task | None) -> Drafted:
    import pandas as pd

    stored = own_arrays.load(path)
    wrong = [f"{path} has no array {name!r}{suggested(name, stored)}" for name in ("x", target) if name not in stored]
    if wrong:
        raise DataError("\n".join(wrong))
    x, y = stored["x"], stored[target]
    own_arrays.check_shapes(x, y, x, f"{path}: x", f"{path}: the labels")
    classes = _classes(pd.Series(y, name=target), task, path)
    return Drafted(len(x), [], [], {}, {}, classes, is_array=True, bytes_only=x.dtype == np.uint8)


def _useless(series: pd.Series) -> str | None:
    """Return the reason to leave a column out, or None."""
    import pandas as pd

    if pd.api.types.is_datetime64_any_dtype(series) or pd.api.types.is_timedelta64_dtype(series):
        return _DATES
    try:
        table.refuse_nested(series)
    except DataError:
        return _NESTED
    if series.nunique() < 2:
        return _ALIKE
    counted = pd.api.types.is_integer_dtype(series) and len(series) > 2 and bool((series.diff().iloc[1:] == 1).all())
    return _ROW_NUMBERS if counted else None


def _is_words(series: pd.Series) -> bool:
    """Return True if a column holds categories rather than numbers: any text, or at most two values."""
    if series.nunique() <= 2:
        return True
    try:
        table.to_numbers(series, filling=0.0)
    except table.NoNumbers:
        return True
    except DataError:
        pass
    return False


def _classes(series: pd.Series, task: Task | None, path: Path) -> list[Any] | None:
    """Return the classes; None if the targets are numbers.

    Without `task`, targets are numbers if they have over `MOST_CLASSES` values or any fraction.
    """
    try:
        numbers = table.to_numbers(series, filling=0.0, is_target=True)
        many = len(np.unique(numbers)) > MOST_CLASSES or not np.all(numbers == np.floor(numbers))
    except DataError:
        many = False
    asked: Task = task or ("regression" if many else "classification")
    settings = Data(path=path.name, target=str(series.name), task=asked)
    classes = table.read_labels(settings, [series], [path], None)[1]
    return None if classes is None else list(classes)


def _text(drafted: Drafted, target: str, shown: str) -> str:
    """Return the recipe, with a comment beside everything that a person has to judge."""
    stem = Path(shown).name.partition(".")[0]
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem).strip("-") or "mine"
    lines = [
        f"# How well can {target} be learnt from {Path(shown).name} in private?   dpsgd train FILE, once filled in",
        f"# Fill in each {_OPEN} from public knowledge: never from this file, whose least and largest values are those",
        "# of single records. What was read from the file says so: it is published with the result and protected by",
        "# nothing, so leave out what nobody could know without the file.",
        f"name: {name[:80]}",
        "data:",
        f"  path: {_yaml(shown)}",
        f"  target: {_yaml(target)}",
        *_target_lines(drafted),
        *_column_lines(drafted),
    ]
    digits = math.floor(math.log10(drafted.records)) + 1
    steps = [] if drafted.is_array else ["  preprocess: [{bin: {}}]     # cosines over the bounds: looks at no record"]
    return "\n".join(
        [
            *lines,
            *steps,
            "model: {kind: linear}",
            "method: {kind: dp-sgd, batching: full}     # its settings by rule: --dry-run shows them",
            "privacy:",
            f"  budget: {{epsilon: 1, delta: 1e-{digits}}}     # delta is less than one in {drafted.records} records",
            "",
        ]
    )


def _target_lines(drafted: Drafted) -> list[str]:
    if drafted.classes is None:
        return [
            "  task: regression",
            f"  target_bounds: {_OPEN}     # what the target can be, in its own unit",
            "  # target_transform: log     # for amounts that span orders of magnitude by these bounds, such as prices",
        ]
    return ["  task: classification", f"  classes: {_yaml(drafted.classes)}     # {READ}"]


def _column_lines(drafted: Drafted) -> list[str]:
    """Return the recipe's lines about the features."""
    lines = []
    if drafted.categorical:
        lines += ["  categorical:     # an empty cell is a category of its own"]
        lines += [f"    {_yaml(name)}: {_yaml(values)}     # {READ}" for name, values in drafted.categorical.items()]
    if drafted.bytes_only:
        lines += ["  bounds: [0, 255]     # what a byte can be"]
    elif drafted.is_array:
        lines += [f"  bounds: {_OPEN}     # of every feature"]
    elif drafted.numeric:
        lines += ["  bounds:"]
        lines += [f"    {_yaml(name)}: {_OPEN}" for name in drafted.numeric]
    if drafted.gaps:
        lines += ["  missing:     # the middle of the bounds, and a column that says so, unless you give a value"]
        lines += [f"    {_yaml(name)}: {{indicator: true}}     # {READ}" for name in drafted.gaps]
    if drafted.dropped:
        lines += ["  drop:"]
        lines += [f"    - {_yaml(name)}     # {why}" for name, why in drafted.dropped.items()]
    return lines


def _yaml(value: Any) -> str:
    """Return one line of YAML that a recipe reads as `value`."""
    text = yaml.dump(value, Dumper=CoreDumper, default_flow_style=True, width=10**9, allow_unicode=True)
    text = text.removesuffix("...\n").strip()
    return text if "\n" not in text else json.dumps(value)
