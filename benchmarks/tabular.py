"""Private models of Adult, Bank and IPUMS beside other tools', on equal folds and seeds, as a page with its table.

    DPSGD_DATA=... make tabular            (or: python -m benchmarks.tabular --help)

Ours are the recipes `tabular/`, all settings by rule; the same with a preconditioner of second moments at all budgets;
and with bins of columns, or columns scaled, instead of cosines. Peers: DP-EBM (interpret-core) at the learning rate
that is best for it, logistic regression by Opacus and by diffprivlib; one that cannot be imported is named and left
out. All get the same raw columns, public bounds and folds.

Writes `results/tabular/trials.csv`, a row a fold, as each tool ends (`--data`, `--epsilons`, `--tools` for a part), and
the page from that file alone (`--page-only` trains nothing).
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

DATA = ("adult", "bank", "ipums")
EPSILONS = (0.1, 1.0, 8.0)
DELTA = 1e-5
FOLDS = 5
AIMS = {
    "adult": ("85.5", "86.0", "86.2"),
    "bank": ("89.8", "90.4", "90.6"),
    "ipums": ("76.8", "77.6", "77.9"),
}
OURS: dict[str, tuple[str, ...]] = {
    "dpsgd, by rule": (),
    "dpsgd, by rule, second moments": ("method.preconditioner={kind: second-moment, share: 0.15}",),
    "dpsgd, by rule, bins": ("data.preprocess.0.bin.bins=[4, 16]",),
    "dpsgd, by rule, columns scaled": ("data.preprocess=[{scale: {}}, {one-hot: {}}]",),
}


@dataclass(frozen=True)
class Rows:
    """Records as every tool gets them: columns of numbers and of codes, with what is public of each."""

    x: np.ndarray
    y: np.ndarray
    columns: tuple[Any, ...]
    held: np.ndarray

    def expanded(self) -> tuple[np.ndarray, float]:
        """Columns scaled to [0, 1] by their bounds and one-hot codes, and the bound on a row's norm."""
        parts = []
        for index, column in enumerate(self.columns):
            values = self.x[:, index]
            if column.values is not None:
                parts.append(np.eye(len(column.values))[values.astype(int)])
            else:
                low, high = column.bounds
                parts.append(np.clip((values - low) / (high - low), 0, 1)[:, None])
        return np.hstack(parts).astype(np.float32), float(len(self.columns)) ** 0.5


def rows_of(data: str, repeats: int) -> Rows:
    """All records of a data set, and which of them each trial holds out: fold t % 5 of repeat t // 5."""
    from dpsgd_cli.data.opening import load_raw
    from dpsgd_cli.data.preparation import held_out_of
    from dpsgd_cli.data.settings import Data

    settings = Data(name=data)
    settings = settings.protecting(None, FOLDS)
    part, layout = held_out_of(settings, Path(), folds=True), load_raw(settings, Path()).layout
    assert layout.columns is not None
    return Rows(part.x, part.y, layout.columns, part.known_keys.folds(FOLDS, repeats, seed=0))


