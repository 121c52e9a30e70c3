"""Draft of a recipe for a user's own file: how it is written, a use for each column, and gaps for a person to fill.

The draft holds facts that were read from the file: how it is written, column names, categories, classes, and which
columns have missing values. If you train with it, you publish them with the result and declare them public; each such
line says so. Bounds are never read, because the least and the largest value are those of single records. You fill them
in, and `recipe/check.py` refuses a recipe that lacks them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml

from dpsgd_cli.accounting.budget import usual_delta
from dpsgd_cli.common.sections import TO_FILL_IN
from dpsgd_cli.common.text_format import quoted, suggested
from dpsgd_cli.common.yaml_tree import CoreDumper
from dpsgd_cli.data import detection, named_arrays, opening, own_arrays, table_files
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.condensed import Condensed, condensed
from dpsgd_cli.data.detection import BUCKETS, WORD_BUCKETS, Use
from dpsgd_cli.data.labels import read_labels
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table import to_numbers
from dpsgd_cli.data.table_files import PLAIN, known_columns
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

Task = Literal["classification", "regression"]
MOST_CLASSES = 20
MOST_ROWS_OF_A_USER = 10
ROWS_AT_ONCE = 200_000
MOST_CELLS = 1 << 25
"""Most cells of a table whose rows are held in memory, unless the recipe says so."""
READ = "read from the file: keep it only if it is public knowledge"
_OPEN = f"[{', '.join(TO_FILL_IN)}]"


@dataclass(frozen=True)
class Drafted:
    """The apparent content of a file.

    `uses` are those of its columns but the target (none for an array). `classes` is None if the targets are numbers;
    `target_gaps` says if some are missing. `units` is the number of records, or of users if a column names them.
    """

    records: int
    units: int
    uses: dict[str, Use]
    classes: list[Any] | None
    written: TableFormat = PLAIN
    how: Sequence[str] = ()
    is_array: bool = False
    bytes_only: bool = False
    integers: bool = False
    private: bool = False
    on_disk: bool = False

    def named(self, *roles: str) -> dict[str, Use]:
        """Return the columns of some roles."""
        return {name: use for name, use in self.uses.items() if use.role in roles}


@dataclass(frozen=True)
class Draft:
    """The text of a recipe, and lines that say how the file was read and what each column is used for."""

    recipe: str
    told: list[str] = field(default_factory=list)


def draft(
    path: Path,
    target: str,
    task: Task | None,
    shown: str,
    text: Sequence[str] = (),
    private: Sequence[str] | None = None,
) -> Draft:
    """Return a recipe for the file at `path`, which the recipe calls `shown`; the columns `text` hold no numbers.

    With `private`, the names of the categorical columns, bounds and categories are private: the recipe depends on the
    names of the columns, the number of records and the target, and on no value of any other column.

    Raises DataError with every reason why the file cannot be trained on. No message holds the content of a cell.
    """
    kind = opening.kind_of(path)
    if kind == opening.ARRAYS:
        return Draft(_text(_of_arrays(path, target, task), target, shown))
    if kind not in table_files.KINDS:
        raise DataError(
            f"{path}: a recipe is drafted for {', '.join((*table_files.KINDS, opening.ARRAYS))}, not {kind}"
        )
    if private is not None:
        drafted = _of_private_table(path, kind, target, task, (*private, *text))
    else:
        drafted = _of_table(path, kind, target, task, text)
    return Draft(_text(drafted, target, shown), _told(drafted, path, target))


def _of_private_table(path: Path, kind: str, target: str, task: Task | None, categorical: Sequence[str]) -> Drafted:
    """Return a draft by names: how the file is written and the kinds of columns are not detected from their cells."""
    names = list(next(iter(_parts(path, kind, None, {target, *categorical}))).columns)
    wrong = [
        f"{path}: --{option} names {quoted(name)}, which is no column{known_columns(name, names)}"
        for option, told in (("target", [target]), ("categorical", categorical))
        for name in told
        if name not in names or (option == "categorical" and name == target)
    ]
    if wrong:
        raise DataError("\n".join(wrong))
    columns, records = condensed(
        (part[[target]] for part in _parts(path, kind, None, {target}, {target})), PLAIN, target, lambda _: False
    )
    uses = {
        name: Use("category", "category", "nothing") if name in categorical else Use("number", "number", "nothing")
        for name in names
        if name != target
    }
    return Drafted(records, records, uses, _classes(columns[target], task, path), private=True)


def _parts(
    path: Path, kind: str, written: TableFormat | None, text: set[str], only: set[str] | None = None
) -> Iterator[pd.DataFrame]:
    return table_files.table_parts(path, kind, written, text, ROWS_AT_ONCE, only)


def _of_table(path: Path, kind: str, target: str, task: Task | None, told_text: Sequence[str]) -> Drafted:
    written, head = _head(path, kind, target, told_text)
    columns, rows, written = _columns(path, kind, written, head, target)
    uses, problems = dict[str, Use](), []
    for name, column in columns.items():
        if name == target:
            continue
        try:
            typed = _typed(column.kept, head[name])
            uses[name] = detection.use_of(typed, column, written, name in told_text)
            if uses[name].role == "number":
                to_numbers(typed, 0.0, written)
        except DataError as error:
            problems.append(f"{path.name}: {error}")
    uses = _with_one_unit(uses)
    if not problems and not {use.role for use in uses.values()} & {"number", "category", "hash", "text", "date"}:
        reasons = ", ".join(f"{quoted(name)} ({use.kind})" for name, use in uses.items())
        problems.append(f"{path.name} has no column to learn from; its others are {reasons}")
    classes = None
    try:
        classes = _classes(columns[target], task, path, written)
    except DataError as error:
        problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    unit = next((name for name, use in uses.items() if use.role == "unit"), None)
    units = rows if unit is None else columns[unit].different
    on_disk = rows * len(columns) > MOST_CELLS and kind.startswith(table_files.IN_PARTS) and unit is None
    return Drafted(rows, units, uses, classes, written, detection.said(written, kind), on_disk=on_disk)


def _head(path: Path, kind: str, target: str, told_text: Sequence[str]) -> tuple[TableFormat, pd.DataFrame]:
    """Return how a table is written, as its first part shows, and that part. Raises DataError for a wrong name."""
    written = detection.format_of(path, kind, target)
    head = next(iter(_parts(path, kind, written, {target})))
    for option, names in (("--target", [target]), ("--text", told_text)):
        for name in names:
            if name not in head.columns:
                near = known_columns(name, head.columns)
                raise DataError(f"{path}: {option} names {quoted(name)}, which is no column{near}")
    found = detection.with_numbers(head, written)
    return found, head if found == written else next(iter(_parts(path, kind, found, {target})))


def _columns(
    path: Path, kind: str, written: TableFormat, head: pd.DataFrame, target: str
) -> tuple[dict[str, Condensed], int, TableFormat]:
    """Return the columns of a table, its number of rows, and how it is written.

    Of text files, cells are read as text, as training reads categories, but those of columns with fractions alone. If
    such a column turns out to hold text further down, the table is read again.
    """
    import pandas as pd

    textual = kind.startswith((".csv", ".tsv"))
    text = {target, *(name for name in head.columns if textual and head[name].dtype != np.float64)}
    while True:
        columns, rows = condensed(_parts(path, kind, written, text), written, target, detection.names_something)
        torn = {n: own.kept for n, own in columns.items() if textual and n not in text and own.kept.dtype != np.float64}
        if not torn:
            return columns, rows, written
        text |= set(torn)
        found = detection.with_numbers(pd.DataFrame(torn), written)
        if (found.decimal, found.thousands) == (written.decimal, written.thousands):
            written = found


def _typed(kept: pd.Series, head: pd.Series) -> pd.Series:
    """Return the kept cells of a column as the reader types them: numbers, if all of them are."""
    import pandas as pd

    if len(kept) == len(head):
        return head
    if not pd.api.types.is_numeric_dtype(head) or pd.api.types.is_numeric_dtype(kept):
        return kept
    try:
        return pd.to_numeric(kept.where(~kept.isin(table_files.MISSING)))
    except (ValueError, TypeError):
        return kept


def _with_one_unit(uses: dict[str, Use]) -> dict[str, Use]:
    """Return the uses with one column as the unit of privacy at most: the first that names persons, else the first."""
    units = [name for name, use in uses.items() if use.role == "unit"]
    chosen = next((name for name in units if detection.is_of_a_person(name)), units[0] if units else None)
    confirm = "that it names no person; if it does, privacy.unit should name it"
    others = {name: Use("identifier, repeated", "hash", confirm) for name in units if name != chosen}
    return uses | others


def _of_arrays(path: Path, target: str, task: Task | None) -> Drafted:
    import pandas as pd

    stored = own_arrays.load(path)
    wrong = [f"{path} has no array {name!r}{suggested(name, stored)}" for name in ("x", target) if name not in stored]
    if wrong:
        raise DataError("\n".join(wrong))
    x, y = stored["x"], stored[target]
    own_arrays.check_shapes(x, y, x, f"{path}: x", f"{path}: the labels")
    own_arrays.refuse_not_finite(x, f"{path}: x")
    held = pd.Series(y, name=target)
    classes = _classes(Condensed(held, False, len(y), held.nunique()), task, path)
    made = Drafted(len(x), len(x), {}, classes, is_array=True, bytes_only=x.dtype == np.uint8)
    return replace(made, integers=named_arrays.whole(x))


def _classes(column: Condensed, task: Task | None, path: Path, written: TableFormat = PLAIN) -> list[Any] | None:
    """Return the classes, spelled as in the file; None if the targets are numbers.

    Without `task`, targets are numbers if they have over `MOST_CLASSES` values or any fraction.
    """
    series = column.kept
    try:
        numbers = to_numbers(series, 0.0, written, is_target=True)
        many = len(np.unique(numbers)) > MOST_CLASSES or not np.all(numbers == np.floor(numbers))
    except DataError:
        many = False
    asked: Task = task or ("regression" if many else "classification")
    settings = Data(path=path.name, target=str(series.name), task=asked, format=written)
    classes = read_labels(settings, [series], [path], None)[1]
    return None if classes is None else list(classes)


def _text(drafted: Drafted, target: str, shown: str) -> str:
    """Return the recipe, with a comment beside everything that a person has to judge."""
    stem = Path(shown).name.partition(".")[0]
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem).strip("-") or "mine"
    lines = [
        f"# How well can {target} be learnt from {Path(shown).name} in private?   dpsgd train FILE, once filled in",
        *_about(drafted),
        f"name: {name[:80]}",
        "data:",
        f"  path: {_yaml(shown)}",
        *_format_lines(drafted),
        *["  on_disk: true     # a large table: it is read in parts, and its rows stay on disk"] * drafted.on_disk,
        f"  target: {_yaml(target)}",
        *_target_lines(drafted),
        *_column_lines(drafted),
    ]
    steps = [] if drafted.is_array else ["  preprocess: [{bin: {}}]     # cosines over the bounds: looks at no record"]
    whole = [name for name, use in drafted.named("number").items() if use.whole]
    if whole:
        steps = [f"  preprocess: [{{bin: {{integers: {_yaml(whole)}}}}}]     # whole numbers: {READ}"]
    unit = [
        f"  unit: {{column: {_yaml(name)}, most_rows: {MOST_ROWS_OF_A_USER}}}     # all rows of one together"
        for name in drafted.named("unit")
    ]
    measured = [
        "  split: {test: 0.2}",
        "  evaluation: private     # a noisy measurement of the held-out fifth, which costs nothing more",
    ]
    of = "records" if not unit else "users"
    delta = f"{usual_delta(drafted.units):g}".replace("e-0", "e-")
    return "\n".join(
        [
            *lines,
            *measured,
            *steps,
            "model: {kind: linear}",
            "method: {kind: dp-sgd, batching: full}     # its settings by rule: --dry-run shows them",
            "privacy:",
            *unit,
            f"  budget: {{epsilon: 1, delta: {delta}}}     # at most 1e-5, and a tenth of 1 / {drafted.units} {of}",
            "",
        ]
    )


def _format_lines(drafted: Drafted) -> list[str]:
    """Return the line that says how the file is written, with all that training would otherwise take by default."""
    told = drafted.written.model_dump(mode="json", exclude_defaults=True)
    told = {key: value for key, value in told.items() if value not in (None, [])}
    if drafted.written != PLAIN:
        return [f"  format: {_yaml(told)}     # how the file is written: training reads it so, and not otherwise"]
    return []


def _about(drafted: Drafted) -> list[str]:
    """Return the comment on where the recipe's facts are from."""
    if drafted.private:
        of_target = [f"# Fill in {_OPEN} of the target from public knowledge."] * (drafted.classes is None)
        return [
            "# Of the columns beside the target only names were used; which hold categories is what you said. Their",
            "# bounds and categories are released with noise for a share of the budget (data.discovery); public bounds",
            "# in place of `private` cost nothing. Columns that are no features (row numbers) belong under data.drop.",
            *of_target,
        ]
    return [
        f"# Fill in each {_OPEN} from public knowledge: never from this file, whose least and largest values are those",
        "# of single records. What was read from the file says so: it is published with the result and protected by",
        "# nothing, so leave out what nobody could know without the file.",
    ]


