"""DP-AGD of Lee and Kifer (2018) in one file: gradient descent that chooses each step length in private.

    python examples/dp_agd.py

Nothing is hidden in a library but tensors and the conversion from zCDP to epsilon. A round releases two things:

gradient    The sum of gradients, each clipped to norm C_grad, plus normal noise: rho-zCDP with noise multiplier
            1 / sqrt(2 rho). One record moves the sum by at most C_grad.
selection   The index of the least of 21 losses along that direction, each record's loss clipped to [0, C_obj], by
            report noisy min: Laplace noise of scale C_obj / eps on each. All losses move in one direction by at most
            C_obj, so it is eps-DP and eps^2 / 2-zCDP.

If the selection stays (index 0), the gradient was too noisy: a second, cheaper measurement improves it. What a round
costs depends on earlier releases, so the budget is a filter: a round starts only if it still fits.
`tests/test_examples.py` trains the same by `dpsgd train` and compares the weights: they are equal to the bit.

The seed makes this an experiment: anyone who knows it can subtract the noise. A release needs noise from the operating
system, which `dpsgd train` draws when a recipe has no seed.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.accounting.conversions import bun_steinke_epsilon


@dataclass(frozen=True)
class Settings:
    """Those of the paper's Section 5, for logistic regression with the penalty N l2 |w|^2 / 2."""

    epsilon: float = 4.0
    delta: float = 1e-5
    l2: float = 0.001
    splits: float = 60.0  # eps / (2 splits) for a selection, and for a gradient
    gamma: float = 0.1  # growth of a gradient's budget after a selection that stays
    candidates: int = 20  # step lengths besides 0
    longest: float = 2.0  # longest step tried at first
    refresh: int = 10  # steps after which the longest is set anew
    growth: float = 0.1  # to (1 + this) times the longest step taken since
    objective_clip: float = 3.0
    gradient_clip: float = 3.0
    seed: int = 0


