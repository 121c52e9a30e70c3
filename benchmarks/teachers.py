"""How much faster 250 teachers of PATE train as one pack than one after the other, and what 1,000 take.

    python benchmarks/teachers.py [--teachers 250] [--apart 25]

60,000 records of 100 features in 10 classes, 20 epochs of full batches a teacher; a linear teacher, and a network of 64
hidden units. One after the other is the same program in packs of one, of which `--apart` are timed.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

from dpsgd_cli.methods.pate.run import Pate, Teaching
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member, start

MODELS = {"linear": {"kind": "linear"}, "mlp": {"kind": "mlp", "hidden": [64]}}


def teaching(folder: Path, teachers: int, model: str) -> Teaching:
    """The teachers of one trial, before any is trained."""
    rng = np.random.default_rng(0)
    path = folder / "rows.npz"
    if not path.exists():
        x = rng.normal(size=(62_000, 100)).astype(np.float32)
        y = (x @ rng.normal(size=(100, 10))).argmax(axis=1)
        np.savez(path, x=x[:60_000], y=y[:60_000], x_test=x[60_000:], y_test=y[60_000:])
    descent = {"epochs": 20, "learning_rate": 0.5}
    recipe = {
        "name": "teachers",
        "data": {
            "path": "rows.npz",
            "classes": list(range(10)),
            "preprocess": [],
            "public": {"from": "test", "records": 1000},
        },
        "model": MODELS[model],
        "method": {
            "kind": "pate",
            "teachers": {"count": teachers, **descent},
            "aggregation": {"kind": "gnmax"},
            "student": {"kind": "supervised", **descent},
        },
        "privacy": {"delta": 1e-5},
        "seed": 0,
    }
    (folder / "teachers.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(str(folder / "teachers.yaml"))
    settled = resolve_auto(loaded)
    method = start([Member(settled, loop.plan_recipe(settled)[0])]).method
    assert isinstance(method, Pate)
    return Teaching(method.context, method.settings, 0)


def main() -> None:
    """Print one line a model and number of teachers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", type=int, default=250)
    parser.add_argument("--apart", type=int, default=25, help="teachers that are timed one after the other")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            teachers = teaching(Path(folder), settings.teachers, model)
            teachers.of_piece(range(2))
            begun = time.perf_counter()
            together = teachers.of_piece(range(settings.teachers))
            pack = time.perf_counter() - begun
            begun = time.perf_counter()
            apart = np.concatenate([teachers.of_piece([i]) for i in range(settings.apart)])
            alone = (time.perf_counter() - begun) * settings.teachers / settings.apart
            same = (together[: settings.apart] == apart).mean()
            print(
                f"{model}: {settings.teachers} teachers {pack:.1f} s as one pack, {alone:.1f} s one after the other:"
                f" {alone / pack:.1f} times; {same:.2%} of predictions the same"
            )
        begun = time.perf_counter()
        teaching(Path(folder), 1000, "mlp").predictions()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"mlp: 1,000 teachers {time.perf_counter() - begun:.1f} s, in packs; peak of the process {peak:.1f} GiB")


if __name__ == "__main__":
    main()