def _target_lines(drafted: Drafted) -> list[str]:
    if drafted.classes is None:
        return [
            "  task: regression",
            f"  target_bounds: {_OPEN}     # what the target can be, in its own unit",
            "  target_transform: auto     # log if these bounds span orders of magnitude, as prices do; else null",
        ]
    return ["  task: classification", f"  classes: {_yaml(drafted.classes)}     # {READ}"]


def _column_lines(drafted: Drafted) -> list[str]:
    """Return the recipe's lines about the features."""
    lines = []
    if drafted.named("category"):
        lines += ["  categorical:     # an empty cell is a category of its own"]
        lines += [
            f"    {_yaml(n)}: private" if drafted.private else f"    {_yaml(n)}: {_yaml(list(use.values))}     # {READ}"
            for n, use in drafted.named("category").items()
        ]
    if drafted.bytes_only:
        lines += ["  bounds: [0, 255]     # what a byte can be"]
    elif drafted.is_array and not drafted.integers:
        lines += [f"  bounds: {_OPEN}     # of every feature"]
    elif drafted.named("number"):
        lines += ["  bounds:"]
        lines += [f"    {_yaml(name)}: {'private' if drafted.private else _OPEN}" for name in drafted.named("number")]
    if drafted.named("date", "hash", "text"):
        lines += ["  columns:     # rules that look at no other record, and list no value"]
        lines += [f"    {_yaml(name)}: {_rule(use)}" for name, use in drafted.named("date", "hash", "text").items()]
    told = {name: use for name, use in drafted.named("number", "date").items() if use.gaps}
    if told:
        lines += ["  missing:     # the middle of the bounds, and a column that says so, unless you give a value"]
        lines += [f"    {_yaml(name)}: {{indicator: true}}     # {READ}" for name in told]
    if drafted.named("drop"):
        lines += ["  drop:"]
        lines += [f"    - {_yaml(name)}     # {use.kind}: {use.confirm}" for name, use in drafted.named("drop").items()]
    return lines


