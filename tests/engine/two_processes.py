"""What `test_processes.py` runs in each of two processes, with the variables that torchrun sets.

`two_processes.py FOLDER` trains its recipes and writes what was released, told and refused to FOLDER/RANK.json.
`two_processes.py stop EPOCH HOW ARGUMENT...` is `dpsgd ARGUMENT...` of which process 1 ends in the middle.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from dpsgd_cli.batching.run import PoissonSampler
from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.engine.processes import Team, join
from dpsgd_cli.engine.streams import SecureStreams
from dpsgd_cli.errors import DpsgdError, RunError
from dpsgd_cli.main import main as dpsgd
from dpsgd_cli.methods.dp_sgd.run import GradientMethod
from dpsgd_cli.noise.run import Grid, NoiseSource
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto


def outcomes(team: Team, folder: Path) -> dict[str, str]:
    """How each recipe of the folder ends: nothing, or the error."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            loop.run(resolve_auto(load_recipe(str(path), ())), loop.Options(folder / "together", team=team))
            found[path.stem] = ""
        except DpsgdError as error:
            found[path.stem] = f"{type(error).__name__}: {error}"
    return found


def secure_release(team: Team) -> dict[str, object]:
    """Batches of secure streams, and a released sum of ones on each process: bytes, mean and deviation."""
    streams = team.streams([SecureStreams(), SecureStreams()])
    sampler = PoissonSampler(streams, 1000, 100)
    batches = [sampler.batch(step) for step in range(3)]
    drawn = [None if b.rows is None else b.rows.tolist() for b in batches] + [s.integer("init") for s in streams]
    noise = NoiseSource(streams, 5000, torch.device("cpu"), torch.float64)
    sums = torch.ones(2, 5000, dtype=torch.float64)
    team.add_up(sums)
    if team.first:
        noise.add(sums, 0, torch.ones(2, 1), Grid.of(5000, 2, [1.0]))
    team.share(sums)
    return {"drawn": drawn, "sums": sums.flatten().tolist(), "refused": refusal(noise)}


def refusal(noise: NoiseSource) -> str:
    """What a second draw says; on process 0 there is none."""
    try:
        noise.draw(1)
    except RuntimeError as error:
        return str(error)
    return ""


def told(team: Team) -> list[object]:
    """A value and an error of process 0."""

    def fail() -> None:
        raise RunError("of process 0")

    said: list[object] = [team.tell(lambda: {"rank": team.rank})]
    try:
        team.tell(fail)
    except (RunError, SystemExit) as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def stop(epoch: int, how: str) -> None:
    """Let process 1 run out of memory, or be interrupted, before the second step of `epoch`."""
    as_it_was = GradientMethod.step

    def step(method: GradientMethod, at: int, number: int, seen: Diagnostics) -> None:
        if os.environ["RANK"] == "1" and (at, number % method.steps) == (epoch, 1):
            if how == "memory":
                raise MemoryError
            os.kill(os.getpid(), signal.SIGINT)
        as_it_was(method, at, number, seen)

    GradientMethod.step = step  # type: ignore[assignment, method-assign]


def main(folder: Path) -> None:
    with join() as team:
        found = {"outcomes": outcomes(team, folder), "secure": secure_release(team), "told": told(team)}
        (folder / f"{team.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "stop":
        stop(int(sys.argv[2]), sys.argv[3])
        dpsgd(sys.argv[4:])
    else:
        main(Path(sys.argv[1]))