class Noise:
    """Draws of `size` normals each; the k-th is a function of the seed, the purpose and k alone."""

    def __init__(self, seed: int, purpose: str, size: int, dtype: torch.dtype) -> None:
        self.seed, self.purpose, self.drawn = seed, purpose, 0
        self.block = torch.empty(max(1, min(64, (1 << 14) // size)), size, dtype=dtype)

    def draw(self) -> Tensor:
        number, place = divmod(self.drawn, len(self.block))
        if place == 0:
            key = hashlib.sha256(f"{self.seed}/{self.purpose}/{number}".encode()).digest()[:16]
            words = np.random.SeedSequence(int.from_bytes(key, "little")).generate_state(624, np.uint32)
            generator = torch.Generator()
            state = generator.get_state().numpy().copy()  # a Mersenne Twister: our words, and nothing cached
            state[8:24].view(np.uint32)[:] = (1, 1, 0, 0)
            state[24 : 24 + 8 * 624].view(np.uint64)[:] = words
            state[24 + 8 * 624 :] = 0
            generator.set_state(torch.from_numpy(state))
            self.block.normal_(generator=generator)
        self.drawn += 1
        return self.block[place]


def clipped_gradient(z: Tensor, margins: Tensor, clip: float) -> Tensor:
    """Return the sum of clipped gradients, float64 (P,), of records with signed rows z = y x (N, P).

    The logistic loss log(1 + e^-t) at the margin t = z.w has the gradient phi'(t) z. So clipping it to `clip` is
    clamping the number phi'(t) to clip / |z|.
    """
    most = clip / torch.linalg.vector_norm(z, dim=1)
    slopes = torch.minimum(torch.maximum(-torch.sigmoid(-margins), -most), most)
    return torch.zeros(1, z.shape[1], dtype=torch.float64).addmm_(slopes.double()[None], z.double())[0]


def losses_along(margins: Tensor, along: Tensor, spacing: Tensor, count: int, bound: float) -> Tensor:
    """Return sums (count,), float64, of losses clipped to [0, bound] at `count` points, spaced along a direction.

    The margins of point i are t - i spacing s, so e^-t needs one product a point. A sum of logs is the log of a
    product, here of 64 factors of at most e^bound.
    """
    odds = margins.clamp(-80, 80).neg().exp()
    ratio = (along * spacing).clamp(-80, 80).exp()
    group = 1 << min(6, int(math.log2(700 / bound)))
    whole = len(odds) - len(odds) % group
    totals = []
    for _ in range(count):
        factors = (odds + 1).clamp(max=float(torch.tensor(bound).exp()))
        logs = factors[:whole].view(group, -1).prod(dim=0, dtype=torch.float64).log().sum()
        totals.append(logs + factors[whole:].double().log().sum())
        odds = odds * ratio
    return torch.stack(totals)


def noisy_min(scores: Tensor, epsilon: float, sensitivity: float, normals: Tensor) -> int:
    """Return the index of the least score plus Laplace noise: a difference of two exponentials, each of two normals."""
    exponentials = normals.view(len(scores), 2, 2).square().sum(dim=-1) / 2
    return int((scores * (epsilon / sensitivity) + (exponentials[:, 0] - exponentials[:, 1])).argmin())


def train(x: Tensor, y: Tensor, s: Settings) -> tuple[Tensor, float]:
    """Return weights (D + 1,), the last a bias, and the rho spent, for records x (N, D) with labels y of 0 and 1."""
    z = torch.cat([x, torch.ones(len(x), 1)], dim=1) * ((y > 0).float() * 2 - 1)[:, None]
    penalty = torch.tensor(len(x) * s.l2)
    budget = (math.sqrt(math.log(1 / s.delta) + s.epsilon) - math.sqrt(math.log(1 / s.delta))) ** 2
    epsilon = s.epsilon / (2 * s.splits)
    first_rho, selection_rho = epsilon**2 / (4 * math.log(1.25 / s.delta)), epsilon**2 / 2
    gradient_noise = Noise(s.seed, "agd-gradient", z.shape[1], torch.float32)
    selection_noise = Noise(s.seed, "agd-selection", (s.candidates + 1) * 4, torch.float64)

    values, rho, longest, spent = torch.zeros(z.shape[1]), first_rho, s.longest, 0.0
    exact, averaged, recent, stayed = torch.zeros(0), torch.zeros(0), list[float](), False
    for round_ in range(1_000_000):
        price = s.gamma * rho if stayed else rho
        if (spent + price + selection_rho) * (1 + 1e-9) > budget:
            return values, spent
        if round_ % s.refresh == 0:
            margins = (z @ values[:, None])[:, 0]  # anew, as rounding adds up in those that are moved along
        # 1. the gradient: a new one, or the mean with a further measurement of the same sum by inverse variance
        spent += price
        if not stayed:
            exact = clipped_gradient(z, margins, s.gradient_clip)
        scale = torch.tensor(s.gradient_clip * (1 / math.sqrt(2 * price)), dtype=torch.float64)
        measured = torch.addcmul(exact, gradient_noise.draw(), scale).float()
        averaged = averaged.lerp(measured, torch.tensor(price / (rho + price))) if stayed else measured
        rho += price if stayed else 0.0
        direction = averaged + penalty * values
        direction = direction / torch.linalg.vector_norm(direction).clamp(min=1e-30)
        # 2. the selection: the least loss along that direction, the penalty added exactly
        spent += selection_rho
        along = (z @ direction[:, None])[:, 0]
        spacing = torch.tensor(longest / s.candidates)
        scores = losses_along(margins, along, spacing, s.candidates + 1, s.objective_clip)
        lengths = spacing.double() * torch.arange(s.candidates + 1)
        v, d = values.double(), direction.double()
        scores += penalty.double() * (lengths.square() * d.square().sum() / 2 - lengths * (v * d).sum())
        choice = noisy_min(scores, epsilon, s.objective_clip, selection_noise.draw())
        # 3. the step
        length = spacing * choice
        values, margins = values - direction * length, torch.addcmul(margins, along, length, value=-1.0)
        stayed = choice == 0
        if not stayed:
            recent.append(float(length))
            if len(recent) == s.refresh:
                longest, recent = (1 + s.growth) * max(recent), []
    raise AssertionError("a budget is spent before")


def main() -> None:
    """Train, and print accuracy on the last 114 records, which the training does not see, and epsilon."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    # bounds in round numbers, as if they were known from the literature: never take the data's own
    bounds = 10.0 ** np.ceil(np.log10(features.max(axis=0)))
    x, y = torch.from_numpy(features / bounds).float(), torch.from_numpy(labels)
    settings = Settings()
    values, spent = train(x[:-114], y[:-114], settings)
    right = (((x[-114:] @ values[:-1] + values[-1]) > 0) == (y[-114:] > 0)).double().mean()
    epsilon = bun_steinke_epsilon(spent, settings.delta)
    print(f"accuracy {right:.4f}, epsilon spent {epsilon:.4f} of {settings.epsilon:g} at delta {settings.delta:g}")


if __name__ == "__main__":
    main()