def _rule(use: Use) -> str:
    if use.role == "date":
        return f"{{date: {_yaml(use.form)}, bounds: {_OPEN}}}     # first and last day, as 2020-12-31"
    return f"{{hash: {BUCKETS}}}" if use.role == "hash" else f"{{text: {WORD_BUCKETS}}}"


_USES = {
    "number": "cosines over public bounds",
    "category": "one feature a value",
    "hash": f"a public hash into {BUCKETS} buckets",
    "text": f"hashed words and pairs of words, {WORD_BUCKETS} buckets",
    "date": "days, month, weekday (and hour)",
    "unit": "privacy.unit: protected with all rows",
    "drop": "left out",
}
"""How each role of a column is used, in the table that `recipe new` prints."""


def _told(drafted: Drafted, path: Path, target: str) -> list[str]:
    """Return the table of columns, below how the file is written."""
    kind = "numbers" if drafted.classes is None else f"{len(drafted.classes)} classes"
    confirm = "least and largest value" if drafted.classes is None else "its classes, read from the file"
    rows = [("column", "kind", "use", "to confirm"), (target, kind, "the target", confirm)]
    for name, use in drafted.uses.items():
        rows.append((name, use.kind + ", with gaps" * use.gaps, _USES[use.role], use.confirm))
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    aligned = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    if drafted.private:
        return []
    return [
        f"{path.name}: {drafted.records} rows; {', '.join(drafted.how)}",
        "The whole file was looked at, on this machine and outside of any guarantee. Training detects nothing.",
        "",
        *aligned,
    ]


def _yaml(value: Any) -> str:
    """Return one line of YAML that a recipe reads as `value`."""
    text = yaml.dump(value, Dumper=CoreDumper, default_flow_style=True, width=10**9, allow_unicode=True)
    text = text.removesuffix("...\n").strip()
    return text if "\n" not in text else json.dumps(value)
