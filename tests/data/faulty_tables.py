"""A sound table, and files of it of every kind, into which tests put faults."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

ROWS = 24
SECRETS = ("Quetzal77", "7177", "17.07.2071")
"""What faulty cells hold, or all files, and no message may."""
DATA: dict[str, Any] = {
    "target": "y",
    "classes": ["u", "v"],
    "bounds": {"n": [0, 100]},
    "categorical": {"c": ["a", "b"]},
    "columns": {"d": {"date": "%Y-%m-%d", "bounds": ["2020-01-01", "2021-12-31"]}, "t": {"hash": 4}},
    "preprocess": [{"bin": {"waves": 4}}],
}
KINDS = ("t.csv", "t.csv.gz", "t.csv.zst", "t.tsv", "semicolons.csv", "t.jsonl", "t.parquet", "t.xlsx")
TEXT = KINDS[:5]
PACKED = ("t.csv.gz", "t.csv.zst")
SEMICOLONS = {"format": {"separator": ";", "decimal": ","}}


def sound() -> pd.DataFrame:
    random, number = np.random.default_rng(0), np.arange(ROWS)
    frame = pd.DataFrame({"n": random.integers(0, 900, ROWS) / 10, "c": np.where(number % 3 == 0, "a", "b")})
    frame["d"] = (np.datetime64("2020-01-01") + random.integers(0, 700, ROWS)).astype(str)
    frame["t"] = [f"Quetzal77 {one} went home" for one in number]
    frame["y"] = np.where(number % 2 == 0, "u", "v")
    return frame.astype(str).astype(object)


def typed(cells: pd.Series, alone: bool = False) -> list[Any]:
    """Return cells as a file with types holds them: numbers of one column are numbers, all of them if not `alone`."""
    found = [None if cell == "" else float(cell) if _NUMBER.fullmatch(str(cell)) else cell for cell in cells]
    if not alone or all(cell is None or isinstance(cell, float) for cell in found):
        return found
    return [None if cell is None else str(cell) for cell in cells]


_NUMBER = re.compile(r"\d+(\.\d+)?|-?inf")


def bytes_of(name: str, frame: pd.DataFrame, folder: Path) -> bytes:
    """Return the content of a file of the table, before it is packed."""
    if name == "t.parquet":
        pd.DataFrame({one: typed(frame[one], alone=True) for one in frame}).to_parquet(folder / "made")
    elif name == "t.xlsx":
        pd.DataFrame({one: typed(frame[one]) for one in frame}).to_excel(folder / "made.xlsx", index=False)
        (folder / "made.xlsx").rename(folder / "made")
    elif name == "t.jsonl":
        rows = zip(*(typed(frame[one]) for one in frame), strict=True)
        lines = [json.dumps(dict(zip(frame.columns, row, strict=True)), default=str) for row in rows]
        (folder / "made").write_text("".join(f"{line}\n" for line in lines))
    else:
        separator = {"t.tsv": "\t", "semicolons.csv": ";"}.get(name, ",")
        if separator == ";" and "n" in frame:
            frame = frame.assign(n=[str(cell).translate(str.maketrans(",.", ".,")) for cell in frame.n])
        (folder / "made").write_text(frame.to_csv(sep=separator, index=False))
    return (folder / "made").read_bytes()


def packed(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content, 1)
    return pa.compress(content, "zstd", asbytes=True) if name.endswith(".zst") else content
