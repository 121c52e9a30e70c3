"""The loop that gradient methods share: against a loop over single examples, and alone against in a pack."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.base import Method, create
from dpsgd_cli.methods.dp_sgd.run import GradientMethod
from dpsgd_cli.noise.run import NoiseSource
from tests.methods.small_network import RECORDS, context, network, recipe, records, train

BATCHINGS: dict[str, dict[str, Any]] = {
    "poisson": {"batching": "poisson", "batch_size": 6},
    "shuffle": {"batching": "shuffle", "batch_size": 7},
    "full": {"batching": "full", "batch_size": None},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"optimizer": {"kind": "sgd", "momentum": 0.9}, "weight_decay": 0.01},
    "adam": {"optimizer": {"kind": "adam"}, "learning_rate": 0.02},
    "averaged": {"averaging": {"kind": "ema", "decay": 0.8}},
}


def batches_of(method: GradientMethod, trial: int) -> list[list[int]]:
    """Records of every step of a trial."""
    found = []
    for step in range(method.epochs * method.steps):
        batch = method.batches.sampler.batch(step)
        if batch.rows is None:
            found.append(list(range(RECORDS)))
        else:
            rows = batch.rows[trial] if batch.mask is None else batch.rows[trial][batch.mask[trial]]
            found.append([int(row) for row in rows])
    return found


def slow_dp_sgd(seed: int, batches: list[list[int]], deviations: list[float], divisor: float, norm: float) -> Tensor:
    """DP-SGD with momentum 0.9 and weight decay 0.01 at rate 0.5, one example at a time; weights (P,)."""
    x, y = (torch.from_numpy(part) for part in records())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SeededStreams(seed).integer("init"))
        module = network().double()
    weights = list(module.parameters())
    size = sum(weight.numel() for weight in weights)
    noise = NoiseSource([SeededStreams(seed)], size, torch.device("cpu"), torch.float64)
    buffer = torch.zeros(size, dtype=torch.float64)
    for step, rows in enumerate(batches):
        total = torch.zeros(size, dtype=torch.float64)
        for row in rows:
            loss = -torch.log_softmax(module(x[row : row + 1]), dim=1)[0, int(y[row])]
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])
            total += gradient * min(1.0, norm / float(gradient.norm()))
        total += deviations[step] * noise.draw(step)[0]
        current = torch.cat([weight.detach().flatten() for weight in weights])
        buffer = 0.9 * buffer + total / divisor + 0.01 * current
        current = current - 0.5 * buffer
        torch.nn.utils.vector_to_parameters(current, weights)
    return torch.cat([weight.detach().flatten() for weight in weights])


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("most_rows", [1000, 4])
def test_training_is_the_loop_over_single_examples(batching: str, most_rows: int) -> None:
    """Two trials with schedules, norms and seeds of their own; memory for all rows, and for 4 at a time."""
    changes = {**BATCHINGS[batching], **OPTIMIZERS["momentum"]}
    schedule = {"kind": "exponential", "initial": 1.0, "decay": 0.3}
    recipes = [
        recipe(method=changes, privacy={"clipping": {"kind": "flat", "norm": 0.6}, "schedule": schedule}, seed=3),
        recipe(method=changes, privacy={"clipping": {"kind": "flat", "norm": 2.0}}, seed=4),
    ]
    method = train(context(recipes, most_rows=most_rows))
    epochs = [step // method.steps for step in range(method.epochs * method.steps)]
    deviations = ([math.exp(-0.3 * epoch) * 0.6 for epoch in epochs], [1.5 * 2.0 for _ in epochs])
    divisor = BATCHINGS[batching]["batch_size"] or RECORDS
    for trial, seed in enumerate((3, 4)):
        norm = (0.6, 2.0)[trial]
        slow = slow_dp_sgd(seed, batches_of(method, trial), deviations[trial], divisor, norm)
        torch.testing.assert_close(method.output[trial], slow, rtol=1e-8, atol=1e-9)


def test_trials_that_are_over_keep_their_weights() -> None:
    """Lengths 1, 3 and 2 in one pack, with everything that a step changes: momentum and averages as well."""
    changes = {**OPTIMIZERS["momentum"], **OPTIMIZERS["averaged"]}
    recipes = [recipe(method=changes, seed=seed, epochs=epochs) for seed, epochs in ((0, 1), (1, 3), (2, 2))]
    made = context(recipes)
    pack = train(made)
    assert pack.epochs == 3
    assert [len(ledger.entries) for ledger in made.ledgers] == [1, 3, 2]
    state = pack.state()
    for trial, one in enumerate(recipes):
        alone = train(context([one]))
        torch.testing.assert_close(pack.output[trial], alone.output[0], rtol=0, atol=1e-12)
        for name, tensor in alone.state().items():
            if isinstance(tensor, Tensor):
                torch.testing.assert_close(state[name][trial], tensor[0], rtol=0, atol=1e-12)


def test_the_sum_is_divided_by_a_public_number() -> None:
    """The last batch of an epoch of shuffled batches holds 2 of 30 records, a Poisson batch what it happens to hold."""
    for name, size in (("poisson", 6), ("shuffle", 7), ("full", RECORDS)):
        method = create(context([recipe(method=BATCHINGS[name])]))
        assert isinstance(method, GradientMethod)
        assert method.divisor == size


def test_sgd_is_torchs() -> None:
    """Without privacy: no clipping, no noise, nothing charged; full batches are torch's own descent."""
    changes = {"kind": "sgd", **BATCHINGS["full"], **OPTIMIZERS["momentum"]}
    made = context([recipe(method=changes, privacy=None, epochs=6, seed=seed) for seed in (0, 1)])
    method = train(made)
    assert [ledger.entries for ledger in made.ledgers] == [[], []]
    x, y = (torch.from_numpy(part) for part in records())
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SeededStreams(seed).integer("init"))
            module = network().double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
        for _ in range(6):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        weights = torch.nn.utils.parameters_to_vector(module.parameters())
        torch.testing.assert_close(method.output[seed], weights.detach())


def test_an_own_method_comes_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dpsgd_cli.methods.dp_sgd.run import WithoutPrivacy\n\nclass Own(WithoutPrivacy):\n    pass\n\n"
        "def nothing(context):\n    return 3\n"
    )
    settings = {"kind": "python", "file": "own.py", "factory": "Own", **BATCHINGS["full"]}
    own = create(replace(context([recipe(method=settings, privacy=None)]), base=tmp_path))
    assert type(own).__name__ == "Own" and isinstance(own, Method)
    wrong = replace(context([recipe(method={**settings, "factory": "nothing"}, privacy=None)]), base=tmp_path)
    with pytest.raises(RecipeError, match=r"own.py: nothing gives int, not a dpsgd_cli.methods.base.Method"):
        create(wrong)


def test_a_step_of_many_records_is_summed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsgd_cli.engine.packing.MOST_FLOAT32", 6)
    found = [context([recipe(method={"batch_size": size})], dtype=torch.float32) for size in (6, 7)]
    for trained in found:
        create(trained)
    assert [trained.pack.products for trained in found] == [torch.float32, torch.float64]
