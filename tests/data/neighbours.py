"""Random neighbouring tables: one record more, less or another leaves what all others become, to the bit.

    python -m tests.data.neighbours 3000        # so many pairs, from a seed that is printed

Each pair draws a recipe, a format, and cells that the recipe takes: marks, groups, symbols, big integers, fractions,
blanks, -0, forms of Unicode, dates, truth values, JSON types. Both tables are written as CSV (read whole, or in parts),
JSON lines, Parquet, Excel or a frame, and read as training reads them.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import sys
import tempfile
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet

from dpsgd_cli.data import memory, opening, table_files
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.splits import coin, content_keys
from dpsgd_cli.errors import DataError
from dpsgd_cli.users.settings import Unit

KINDS = (
    "t.csv",
    "t.csv in parts",
    "t.csv with comments",
    "t.jsonl",
    "t.parquet",
    "t.parquet in parts",
    "t.xlsx",
    "frame",
)
GAPS: list[Any] = ["", " ", "\u00a0", "NA", "null", None, "None", "?"]
PLAIN: list[Any] = [
    "0",
    "0.00",
    "-0",
    "-1.00",
    "009",
    "9",
    "-1",
    "1e3",
    "2.5",
    "+4",
    " 7",
    "12-",
    "(12.00)",
    "1.",
    ".5",
]
PLAIN += ["True", "false", "9007199254740993", 0, -1, 9, 9.0, 2.5, -0.0, 2**53 + 1, True, False]
WORDS: list[Any] = ["a", "b ", "Zürich", unicodedata.normalize("NFD", "Zürich"), "1", "01", "1.0", "12.0", "-0", "007",
                    "True", "TRUE", 1, 12.0, 0.0, -0.0, 2**60 + 1, 2**60 + 3, 1.5, True, False, "a,b", 'say "hi"',
                    "two\nlines", "#5", "", " ", "NA", None]  # fmt: skip
CLASSES: list[tuple[list[Any], list[Any]]] = [
    (["1", "01"], ["1", "01"]),
    (["no", "yes"], ["no", "yes", "No", "TRUE", "0", 1, False]),
    ([0, 1], ["0", "1", "1.0", 0, 1, 1.0, "00"]),
    (["NA", "EU"], ["NA", "EU"]),
    (["Köln", "b"], ["Köln", unicodedata.normalize("NFD", "Köln"), "b"]),
]
TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "whole": (pa.int64(), [0, -1, 9, 2**53 + 1, 2**60 + 3, None]),
    "small": (pa.uint8(), [0, 9, 255, None]),
    "real": (pa.float64(), [0.0, -0.0, 9.0, 1.5, -1.0, None, float("nan")]),
    "short": (pa.float32(), [0.0, -0.0, 9.0, 1.5, np.float32(0.1).item(), None]),
    "truth": (pa.bool_(), [True, False, None]),
    "text": (pa.string(), [one for one in WORDS if isinstance(one, str)] + [None]),
    "codes": (pa.dictionary(pa.int8(), pa.string()), ["1", "01", "a", None]),
}


def told(draw: random.Random) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return a recipe's data section, and the cells that each of its columns takes."""
    decimal, thousands = draw.choice([(".", None), (".", ","), (",", "."), (".", "'"), (",", None)])
    marks = draw.sample(["0", "-1", "9", "0.00", "-999", "1,234.50", "x", "1.5"], draw.randrange(4))
    written: dict[str, Any] = {
        "decimal": decimal,
        "thousands": thousands,
        "symbols": ["$"] * draw.randrange(2),
        "missing": marks,
    }
    written |= {"below": draw.choice([None, "limit", "half"]), "parts": draw.random() < 0.5}
    mark = thousands or ""
    numbers = [one.replace(".", decimal) if isinstance(one, str) else one for one in PLAIN]
    numbers = [one for one in numbers if not isinstance(one, float) or decimal == "."]  # as a text file would have it
    numbers += [f"1{mark}234{decimal}50", f"12{mark}345", *marks, *GAPS, *["$5", "-$ 7"] * bool(written["symbols"])]
    numbers += ["<5", "\u2264 7"] * bool(written["below"]) + ["7:15", "2h 30m", "5'6"] * bool(written["parts"])
    classes, labels = draw.choice(CLASSES)
    cells: dict[str, list[Any]] = {
        "n": numbers,
        "m": numbers,
        "c": ["a", "b", "1", "01", *GAPS, 1, "1.0"],
        "p": WORDS,
        "h": WORDS,
        "t": ["good film", "bad", "Zürich", unicodedata.normalize("NFD", "Zürich"), "", None, 12, True],
        "d": ["2020-01-31", "2021-12-01", "NA", "", None],
        "y": [one for one in labels if str(one) not in marks or one in classes],
    }
    section = {
        "target": "y",
        "classes": classes,
        "format": {key: value for key, value in written.items() if value},
        "bounds": {"n": [-9, 9], "m": "private"},
        "categorical": {"c": ["a", "b", "1", "01"], "p": "private"},
        "columns": {
            "h": {"hash": 97},
            "t": {"text": 16},
            "d": {"date": "%Y-%m-%d", "bounds": ["2020-01-01", "2021-12-31"]},
        },
        "missing": {"n": {"value": 3, "indicator": True}, "d": {"indicator": True}},
    }
    return section, cells


