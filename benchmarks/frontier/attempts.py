"""Other features of CIFAR-10 than those of `recipes/frontier/cifar10.yaml`, compared on photographs that judge nothing.

    DPSGD_DATA=... python -m benchmarks.frontier.attempts build/attempts

10,000 training photographs train and 5,000 others judge; the 10,000 that judge in `results/frontier/` are not looked
at. All parts are computed first, into the given folder. Writes `results/frontier/attempts.csv`, in percent: for each
set of parts, the accuracy of ridge regression without privacy on directions of 3,000 dead leaves (the best of four
ridges), and that of a simulation of private training on the same directions: noisy second moments, 50 steps of noised
clipped gradients, the mean of the last half. Its noise on a mean gradient is that of 40,000 records at epsilon 1 or 8;
without noise all else is the same. Nothing here is private.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.pages import RESULTS
from benchmarks.rule import photographs
from dpsgd_cli.data import synthetic
from dpsgd_cli.data.features import EXTRACTORS, Extract, Network
from dpsgd_cli.data.image_transforms import PATCH_IMAGES, Patches, _fixed, _parts
from dpsgd_cli.preconditioning.maps import Preconditioner, cut_of
from dpsgd_cli.recipe.loading import load_recipe

TRAIN, JUDGE, LEAVES = 10_000, 5_000, 3_000
DIRECTIONS = 2600
SHAPE = (3, 32, 32)
AT_ONCE = 32
MU = {1: 0.2644, 8: 1.666}
AS_MANY = 40_000
SHARE = 0.15
STEPS = 50
Maps = Callable[[Tensor], list[Tensor]]


def rows() -> tuple[np.ndarray, Tensor]:
    """Photographs that train, then those that judge, then dead leaves, all in bytes; classes of the photographs."""
    x, y = photographs()
    x = np.round(np.concatenate([x[:TRAIN], x[-JUDGE:]]) * 255).astype(np.uint8)
    classes = torch.from_numpy(np.concatenate([y[:TRAIN], y[-JUDGE:]]).astype(np.int64))
    return np.concatenate([x, synthetic.draw("dead-leaves", LEAVES, SHAPE, 0)]), classes


def keep(folder: Path, names: list[str], images: np.ndarray, maps: Maps) -> None:
    """Write the parts that `maps` gives for images, each in half precision."""
    if all((folder / f"{name}.npy").exists() for name in names):
        return
    out: list[np.ndarray] = []
    with torch.inference_mode():
        for start in range(0, len(images), AT_ONCE):
            found = [one.flatten(1) for one in maps(torch.from_numpy(images[start : start + AT_ONCE]).float() / 255)]
            out = out or [np.empty((len(images), one.shape[1]), np.float16) for one in found]
            for held, one in zip(out, found, strict=True):
                held[start : start + AT_ONCE] = one.numpy()
    for name, held in zip(names, out, strict=True):
        np.save(folder / f"{name}.npy", held)


def of_extractor(step: Extract, network: Network, images: Tensor) -> list[Tensor]:
    """The features of the recipe's own extractor."""
    return [torch.from_numpy(step.extract(network, images.numpy()))]


def patch_variants(images: Tensor) -> list[Tensor]:
    """1,024 patches of 6 x 6: as they are; parts with soft edges; short patches counting less; both; and both signs."""
    settings = Patches(SHAPE, 1024, 6, 1, 1, 3, "dead-leaves", 0)
    fixed, side = _fixed(settings, PATCH_IMAGES), SHAPE[1] - 5
    moved = (settings._cut(images).flatten(0, 1) - fixed.mean) @ fixed.whiten
    squares = moved.square().sum(dim=1, keepdim=True)
    like = (moved * (squares + 1e-12).rsqrt()).bfloat16() @ fixed.dictionary
    floor = 0.1 * fixed_square(settings)
    faint = like * (squares / (squares + floor)).sqrt().bfloat16()
    hard, soft = _parts(side, 3), soft_parts(side, 3)

    def pooled(parts: Tensor, excess: Tensor) -> Tensor:
        grid = (parts @ functional.relu(excess - fixed.threshold).reshape(len(images), side**2, -1)).float()
        first, mirrored = grid.transpose(1, 2).reshape(len(images), -1, 3, 3).chunk(2, dim=1)
        return functional.normalize(((first + mirrored.flip(3)) / 2).sqrt().flatten(1))

    one = pooled(hard, like)
    both = torch.cat([one, pooled(hard, -like)], dim=1)
    return [one, pooled(soft, like), pooled(hard, faint), pooled(soft, faint), both]


VARIANTS = ["patches", "soft", "floor", "soft-floor", "signs"]


@cache
def fixed_square(settings: Patches) -> float:
    """The mean square of a whitened patch of dead leaves."""
    fixed = _fixed(settings, PATCH_IMAGES)
    cut = settings._cut(torch.from_numpy(synthetic.draw("dead-leaves", 200, SHAPE, 1)).float() / 255).flatten(0, 1)
    return float(((cut - fixed.mean) @ fixed.whiten).square().sum(dim=1).mean())


@cache
def soft_parts(among: int, places: int) -> Tensor:
    """As `_parts`, with weights that fall linearly from the middle of a part to the middle of the next."""
    middles = (torch.arange(places) + 0.5) * among / places - 0.5
    weights = (1 - (torch.arange(among) - middles[:, None]).abs() * places / among).clamp(min=0)
    weights /= weights.sum(dim=1, keepdim=True)
    return torch.einsum("ai,bj->abij", weights, weights).reshape(places**2, -1).bfloat16()


