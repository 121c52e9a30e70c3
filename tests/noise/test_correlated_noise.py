"""DP-SGD with noise that is correlated across steps: what is added, to which batches, and what a record can move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpsgd_cli.accounting.mechanism import CorrelatedSums
from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.engine.streams import SecureStreams
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.noise.price import NoiseStrategy
from tests.methods.small_network import RECORDS, context, recipe, records
from tests.methods.test_dp_sgd import CLIPPINGS, LAYERS, NOTHING, accepted, method_of, noise_of
from tests.noise.test_price import matrix


def made(clipping: str = "flat", **changes: Any) -> Any:
    noise: dict[str, Any] = {"kind": "banded", "bands": 3} | changes.pop("noise", {})
    adjacency = {"adjacency": changes.pop("adjacency")} if "adjacency" in changes else {}
    schedule = {"schedule": changes.pop("schedule")} if "schedule" in changes else {}
    return recipe(
        method={"batching": changes.pop("batching", "poisson"), "batch_size": 7},
        privacy={"clipping": CLIPPINGS[clipping], "noise": noise, **adjacency, **schedule},
        **changes,
    )


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_multiplied_by_c_the_noise_is_fresh_and_as_large_as_charged(clipping: str) -> None:
    """On every layer, in every epoch of a falling schedule; 2/3 and 3/2 of it are rejected, and the noise as it is."""
    epochs = 40
    one = made(clipping, schedule={"kind": "step", "initial": 2.0, "decay": 0.5, "period": 20}, epochs=epochs)
    trained = context([one], data=NOTHING)
    plan = trained.plans[0]
    assert plan is not None and plan.correlated is not None
    noise = noise_of(trained)[:, 0]
    steps = len(noise)
    fresh = torch.from_numpy(matrix(NoiseStrategy.of(plan.correlated))) @ noise
    bounds = {"flat": [0.7], "joint": [0.7, 0.7]}.get(clipping, [0.2, 1.1])
    whole = float(np.linalg.norm(bounds))
    half = steps // 2
    for part, multiplier in ((fresh[:half], 2.0), (fresh[half:], 1.0)):
        for layer, values in enumerate(part.split(LAYERS, dim=1)):
            own = bounds[layer] if clipping == "as-published" else whole
            assert accepted(values, multiplier * own)
            assert not accepted(values, multiplier * own * 2 / 3)
            assert not accepted(values, multiplier * own * 3 / 2)
    neighbours = (fresh[1:] * fresh[:-1]).mean() / fresh.square().mean()
    assert abs(float(neighbours)) < 5 / fresh.numel() ** 0.5
    raw = (noise[1:half] * noise[: half - 1]).mean() / noise[:half].square().mean()
    assert float(raw) < -0.2, "a step takes back noise of the one before"
    first, last = (epoch[0].mechanism for epoch in (plan.epochs[0], plan.epochs[-1]))
    assert isinstance(first, CorrelatedSums) and isinstance(last, CorrelatedSums)
    fraction = 2**-0.5 if clipping == "as-published" else 1.0
    unit = whole * fraction
    assert first.noise_multiplier * first.sensitivity == pytest.approx(2.0 * unit)
    assert last.noise_multiplier * last.sensitivity == pytest.approx(unit)
    assert first.sensitivity == pytest.approx(whole)


def sums_of(trained: Any, steps: int, values: Tensor) -> Tensor:
    """Clipped sums (steps, P) of the first trial at fixed weights, before noise."""
    method = method_of(trained)
    trained.pack.values.copy_(values)
    found = []
    for step in range(steps):
        trained.pack.sums.zero_()
        method.add_sums(0, step, Diagnostics(trained.trials, values.device))
        found.append(trained.pack.sums[0].clone())
    return torch.stack(found)


@pytest.mark.parametrize("row", range(0, RECORDS, 6))
def test_a_record_moves_one_step_of_each_cycle_and_so_one_block_of_c_g(row: int) -> None:
    """Over 24 steps of 3 bands, whose rate is 21 / 30: steps of one group only, and blocks that do not meet."""
    trained = context([made(epochs=5)])
    plan = trained.plans[0]
    assert plan is not None and plan.correlated is not None
    values = trained.pack.values.clone()
    x, y = records()
    x[row] = np.nan
    moved = sums_of(trained, 24, values) - sums_of(context([made(epochs=5)], data=(x, y)), 24, values)
    steps = [step for step, own in enumerate(moved) if float(own.norm()) > 1e-12]
    assert len({step % 3 for step in steps}) == 1 and 2 <= len(steps) <= 8
    rows = torch.from_numpy(matrix(NoiseStrategy.of(plan.correlated))[:24, :24]) @ moved
    mechanism = plan.epochs[0][0].mechanism
    assert isinstance(mechanism, CorrelatedSums) and mechanism.sampling_rate == 21 / 30
    group = steps[0] % 3
    assert not rows[:group].any()
    for start in range(group, 24, 3):
        assert float(rows[start : start + 3].norm()) <= mechanism.sensitivity * (1 + 1e-9)


def test_a_record_in_one_order_moves_c_g_by_no_more_than_is_charged() -> None:
    """Batches of every epoch are the same: steps of a record are 5 apart."""
    changes: dict[str, Any] = {"batching": "shuffle", "epochs": 4}
    trained = context([made(**changes)])
    plan = trained.plans[0]
    assert plan is not None and plan.correlated is not None
    values = trained.pack.values.clone()
    x, y = records()
    x[3] = np.nan
    moved = sums_of(trained, 20, values) - sums_of(context([made(**changes)], data=(x, y)), 20, values)
    steps = [step for step, own in enumerate(moved) if float(own.norm()) > 1e-12]
    assert len(steps) == 4 and set(np.diff(steps)) == {5}
    charged = [(one.mechanism.sensitivity, one.count) for one in plan.releases]  # type: ignore[union-attr]
    assert all(count == 1 for _, count in charged)
    square = float((torch.from_numpy(matrix(NoiseStrategy.of(plan.correlated))) @ moved).square().sum())
    assert plan.sensitivity**2 * 0.5 < square <= sum(own**2 for own, _ in charged) * (1 + 1e-9)


def test_a_record_of_a_group_is_in_one_step_of_each_epoch() -> None:
    groups = 5
    trained = context([made(batching="random-allocation", noise={"bands": groups}, epochs=40)])
    sampler, found = method_of(trained).batches.sampler, []
    for step in range(5 * 40):
        batch = sampler.batch(step)
        rows = np.asarray(batch.rows)
        mask = np.ones(rows.shape, bool) if batch.mask is None else np.asarray(batch.mask)
        found.append(set(rows[mask].tolist()))
    steps_of = {row: [step for step, rows in enumerate(found) if row in rows] for row in range(RECORDS)}
    assert all([step // 5 for step in steps] == list(range(40)) for steps in steps_of.values())
    residues = {row: {step % groups for step in steps} for row, steps in steps_of.items()}
    assert all(len(own) == 1 for own in residues.values())
    assert len({own.pop() for own in residues.values()}) == groups
    if groups == 1:
        assert len({tuple(steps) for steps in steps_of.values()}) == RECORDS


def test_secure_noise_is_kept_and_so_taken_back_after_a_resume() -> None:
    """Of 80 trials: multiplied by C, what two processes add is fresh noise, in the steps between them, too."""
    one, secure = made(seed=None, epochs=4), [SecureStreams() for _ in range(80)]
    first = context([one] * 80, data=NOTHING, streams=secure)
    second = replace(context([one] * 80, data=NOTHING, streams=secure), ledgers=first.ledgers)
    plan, found = first.plans[0], []
    assert plan is not None and plan.correlated is not None
    own = NoiseStrategy.of(plan.correlated)
    weights, methods = own.column[:3] / own.norm, [method_of(first), method_of(second)]

    def watch(trained: Context, method: DpSgd) -> None:
        original = method.privatise

        def watched(epoch: int, step: int) -> None:
            original(epoch, step)
            found.append(trained.pack.sums.clone())

        method.privatise = watched  # type: ignore[method-assign]

    watch(first, methods[0])
    watch(second, methods[1])
    for epoch in range(4):
        if epoch == 2:
            methods[1].load_state(methods[0].state())
        methods[epoch // 2].run_epoch(epoch)
    # steps 10 and 11 are those whose noise takes back what steps 8 and 9 of the first process added
    fresh, alone = (sum(weights[j] * found[10 + i - j] for j in range(1 + own)) for i, own in ((0, 2), (0, 0)))
    assert isinstance(fresh, Tensor) and accepted(fresh, 1.5 * 0.7)
    assert isinstance(alone, Tensor) and not accepted(alone, 1.5 * 0.7)


def test_groups_are_found_again_by_a_run_without_a_seed() -> None:
    trained = context([made(seed=None)], streams=[SecureStreams()])
    first, second = (method_of(trained).batches.sampler for _ in range(2))
    for group in (0, 1, 2):
        of = [
            {int(row) for step in range(group, 60, 3) for row in np.asarray(sampler.batch(step).rows)[0]}
            for sampler in (first, second)
        ]
        assert of[0] == of[1] and 0 < len(of[0]) < RECORDS