def pair(draw: random.Random, folder: Path) -> tuple[Data, list[Path], int, int | None]:
    """Write two neighbouring tables. Return the section, files, the place of the record and of what replaces it."""
    kind = draw.choice(KINDS)
    section, cells = told(draw)
    while kind == "t.jsonl" and "decimal" in section["format"] and section["format"]["decimal"] != ".":
        section, cells = told(draw)  # numbers of JSON are written in one way
    on_disk = "parts" in kind
    if on_disk:
        del section["bounds"]["m"], section["categorical"]["p"], cells["m"], cells["p"]
    if "comments" in kind:
        section["format"]["comment"] = "#"
        cells |= {name: [one for one in own if "#" not in str(one)] for name, own in cells.items()}
    types: dict[str, str] = {}
    if kind[:9] in ("t.parquet", "frame") and draw.random() < 0.9:
        for name in ("n", "m", "h", "p"):
            if name in cells:
                fit = {"n": ("whole", "small", "real", "short", "truth"), "m": ("whole", "real", "truth")}.get(
                    name, tuple(TYPES)
                )
                types[name] = draw.choice(fit)
                cells[name] = TYPES[types[name]][1]
    owner = None if on_disk or draw.random() < 0.6 else Unit(column="who", most_rows=3)
    if owner is not None:
        cells["who"] = ["1", "1.5", "01", "al", 1, 1.5, 2**60 + 1, "Zürich"]
    count = draw.randrange(6, 14)
    rows = [{name: draw.choice(own) for name, own in cells.items()} for _ in range(count)]
    for name, own in cells.items():
        rows[0 if name != "y" else 1][name] = draw.choice(own)
    gone = draw.randrange(count)
    other = [row for at, row in enumerate(rows) if at != gone]
    replaced = None
    if draw.random() < 0.4:
        replaced = draw.randrange(count)
        other.insert(replaced, {name: draw.choice(own) for name, own in cells.items()})
    paths = []
    FRAMES.clear()
    for name, held in (("with", rows), ("without", other)):
        path = folder / f"{name}.{kind.split()[0].partition('.')[2] or 'parquet'}"
        write(path, kind, held, types, draw)
        paths.append(path)
    if on_disk:
        section["on_disk"] = True
    data = Data.model_validate(section | {"path": "x.csv"})
    return data.protecting(owner) if owner is not None else data, paths, gone, replaced


