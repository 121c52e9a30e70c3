"""How long, and in how much memory, is a table of 20 columns drafted and trained on, in memory and in parts?

    python benchmarks/tables.py [ROWS ...]

Ten columns of fractions, four of whole numbers, four of categories, one of dates, and a label; as CSV, plain or packed,
and as parquet. In parts means `data.on_disk: true`, as `recipe new` writes it for ten million rows.
Each measurement is a process of its own: processor seconds and the most memory, that of Python and pandas included.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

COLOURS = ("red", "green", "blue", "yellow", "black")
WRITE = """
from pathlib import Path
from benchmarks.tables import write
write(Path("table.csv"), {rows})
"""
IN_MEMORY = 3_000_000
"""Most rows that are trained on in memory, too."""


def write(path: Path, rows: int) -> None:
    """Write a table of synthetic records as CSV, plain and packed, and as parquet."""
    import pandas as pd
    import pyarrow
    import pyarrow.parquet

    parquet = None
    random = np.random.default_rng(0)
    for start in range(0, rows, 500_000):
        count = min(500_000, rows - start)
        columns: dict[str, object] = {f"n{i}": random.normal(size=count).round(4) for i in range(10)}
        columns |= {f"k{i}": random.integers(0, 1000, count) for i in range(4)}
        columns |= {f"c{i}": random.choice(COLOURS, count) for i in range(4)}
        columns["day"] = (np.datetime64("2015-01-01") + random.integers(0, 3650, count)).astype(str)
        columns["y"] = np.where(random.random(count) < 0.5, "yes", "no")
        part = pd.DataFrame(columns)
        part.to_csv(path, index=False, mode="a", header=start == 0)
        arrow = pyarrow.Table.from_pandas(part, preserve_index=False)
        parquet = parquet or pyarrow.parquet.ParquetWriter(path.with_suffix(".parquet"), arrow.schema)
        parquet.write_table(arrow)
    assert parquet is not None
    parquet.close()
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed)


def measured(folder: Path, *command: str) -> str:
    """Run a command in `folder`; return its processor seconds and memory as cells of a table."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, command
    return f"{used.ru_utime + used.ru_stime:.1f} | {used.ru_maxrss / 1024:.0f}"


def main(sizes: list[int]) -> None:
    print("| rows | file | step | processor, s | memory, MiB |\n| ---: | --- | --- | ---: | ---: |")
    for rows in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # in a process of its own: memory of this one would count as that of those it starts
            measured(folder, "-c", WRITE.format(rows=rows))
            for kind in ("csv", "csv.gz", "parquet"):
                for step, used in steps(folder, f"table.{kind}", rows):
                    print(f"| {rows} | {kind} | {step} | {used} |", flush=True)


def steps(folder: Path, table: str, rows: int) -> Iterator[tuple[str, str]]:
    """What is measured of one file, each with its cells."""
    recipe = folder / f"{table}.yaml"
    yield "recipe new", measured(folder, "-m", "dpsgd_cli", "recipe", "new", table, "--target", "y", "-o", recipe.name)
    text = recipe.read_text().replace("'%Y-%m-%d', bounds: [LOW, HIGH]", "'%Y-%m-%d', bounds: [2015-01-01, 2025-12-31]")
    recipe.write_text(text.replace("[LOW, HIGH]\n", "[-1000, 1000]\n"))
    ways = {"train": "false"} if rows <= IN_MEMORY else {}
    for told, on_disk in (ways | {"train in parts": "true"}).items():
        yield told, measured(folder, "-m", "dpsgd_cli", "train", recipe.name, f"data.on_disk={on_disk}")


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]] or [1_000_000, 10_000_000])