def dp_ebm(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """DP-EBM (Nori et al. 2021). Its default learning rate .01 is 3 to 5 points worse."""
    from interpret.privacy import DPExplainableBoostingClassifier

    bounds = {i: column.bounds for i, column in enumerate(rows.columns) if column.values is None}
    kinds = ["nominal" if column.values is not None else "continuous" for column in rows.columns]
    model = DPExplainableBoostingClassifier(
        feature_types=kinds,
        privacy_bounds=bounds,
        epsilon=epsilon,
        delta=DELTA,
        learning_rate=0.1,
        random_state=seed,
        n_jobs=1,
    )
    model.fit(rows.x[train], rows.y[train])
    return np.asarray(model.predict_proba(rows.x[test])[:, 1])


def opacus_logistic(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """DP-SGD by Opacus: 20 epochs of Poisson batches of 1,000, clip norm 1, learning rate 2."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(seed)
    x, y = torch.from_numpy(rows.expanded()[0]), torch.from_numpy(rows.y).float()
    model: Any = torch.nn.Linear(x.shape[1], 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=2.0)
    loader: Any = DataLoader(TensorDataset(x[train], y[train]), batch_size=1000)
    model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=20,
        max_grad_norm=1.0,
    )
    for _ in range(20):
        for inputs, labels in loader:
            if len(labels):
                optimizer.zero_grad()
                torch.nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels).backward()
                optimizer.step()
    with torch.no_grad():
        found: np.ndarray = model(x[test]).squeeze(1).sigmoid().numpy()
    return found


def diffprivlib_logistic(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """Objective perturbation by diffprivlib (pure epsilon), with its defaults and the public bound on a row's norm."""
    from diffprivlib.models import LogisticRegression

    x, norm = rows.expanded()
    model = LogisticRegression(epsilon=epsilon, data_norm=norm, random_state=seed)
    return np.asarray(model.fit(x[train], rows.y[train]).predict_proba(x[test])[:, 1])


DEALS = 10
SLOW = {"Opacus, logistic": 1}
"""How many deals are measured at most of what takes a minute a fold."""
Peer = Callable[[Rows, np.ndarray, np.ndarray, float, int], np.ndarray]
PEERS: dict[str, tuple[str, Peer]] = {
    "DP-EBM (interpret-core)": ("interpret.privacy", dp_ebm),
    "Opacus, logistic": ("opacus", opacus_logistic),
    "diffprivlib, logistic": ("diffprivlib.models", diffprivlib_logistic),
}


def installed() -> dict[str, Peer]:
    """The peers that can be imported; says which cannot."""
    found = {}
    for name, (module, peer) in PEERS.items():
        try:
            __import__(module)
        except ImportError as error:
            print(f"skipped: {name}: {error}", flush=True)
        else:
            found[name] = peer
    return found


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Peers warn of their own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def of_peer(name: str, peer: Peer, data: str, epsilon: float, repeats: int) -> list[dict[str, Any]]:
    """A row a fold."""
    from sklearn.metrics import accuracy_score, roc_auc_score

    rows, found = rows_of(data, repeats), []
    for trial in range(FOLDS * repeats):
        held, begun = rows.held[:, trial], time.perf_counter()
        with silence():
            shares = peer(rows, ~held, held, epsilon, trial)
        seconds, labels = time.perf_counter() - begun, rows.y[held]
        found.append(
            {
                "data": data,
                "tool": name,
                "epsilon": epsilon,
                "trial": trial,
                "accuracy": accuracy_score(labels, shares > 0.5),
                "auc": roc_auc_score(labels, shares),
                "seconds": seconds,
            }
        )
    return found


def of_ours(name: str, data: str, epsilon: float, repeats: int, out: Path, changes: tuple[str, ...]) -> Any:
    """A row a fold; all folds train as one pack, and share its seconds."""
    from dpsgd_cli.recipe.loading import load_recipe
    from dpsgd_cli.training import loop
    from dpsgd_cli.training.plans import resolve_auto

    folds = ("folds=5", "data.split=null", "data.evaluation=public", "runtime.evaluate_every=100")
    given = (f"privacy.budget={{epsilon: {epsilon}, delta: {DELTA}}}", f"repeats={repeats}", *folds, *changes)
    begun = time.perf_counter()
    result = loop.run(resolve_auto(load_recipe(f"tabular/{data}", given)), loop.Options(out))
    found = pd.read_csv(result / "trials.csv")
    return [
        {
            "data": data,
            "tool": name,
            "epsilon": epsilon,
            "trial": int(row["trial"]),
            "accuracy": row["test_accuracy"],
            "auc": row["test_auc"],
            "seconds": (time.perf_counter() - begun) / len(found),
        }
        for row in found.to_dict("records")
    ]


def measure(out: Path, asked: argparse.Namespace) -> None:
    """Every tool on every data set at every epsilon that is asked for, each in `trials.csv` as soon as it ends."""
    path, peers = out / "trials.csv", installed()
    for data in asked.data:
        for epsilon in asked.epsilons:
            for tool in asked.tools:
                deals = min(asked.repeats, SLOW.get(tool, asked.repeats))
                if tool in OURS:
                    part = of_ours(tool, data, epsilon, deals, out / "runs", OURS[tool])
                elif tool in peers:
                    part = of_peer(tool, peers[tool], data, epsilon, deals)
                else:
                    continue
                print(f"{data} {epsilon:g}: {tool}: {np.mean([row['accuracy'] for row in part]):.4f}", flush=True)
                _keep(path, pd.DataFrame(part))


def _keep(path: Path, own: pd.DataFrame) -> None:
    """Put rows in the place of those of the same data, tool and epsilon."""
    keys = ["data", "epsilon", "tool"]
    kept = pd.read_csv(path) if path.is_file() else own[:0]
    again = kept.set_index(keys).index.isin(own.set_index(keys).index)
    found = pd.concat([kept[~again], own]) if len(kept) else own
    order = {name: number for number, name in enumerate((*DATA, *OURS, *PEERS))}
    found = found.sort_values(keys, key=lambda column: column.replace(order), kind="stable")
    found.to_csv(path, index=False, float_format="%.6g")


def table(rows: pd.DataFrame, data: str) -> str:
    """A line a tool: accuracy with its 95% interval over folds, AUC and seconds a fold, at each epsilon."""
    from dpsgd_cli.results.result import summarise

    heads = [f"epsilon {epsilon:g}" for epsilon in EPSILONS]
    lines = ["| accuracy %, AUC | " + " | ".join(heads) + " | seconds a fold |", "| --- " * (len(heads) + 2) + "|"]
    own = rows[rows["data"] == data]
    for tool, of_tool in own.groupby("tool", sort=False):
        cells = []
        for epsilon in EPSILONS:
            here = of_tool[of_tool["epsilon"] == epsilon]
            if here.empty:
                cells.append("")
                continue
            told = summarise((here["accuracy"] * 100).tolist())
            cells.append(f"{told['mean']:.2f} ± {told['ci95'] or 0:.2f}, {here['auc'].mean():.3f}")
        shown, seconds = tool.replace("by rule", "automatic"), of_tool["seconds"].mean()
        lines.append(f"| {shown} | " + " | ".join(cells) + f" | {seconds:.1f} |")
    lines.append("| *aim* | " + " | ".join(AIMS[data]) + " | |")
    return "\n".join(lines)


def short(rows: pd.DataFrame) -> str:
    """Where the rule misses what was aimed at, and whether the aim is within the interval over folds."""
    from dpsgd_cli.results.result import summarise

    found = []
    for (data, epsilon), own in rows[rows["tool"] == next(iter(OURS))].groupby(["data", "epsilon"]):
        aim = float(AIMS[data][EPSILONS.index(epsilon)])
        told = summarise((own["accuracy"] * 100).tolist())
        if round(told["mean"], 2) < aim:
            inside = "within" if told["mean"] + (told["ci95"] or 0) >= aim else "outside"
            found.append(f"{data} at epsilon {epsilon:g}: {told['mean']:.2f} of {aim}, {inside} the interval")
    met = len(EPSILONS) * len(DATA) - len(found)
    return f"{met} of {len(EPSILONS) * len(DATA)} aims are met (missed: {'; '.join(found) or 'none'})."


def write(out: Path) -> None:
    """The page, from `trials.csv`."""
    rows = pd.read_csv(out / "trials.csv")
    page = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    for data in DATA:
        page = page.replace(f"<!-- {data} -->", table(rows, data))
    page = page.replace("<!-- short -->", short(rows))
    missing = [name for name in PEERS if name not in set(rows["tool"])]
    told = f"Could not be imported where this page was made, so left out: {', '.join(missing)}." if missing else ""
    (out / "README.md").write_text(page.replace("<!-- missing -->", told), encoding="utf-8")


def main() -> None:
    """Measure, then write the page."""
    parser = argparse.ArgumentParser(description="Tables beside other tools.")
    parser.add_argument("--out", type=Path, default=Path("results/tabular"), help="where the page and runs/ go")
    parser.add_argument("--repeats", type=int, default=DEALS, help="times that the records are dealt to five folds")
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--tools", nargs="+", choices=(*OURS, *PEERS), default=(*OURS, *PEERS))
    parser.add_argument("--page-only", action="store_true", help="train nothing")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if not asked.page_only:
        measure(asked.out, asked)
    write(asked.out)
    print(f"wrote {asked.out / 'README.md'}")


if __name__ == "__main__":
    main()