def write(path: Path, kind: str, rows: list[dict[str, Any]], types: dict[str, str], draw: random.Random) -> None:
    names = list(rows[0])
    if kind.startswith("t.csv"):
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(
            [names, *([("" if row[name] is None else str(row[name])) for name in names] for row in rows)]
        )
        path.write_text(stream.getvalue())
    elif kind == "t.jsonl":
        lines = [{name: cell for name, cell in row.items() if cell is not None or draw.random() < 0.5} for row in rows]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif kind == "t.xlsx":
        pd.DataFrame(rows, dtype=object).to_excel(path, index=False)
    else:
        objects = kind == "frame" and "real" not in types.values() and "short" not in types.values()
        made = {name: column(name, rows, types, objects) for name in names}
        if kind == "frame":
            FRAMES[path] = pd.DataFrame(
                {name: one if isinstance(one, pd.Series) else one.to_pandas() for name, one in made.items()}
            )
        else:
            pyarrow.parquet.write_table(pa.table(made), path, row_group_size=4)


FRAMES: dict[Path, pd.DataFrame] = {}


def column(name: str, rows: list[dict[str, Any]], types: dict[str, str], as_objects: bool) -> Any:
    cells = [row[name] for row in rows]
    if as_objects:
        return pd.Series(cells, dtype=object)
    if name not in types:
        return pa.array([None if c is None else str(c) for c in cells])
    typed = pa.array(cells, TYPES[types[name]][0])
    # the dtype of a frame is one of its facts, so both have the same
    return typed if types[name] != "whole" else typed.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)


def read(data: Data, path: Path) -> Any:
    opening._kept.clear()
    named = data.model_copy(update={"path": path.name})
    if path in FRAMES:
        table = memory.table_of(FRAMES[path])
        assert table is not None
        with memory.holding(path, table):
            return opening.load_raw(named, path.parent)
    return opening.load_raw(named, path.parent)


def differs(seed: int, folder: Path) -> str | None:
    """Return what one record changes of others in the pair of a seed, "refused", or None if it changes nothing."""
    data, paths, gone, replaced = pair(random.Random(seed), folder)
    try:
        with mock.patch.object(table_files, "ROWS_AT_ONCE", 5):
            first, second = (read(data, path) for path in paths)
    except DataError as error:
        if re.search("hold none of its|are one user's|leaves one of", str(error)):
            return "refused"
        raise
    if first.layout != second.layout:
        return "the columns"
    x, y, others = [], [], []
    for found in (first, second):
        part = found.train
        x.append(np.asarray(part.x[0 : len(part)]))
        y.append(np.asarray(part.y[0 : len(part)]))
        held = coin(content_keys(x[-1], y[-1]).values, 0, "test") < np.uint64(1 << 63)
        others.append(Counter(zip((row.tobytes() for row in x[-1]), y[-1].tolist(), held.tolist(), strict=True)))
    if data.unit is None:
        keep = [np.delete(np.arange(len(y[0])), gone), np.arange(len(y[1]))]
        keep[1] = keep[1] if replaced is None else np.delete(keep[1], replaced)
        for name, values in (("features", x), ("labels", y)):
            if values[0][keep[0]].tobytes() != values[1][keep[1]].tobytes():
                return name
    else:
        owned = [Counter(zip(found.train.owners.tolist(), map(bytes, rows), strict=True))
                for found, rows in zip((first, second), x, strict=True)]  # fmt: skip
        if (owned[0] - owned[1]).total() > 1 or (owned[1] - owned[0]).total() > (replaced is not None):
            return "the names of users"
    if (others[0] - others[1]).total() > 1 or (others[1] - others[0]).total() > (replaced is not None):
        return "the parts"
    return None


def main(pairs: int) -> int:
    first = random.SystemRandom().randrange(1 << 40)
    print(f"{pairs} pairs of neighbouring tables from seed {first}")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + pairs):
            if (what := differs(seed, Path(folder))) not in (None, "refused"):
                print(f"seed {seed}: one record changes {what} of others")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 3000))
