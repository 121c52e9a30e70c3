"""Training the rows that a page lacks, a few trials at a time; every run that ends is in the CSV at once.

Not here: what is trained (the page's `CASES`), what is said of it (`drawing.py`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.pages.case import Case, is_same
from benchmarks.pages.rows import CURVES, KEYS, Rows, read
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member

DIGITS = 9
SAME = 1e-5
Chunk = tuple[Case, int, int]
"""A case, its first trial, and how many."""


def train(cases: Sequence[Case], metrics: Sequence[str], folder: Path, wanted: Sequence[Case]) -> None:
    """Train what `wanted` lack; `cases` give the order of rows. Runs go where a stopped one is continued from."""
    folder.mkdir(parents=True, exist_ok=True)
    for pack in packs(cases, wanted, folder):
        begun = time.monotonic()
        for chunk, directory in zip(pack, _run(pack, folder / "runs"), strict=True):
            _keep(cases, chunk, directory, metrics, folder)
            shutil.rmtree(directory)  # what later code would do is not what this run did: its rows say so, it does not
            case, first, trials = chunk
            print(f"{case.table}: {case.name}, trials {first} to {first + trials - 1}", flush=True)
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)


def confirm(cases: Sequence[Case], metrics: Sequence[str], folder: Path) -> None:
    """Train the first trial of each stale case, and where it gives the row that is there, say so of the whole case.

    For recipes that are written otherwise and mean the same.
    """
    rows = Rows.read(cases, folder)
    for key in rows.stale:
        case, old = rows.cases[key], rows.of(*key)
        assert old is not None
        [directory] = _run([(case, 0, 1)], folder / "runs")
        told = pd.read_csv(directory / "trials.csv")
        compared = ["seed", *(name for name in metrics if name in told)]  # not how long it took
        own, there = told[compared], old[old["seed"].isin(told["seed"])][compared]
        same = np.allclose(own.astype(float), there.astype(float), rtol=SAME, atol=0, equal_nan=True)
        if same:
            kept = read(folder / "trials.csv")
            mine = (kept["table"] == case.table) & (kept["case"] == case.name)
            kept.loc[mine, ["recipe", "behaviour"]] = [case.hash, case.behaviour]
            kept.to_csv(folder / "trials.csv", index=False, float_format=f"%.{DIGITS}g")
        print(f"{case.table}: {case.name}: {'the same' if same else 'another result; train it'}", flush=True)
        shutil.rmtree(directory)


def packs(cases: Sequence[Case], wanted: Sequence[Case], folder: Path) -> Iterable[list[Chunk]]:
    """What is missing: the first trials of all cases before the next of any."""
    rows = Rows.read(cases, folder)
    together: dict[tuple[int, str], list[Chunk]] = {}
    for number, case in enumerate(wanted):
        found = rows.of(case.table, case.name)
        fresh = found is not None and not rows.is_stale(case.table, case.name)
        have = set(found["seed"]) if found is not None and fresh else set()
        for first in range(0, case.trials, case.chunk):
            trials = min(case.chunk, case.trials - first)
            if not set(range(first * case.folds, (first + trials) * case.folds)) <= have:
                together.setdefault((first, case.pack or str(number)), []).append((case, first, trials))
    return [together[key] for key in sorted(together, key=lambda key: key[0])]


def _run(pack: Sequence[Chunk], runs: Path) -> list[Path]:
    """Train a pack, or find it trained."""
    loaded = [case.loaded(first, trials) for case, first, trials in pack]
    places = [loop.result_directory(resolve_auto(one), runs) for one in loaded]
    todo = [one for one, place in zip(loaded, places, strict=True) if not loop.is_finished(resolve_auto(one), place)]
    if todo:
        members = [Member(one, loop.plan_recipe(one)[0]) for one in map(resolve_auto, todo)]
        loop.run_pack(members, loop.Options(runs, resume=True))
    return places


def _keep(cases: Sequence[Case], chunk: Chunk, directory: Path, metrics: Sequence[str], folder: Path) -> None:
    """Put the rows of a run where they belong, in place of stale ones of its case."""
    case, first, _ = chunk
    document = store.read_document(directory)
    told = pd.read_csv(directory / "trials.csv")
    timing = {name.removeprefix("nonprivate_"): value for name, value in document["timing"].items()}
    told["seconds"] = timing["train_seconds"] / timing["pack_trials"]
    told["predicted_error_ratio"] = (document["privacy"] or {}).get("predicted_error_ratio")
    own = told.reindex(columns=["seed", "fold", *metrics])
    own["fold"] = own["fold"].fillna(0).astype(int)
    own["epsilon"] = (document["privacy"] or {}).get("epsilon")
    stamp = {"table": case.table, "case": case.name, "recipe": case.hash, "behaviour": case.behaviour}
    own = own.assign(**stamp)[[*KEYS, *metrics]]
    _write(folder / "trials.csv", own, cases, case, ["seed", "fold"])
    if first < case.curves:
        history = pd.read_csv(directory / "history.csv")
        seeds = dict(zip(range(len(own)), own["seed"], strict=True))
        history = history.assign(table=case.table, case=case.name, seed=history["trial"].map(seeds))
        history = history[history["seed"] < case.curves].reindex(columns=list(CURVES)).dropna(subset=["test_accuracy"])
        _write(folder / "curves.csv", history, cases, case, ["seed", "epoch"])


def _write(path: Path, own: pd.DataFrame, cases: Sequence[Case], case: Case, keys: list[str]) -> None:
    kept = read(path)
    mine = (kept["table"] == case.table) & (kept["case"] == case.name)
    if "recipe" in kept:
        same = (kept["recipe"] == case.hash) & kept["behaviour"].map(lambda one: is_same(one, case.behaviour))
        stale = mine & ~same
        kept, mine = kept[~stale], mine[~stale]
    again = mine & kept["seed"].isin(own["seed"])
    together = pd.concat([kept[~again], own]) if len(kept) else own
    order = {(one.table, one.name): number for number, one in enumerate(cases)}
    place = [order.get(key, len(order)) for key in zip(together["table"], together["case"], strict=True)]
    together = together.assign(place=place).sort_values(["place", *keys], kind="stable").drop(columns="place")
    together.to_csv(path, index=False, float_format=f"%.{DIGITS}g")
