"""Choices of one run among a sweep's, and the number of runs before them: by their laws, drawn once for all."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.errors import DataError
from dpsgd_cli.sweep import private_tuning
from dpsgd_cli.sweep.private_tuning import draw
from dpsgd_cli.sweep.session import SweepSession
from dpsgd_cli.sweep.settings import RandomStopping
from dpsgd_cli.training import loop
from tests.sweep.conftest import FAST, GRID, SECURE, Sweep, result

STOPPING = GRID + "select: {kind: random-stopping, law: poisson, mean: 3}\n"


def runs_of(out: Path) -> list[int]:
    (file,) = out.glob("*.draw.json")
    return list(json.loads(file.read_text())["runs"].values())


def law(name: str, mean: float, runs: int) -> float:
    """P(K = k), written out. Geometric: g (1-g)^(k-1). Logarithmic: (1-g)^k / (k log(1/g)). Poisson: e^-m m^k / k!."""
    if name == "poisson":
        return math.exp(-mean) * mean**runs / math.factorial(runs)
    if runs == 0:
        return 0.0
    if name == "geometric":
        return (1 / mean) * (1 - 1 / mean) ** (runs - 1)
    gamma = min((g / 1e5 for g in range(1, 10**5)), key=lambda g: abs((1 / g - 1) / math.log(1 / g) - mean))
    return (1 - gamma) ** runs / (runs * math.log(1 / gamma))


@pytest.mark.parametrize("name", ["geometric", "logarithmic", "poisson"])
def test_random_stopping_draws_the_law_it_is_priced_for(name: str) -> None:
    """How often 0 to 6 runs come in 3,000 draws: each within 5 standard errors of the law (false failure below 1e-5);
    the same counts do not fit the law of mean 4."""
    select = RandomStopping(law=name, mean=6)
    drawn = [sum(draw(select.model_copy(update={"seed": seed}), 3)) for seed in range(3000)]

    def worst(mean: float) -> float:
        chances = [law(name, mean, k) for k in range(7)]
        errors = [math.sqrt(max(p * (1 - p), 1e-12) / len(drawn)) for p in chances]
        return max(
            abs(drawn.count(k) / len(drawn) - p) / e for k, (p, e) in enumerate(zip(chances, errors, strict=True))
        )

    assert worst(6) < 5
    assert worst(4) > 5


def test_each_run_is_of_a_cell_drawn_uniformly() -> None:
    """24,000 expected runs over 4 cells: each share within 5 standard errors of 1/4 (below 1e-5); of 1/5 not."""
    drawn = [draw(RandomStopping(mean=12, seed=seed), 4) for seed in range(2000)]
    total = sum(map(sum, drawn))
    shares = [sum(counts[cell] for counts in drawn) / total for cell in range(4)]
    error = math.sqrt(0.25 * 0.75 / total)
    assert all(abs(share - 0.25) < 5 * error for share in shares)
    assert all(abs(share - 0.2) > 5 * error for share in shares)


def test_without_a_seed_no_two_draws_agree() -> None:
    """Two draws of a Poisson number of mean 1e6 over 50 cells agree with a chance below 1e-50."""
    select = RandomStopping(law="poisson", mean=1e6)
    assert draw(select, 50) != draw(select, 50)
    seeded = select.model_copy(update={"seed": 3})
    assert draw(seeded, 50) == draw(seeded, 50)


def test_the_draw_is_kept_and_not_repeated(sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_tuning, "draw", lambda select, cells: [0, 2, 1, 0])
    first = sweep(STOPPING)
    assert first.exit_code == 0, first.output
    (file,) = out.glob("*.draw.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setattr(private_tuning, "draw", lambda select, cells: [5, 5, 5, 5])
    again = sweep(STOPPING)
    assert "2 of 2 cells have run before" in again.stderr
    assert runs_of(out) == [0, 2, 1, 0]
    assert result(out)["privacy"]["all_trials"]["trials"] == 3


def test_a_sweep_that_was_stopped_makes_the_runs_that_were_drawn(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pack is trained, the second is interrupted; whatever came out, the number stands."""
    monkeypatch.setattr(private_tuning, "draw", lambda select, cells: [1, 1, 0, 1])
    run_pack, packs = loop.run_pack, list[int]()

    def interrupted(members: Any, options: Any) -> Any:
        packs.append(len(members))
        if len(packs) == 2:
            raise KeyboardInterrupt
        return run_pack(members, options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_pack", interrupted)
        assert sweep(STOPPING, "most_trials=1").exit_code == 130
    monkeypatch.setattr(private_tuning, "draw", lambda select, cells: [9, 9, 9, 9])
    assert sweep(STOPPING, "most_trials=1").exit_code == 0
    assert runs_of(out) == [1, 1, 0, 1]
    assert result(out)["privacy"]["all_trials"]["trials"] == 3


def test_no_run_at_all_is_an_answer_that_costs_the_same(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_tuning, "draw", lambda select, cells: [0, 0, 0, 0])
    done = sweep(STOPPING)
    assert done.exit_code == 0, done.output
    nothing = result(out)
    assert nothing["chosen"] == {"directory": None, "note": "no trial chosen: none was drawn, or none stayed finite"}
    assert "no trial chosen" in done.stdout and "publishing the chosen" in done.stdout
    monkeypatch.setattr(private_tuning, "draw", lambda select, cells: [1, 0, 0, 2])
    assert sweep(STOPPING, out="other").exit_code == 0
    some = result(out.parent / "other")
    assert some["chosen"]["directory"] is not None
    assert nothing["privacy"]["choice"] == some["privacy"]["choice"]
    assert nothing["privacy"]["choice"]["epsilon"] > some["privacy"]["each_trial"][0]["epsilon"] > 0


def test_one_draws_for_all(sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes that begin at once, the second finds that there is a draw when it would keep its own."""
    assert sweep(STOPPING, "--dry-run").exit_code == 0
    select = RandomStopping(law="poisson", mean=3)
    session = SweepSession.open(str(out.parent / "sweep.yaml"), [], out)
    out.mkdir()
    for counts in ([1, 0, 0, 0], [0, 0, 0, 7]):
        monkeypatch.setattr(private_tuning, "draw", lambda select, cells, counts=counts: counts)
        private_tuning.write_draw(session.folder, select, session.every)
    assert runs_of(out) == [1, 0, 0, 0]
    assert [path.name for path in out.iterdir()] == [f"{session.folder.stem}.draw.json"]


def test_the_first_shard_draws_for_the_others(sweep: Sweep, out: Path) -> None:
    early = sweep(STOPPING, "--shard", "2/2")
    assert early.exit_code == 2 and "shard 1/2 draws the number of runs for all shards" in " ".join(
        early.stderr.split()
    )
    assert not list(out.glob("*.draw.json"))
    assert sweep(STOPPING, "--shard", "1/2").exit_code == 0
    drawn = runs_of(out)
    assert sweep(STOPPING, "--shard", "2/2").exit_code == 0
    assert runs_of(out) == drawn
    assert result(out)["finished"] == sum(count > 0 for count in drawn)


def test_a_damaged_draw_is_not_drawn_again(sweep: Sweep, out: Path) -> None:
    assert sweep(STOPPING).exit_code == 0
    (file,) = out.glob("*.draw.json")
    file.write_text('{"runs": {}}')
    done = sweep(STOPPING)
    assert (done.exit_code, "restore it, or choose another --out" in done.stderr) == (2, True)
    session = SweepSession.open(str(out.parent / "sweep.yaml"), [], out)
    with pytest.raises(DataError, match=r"draw\.json"):
        private_tuning.read_draw(session.folder, session.every)


def test_a_dry_run_shows_every_cell_and_draws_nothing(sweep: Sweep, out: Path) -> None:
    done = sweep(STOPPING, "--dry-run")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("1 trial, 1 epoch, noise 4") == 4
    assert "runs of cells are drawn when it begins, 3 on average" in done.stdout
    assert "publishing the chosen" in done.stdout and "all trials together" not in done.stdout
    assert not out.exists()


def test_a_seeded_number_is_marked_as_an_experiment(sweep: Sweep, out: Path) -> None:
    done = sweep(STOPPING.replace("mean: 3", "mean: 3, seed: 1"))
    assert done.exit_code == 0, done.output
    assert result(out)["privacy"]["choice"]["randomness"].startswith("seeded (experiment")
    assert "an experiment: anybody who knows the seed can subtract the noise" in done.stdout
    assert not list(out.glob("*.draw.json"))
    assert sweep(STOPPING, out="unseeded").exit_code == 0
    choice = result(out.parent / "unseeded")["privacy"]["choice"]
    assert choice["randomness"].startswith("seeded (experiment"), "the recipe has a seed, whoever draws the number"
    assert sweep(STOPPING, *SECURE, out="secure").exit_code == 0
    assert result(out.parent / "secure")["privacy"]["choice"]["randomness"] == "secure"


def test_cells_of_which_one_has_no_price_have_none(sweep: Sweep) -> None:
    blocks = f"list:\n{FAST}  - {{epochs: 1, privacy: null, method: {{kind: sgd, batch_size: 100}}}}\n"
    done = sweep(blocks + "select: {kind: random-stopping, mean: 2}\n", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "publishing the chosen     no statement: a cell without privacy may be drawn" in done.stdout


def test_a_poisson_number_is_nought_as_often_as_it_should_be() -> None:
    """P(0) = e^-m, here .2231 of 3000: within 5 standard errors (below 1e-6), which no law without 0 is."""
    drawn = [sum(draw(RandomStopping(law="poisson", mean=1.5, seed=seed), 3)) for seed in range(3000)]
    share, chance = drawn.count(0) / 3000, math.exp(-1.5)
    assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / 3000)
    assert share > 5 * math.sqrt(chance * (1 - chance) / 3000)


def test_two_runs_are_of_cells_drawn_independently() -> None:
    """Of draws of two runs among 4 cells a quarter are of one cell twice, within 5 standard errors; half are not."""
    pairs = [counts for seed in range(4000) if sum(counts := draw(RandomStopping(mean=2, seed=seed), 4)) == 2]
    share, error = sum(max(counts) == 2 for counts in pairs) / len(pairs), math.sqrt(3 / 16 / len(pairs))
    assert abs(share - 0.25) < 5 * error < 0.25