def directions(folder: Path, parts: list[str]) -> Tensor:
    """The photographs' features on the principal directions of dead leaves, as `rotate` with power .35."""
    gram = torch.zeros(TRAIN + JUDGE + LEAVES, LEAVES)
    for name in parts:
        held = np.load(folder / f"{name}.npy", mmap_mode="r")
        leaves = torch.from_numpy(np.asarray(held[-LEAVES:], np.float32))
        mean = leaves.mean(dim=0)
        for start in range(0, len(gram), 1000):
            block = torch.from_numpy(np.asarray(held[start : start + 1000], np.float32))
            gram[start : start + 1000] += (block - mean) @ (leaves - mean).T
    moments, vectors = torch.linalg.eigh(gram[-LEAVES:])
    moments, vectors = moments.flip(0)[:DIRECTIONS].clamp(min=1e-12), vectors.flip(1)[:, :DIRECTIONS]
    vectors = vectors / moments.sqrt() * (moments + 0.02 * moments.mean()) ** -0.35
    return functional.normalize(gram[:-LEAVES] @ vectors)


def accuracy(x: Tensor, weights: Tensor, classes: Tensor) -> float:
    """In percent, of the photographs that judge."""
    return 100 * float(((x[TRAIN:] @ weights).argmax(dim=1) == classes[TRAIN:]).float().mean())


def ridge(x: Tensor, classes: Tensor) -> float:
    """The best of four ridges."""
    own = x[:TRAIN]
    moments, sums = own.T @ own, own.T @ (functional.one_hot(classes[:TRAIN], 10) - 0.1)
    eye = float(moments.diagonal().mean()) * torch.eye(len(moments))
    return max(accuracy(x, torch.linalg.solve(moments + much * eye, sums), classes) for much in (0.03, 0.1, 0.3, 1.0))


def private(x: Tensor, classes: Tensor, epsilon: int, noise: float) -> float:
    """What a simulation of the private training reaches with `noise` times its noise: the mean of two, if any."""
    mu, own = MU[epsilon] * AS_MANY / TRAIN, functional.one_hot(classes[:TRAIN], 10).float()
    clip = math.sqrt(2) * min(max(math.sqrt(AS_MANY * MU[epsilon] / 640_000), 0.07), 0.35)
    error = math.sqrt(STEPS / (1 - SHARE)) * clip / mu / TRAIN
    rate = min(1.6 * 0.2 / (error * math.sqrt(2 * STEPS)), 0.5 * x.shape[1])
    found = []
    for seed in range(2 if noise else 1):
        drawn, scale = torch.Generator().manual_seed(seed), 1 / math.sqrt(SHARE) / mu
        moved = torch.randn(x.shape[1], x.shape[1], generator=drawn) * noise * scale
        released = x[:TRAIN].T @ x[:TRAIN] + (moved + moved.T) / 2
        u = Preconditioner([cut_of(released.double().numpy(), scale)]).units(x[None])[0]
        weights, pace, mean = (torch.zeros(x.shape[1], 10) for _ in range(3))
        for step in range(STEPS):
            residuals = torch.softmax(u[:TRAIN] @ weights, dim=1) - own
            residuals *= (clip / residuals.norm(dim=1, keepdim=True)).clamp(max=1)
            step_noise = noise * error * torch.randn(weights.shape, generator=drawn)
            pace = 0.8 * pace + u[:TRAIN].T @ residuals / TRAIN + step_noise
            weights = weights - rate * pace
            mean += weights * (2 / STEPS) * (step >= STEPS // 2)
        found.append(accuracy(u, mean, classes))
    return sum(found) / len(found)


def compare(parts: list[str], folder: Path, classes: Tensor, noises: tuple[float, ...] = ()) -> list[float]:
    """Ridge regression's accuracy, then the simulation's with each of `noises` at both epsilons."""
    x = directions(folder, parts)
    return [ridge(x, classes), *(private(x, classes, epsilon, noise) for noise in noises for epsilon in MU)]


COLUMNS = ("features", "ridge", "epsilon 1", "epsilon 8", "1 without noise", "8 without noise")


def main() -> None:
    """Compute what the folder lacks, then compare."""
    parser = argparse.ArgumentParser(description="Compare features of CIFAR-10.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    images, classes = rows()
    present = []
    for number, settings in enumerate(load_recipe("frontier/cifar10").recipe.data.extractors):
        step = EXTRACTORS[settings.kind](settings, folder)
        present.append(f"{number}-{settings.kind}")
        keep(folder, present[-1:], images, partial(of_extractor, step, step.network(SHAPE)))
    keep(folder, VARIANTS, images, patch_variants)
    asked: list[tuple[str, list[str], tuple[float, ...]]] = [(f"{name} alone", [name], ()) for name in VARIANTS]
    asked += [(f"{name} and formulae", [name, *present[4:]], ()) for name in VARIANTS[:2]]
    found = []
    joined = {
        "those of the page": present,
        "soft-floor for 2,048 patches": ["soft-floor", *present[1:]],
        "those of the page and soft-floor": ["soft-floor", *present],
        "soft-floor and formulae": ["soft-floor", *present[4:]],
    }
    for name, parts, noises in [*asked, *((name, parts, (1.0, 0.0)) for name, parts in joined.items())]:
        found.append([name, *compare(parts, folder, classes, noises)])
        print(*found[-1], sep=" | ", flush=True)
        told = [[one[0], *(f"{value:.2f}" for value in one[1:]), *[""] * (len(COLUMNS) - len(one))] for one in found]
        pd.DataFrame(told, columns=COLUMNS).to_csv(RESULTS / "frontier" / "attempts.csv", index=False)


if __name__ == "__main__":
    main()
