"""Folds of unequal sizes: each trial trains on its own records, each as if all its places were filled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.methods.base import create
from tests.methods.small_problem import Silent, context, points, recipe, run, signed

RECORDS, FOLDS = 61, 4
CLIP = {"clipping": {"kind": "flat", "norm": 0.4}, "budget": {"epsilon": 3.0, "delta": 1e-5}}


def made(method: dict[str, Any], **changes: Any) -> Any:
    kind = {"kind": "convex", "l2": 0.0}
    return recipe(method, model=kind, privacy={**CLIP, **changes.pop("privacy", {})}, folds=FOLDS, **changes)


def expected(fold: int) -> np.ndarray:
    """The clipped sum at weights 0 over all records but those of the fold, one by one."""
    z = signed(made({"kind": "dp-gd", "learning_rate": 1.0}, epochs=1), points(RECORDS))
    z = z[Keys.of_places([RECORDS]).parts(FOLDS, "fold 0", 0) != fold]
    gradients = -z / 2
    return np.sum([g * min(1.0, 0.4 / np.linalg.norm(g)) for g in gradients], axis=0)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ({"kind": "dp-gd", "learning_rate": 1.0}, {}),
        ({"kind": "dp-sgd", "batching": "full", "learning_rate": 1.0}, {}),
        ({"kind": "dp-sgd", "batching": "poisson", "batch_size": 46, "learning_rate": 1.0}, {}),
        (
            {"kind": "dp-sgd", "batching": "shuffle", "batch_size": 46, "learning_rate": 1.0},
            {"privacy": {"adjacency": "zero-out"}},
        ),
    ],
)
def test_every_batching_sums_each_record_of_a_trial_once(method: dict[str, Any], more: dict[str, Any]) -> None:
    """61 records, 4 folds of 15, 15, 15 and 16: trials train on 46 or 45, and all count 46 places.

    A batch of all 46 places is everything, at a rate of 1 too; each sum is divided by the public 46.
    """
    one = made(method, epochs=1, **more)
    streams = [Silent(seed) for seed in range(FOLDS)]
    own = context(one, streams=list(streams), data=points(RECORDS))
    assert len(own.table) == 46 and sorted(own.table.counts.tolist()) == [45, 46, 46, 46]
    trained = create(own)
    own.pack.values.zero_()
    run(trained)
    for fold in range(FOLDS):
        assert np.allclose(trained.output[fold].numpy(), -expected(fold) / 46, atol=1e-12)


def test_poisson_takes_each_record_at_the_rate_that_was_priced() -> None:
    """1500 batches of expected size 23 from 46 places: each record of each trial in half, to 5 deviations.

    A rate of 23 / 45 in the trial that trains on 45 would show in its mean: 45 * 1500 inclusions, 5 deviations are
    .0096, and the rates differ by .0111.
    """
    method = {"kind": "dp-sgd", "batching": "poisson", "batch_size": 23, "learning_rate": 1.0}
    own = context(made(method, epochs=1), [SeededStreams(s) for s in range(FOLDS)], points(RECORDS))
    trained: Any = create(own)
    seen = torch.zeros(FOLDS, RECORDS)
    rows = own.table.own
    assert rows is not None
    for step in range(1500):
        batch = trained.batches.sampler.batch(step)
        for trial in range(FOLDS):
            places = batch.rows[trial] if batch.mask is None else batch.rows[trial][batch.mask[trial]]
            drawn = rows[trial][torch.as_tensor(places)]
            seen[trial, drawn[drawn >= 0]] += 1
    short = int(own.table.counts.argmin())
    for trial in range(FOLDS):
        mine = rows[trial][rows[trial] >= 0]
        assert (seen[trial].nonzero().squeeze(1) == mine.sort().values).all()
        assert abs(seen[trial, mine] / 1500 - 0.5).max() < 5 * 0.5 / 1500**0.5
    assert abs(seen[short].sum() / (45 * 1500) - 0.5) < 5 * 0.5 / (45 * 1500) ** 0.5


def test_a_single_record_that_is_not_there_adds_nothing() -> None:
    method = {"kind": "dp-sgd", "batching": "fixed", "batch_size": 1, "learning_rate": 0.1}
    own = context(made(method, epochs=1), [SeededStreams(s) for s in range(FOLDS)], points(RECORDS))
    trained: Any = create(own)
    rows, short = own.table.own, int(own.table.counts.argmin())
    assert rows is not None
    steps = [s for s in range(46 * 8) if int(rows[short, int(trained.batches.sampler.batch(s).rows[short, 0])]) < 0]
    assert steps, "one of 46 places is empty"
    for step in steps[:3]:
        own.pack.sums.fill_(7.0)
        trained.add_sums(0, step, Diagnostics(FOLDS, torch.device("cpu")))
        assert (own.pack.sums[short] == 7.0).all() and (own.pack.sums[(short + 1) % FOLDS] != 7.0).any()
