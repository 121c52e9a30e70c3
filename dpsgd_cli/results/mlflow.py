"""A finished result as runs of MLflow: settings, public metrics, the price and the ledger; nothing non-private.

Each trial is a run of the experiment named after the recipe, in the store that MLflow itself is configured for
(MLFLOW_TRACKING_URI). Runs are logged after the result was written, so that a training which is stopped and resumed
shows nothing that its ledger lacks. MLflow notes when a run is logged, and not how long epochs took.

Not logged: fields and columns marked `nonprivate_`, hashes of private files, the model.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.results import pictures, store
from dpsgd_cli.results.result import NONPRIVATE, Row, public

_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in names; names of classes and targets may have them."""
_NO_METRICS = ("trial", "seed", "epoch")
_AT_ONCE = 100
"""Most parameters of one request."""
_LONGEST = 500
"""Characters of a parameter's value that every version of MLflow takes."""


def check_installed() -> None:
    """Raise UsageError if MLflow is not installed."""
    if importlib.util.find_spec("mlflow") is None:
        raise UsageError("runtime.track: mlflow needs MLflow: pip install 'dpsgd[mlflow]'")


def log(directory: Path, settings: Mapping[str, Any]) -> None:
    """Log the finished result in `directory` of a recipe with these resolved `settings`.

    Raises RunError if MLflow does not take it; the result stays.
    """
    mlflow = importlib.import_module("mlflow")
    document = public(store.read_whole(directory))
    privacy = document["privacy"]
    price = {key: privacy[key] for key in ("epsilon", "delta", "rho") if isinstance(privacy[key], float)}
    tags = {f"dpsgd.{key}": str(privacy[key]) for key in ("adjacency", "accountant", "bound", "noise_source")}
    tags |= {"dpsgd.version": document["provenance"]["version"], "dpsgd.result": directory.name}
    history = pictures.read_history(directory / "history.csv")
    try:
        mlflow.set_experiment(document["name"])
        for row in document["trials"]:
            with mlflow.start_run(run_name=f"{directory.name} trial {row['trial']}"):
                told = [(key, value[:_LONGEST]) for key, value in flat(settings).items()]
                for start in range(0, len(told), _AT_ONCE):
                    mlflow.log_params(dict(told[start : start + _AT_ONCE]))
                mlflow.set_tags(tags | {"dpsgd.trial": str(row["trial"])})
                mlflow.log_metrics(price | _numbers(row))
                for epoch in history:
                    if int(epoch["trial"]) == row["trial"]:
                        mlflow.log_metrics(_numbers(epoch), step=int(epoch["epoch"]))
                for name in ("ledger.jsonl", "recipe.yaml"):
                    mlflow.log_artifact(str(directory / name))
    except Exception as error:  # noqa: BLE001, of a library that raises many kinds
        raise RunError(f"{directory} is written, but MLflow did not take it: {type(error).__name__}: {error}") from None


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the public numbers of a row of a table, without its keys and empty cells."""
    found = {}
    for name, value in row.items():
        if name in _NO_METRICS or name.startswith(NONPRIVATE) or value in (None, ""):
            continue
        with contextlib.suppress(ValueError, TypeError):  # words, and lists
            found[_NOT_IN_NAMES.sub("_", name)] = float(value)
    return found


def flat(settings: Any, name: str = "") -> dict[str, str]:
    """Return nested settings as texts by dotted key.

    >>> flat({"model": {"kind": "mlp", "hidden": [8]}, "seed": None})
    {'model.kind': 'mlp', 'model.hidden': '[8]', 'seed': 'null'}
    """
    if not isinstance(settings, Mapping):
        return {name: settings if isinstance(settings, str) else json.dumps(settings)}
    found: Row = {}
    for key, value in settings.items():
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found
