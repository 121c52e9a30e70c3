"""DP-SGD in one file: softmax regression on scikit-learn's digits, from the data to the epsilon.

    python examples/dp_sgd.py

Nothing is hidden in a library but tensors and the accountant. Everything that privacy rests on is here: which records
a step uses, how far one record can move a sum, how much noise covers that, and what all steps cost together.
`tests/test_examples.py` trains the same by `dpsgd train` and compares the weights: they are equal to the bit.

The seed makes this an experiment: anyone who knows it can subtract the noise. A release needs noise from the operating
system, which `dpsgd train` draws when a recipe has no seed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.accounting.accountants import get
from dpsgd_cli.accounting.mechanism import GaussianSum, Release


@dataclass(frozen=True)
class Settings:
    """`clip`: bound on the L2 norm of one record's gradient. `noise`: standard deviation of the noise over `clip`."""

    batch_size: int = 256
    epochs: int = 40
    learning_rate: float = 2.0
    clip: float = 1.0
    noise: float = 3.0
    seed: int = 0


# randomness: each draw is a function of (seed, purpose, number)


def key_of(seed: int, purpose: str, number: int) -> int:
    """Return 128 bits that belong to this draw alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()[:16], "little")


def normals(seed: int, purpose: str, number: int, out: Tensor) -> None:
    """Fill `out` with standard normals."""
    words = np.random.SeedSequence(key_of(seed, purpose, number)).generate_state(624, np.uint32)
    generator = torch.Generator()
    state = generator.get_state().numpy().copy()  # a Mersenne Twister: put our words into it, and nothing cached
    state[8:24].view(np.uint32)[:] = (1, 1, 0, 0)
    state[24 : 24 + 8 * 624].view(np.uint64)[:] = words
    state[24 + 8 * 624 :] = 0
    generator.set_state(torch.from_numpy(state))
    out.normal_(generator=generator)


# 1. the batch: each record with probability batch_size / N, independently of all others


def size_table(records: int, expected: int) -> tuple[int, list[int]]:
    """Return (least size, cumulative weights) of Binomial(N, B / N) in integers: sampling in floats has no proof."""
    most_likely = min((records + 1) * expected // records, records)
    below, above = [], []
    weight, size = 1 << 192, most_likely
    while size > 0 and (weight := weight * size * (records - expected) // ((records - size + 1) * expected)):
        below.append(weight)
        size -= 1
    least = size
    weight, size = 1 << 192, most_likely
    while size < records and (weight := weight * (records - size) * expected // ((size + 1) * (records - expected))):
        above.append(weight)
        size += 1
    return least, np.cumsum([*reversed(below), 1 << 192, *above], dtype=object).tolist()


def poisson_batch(seed: int, step: int, records: int, table: tuple[int, list[int]]) -> np.ndarray:
    """Return the records of a step: a binomial number of them, and a uniform set of that size."""
    least, cumulative = table
    bits = int.from_bytes(hashlib.sha512(f"{seed}/poisson/{step}".encode()).digest(), "little")
    place = bits * cumulative[-1] >> 512
    size = least + sum(weight <= place for weight in cumulative)
    generator = np.random.Generator(np.random.Philox(key=key_of(seed, "poisson", 2 * step + 1)))
    return generator.choice(records, size, replace=False, shuffle=False)


# 2. the clipped sum: one record moves it by at most `clip`


def clipped_sum(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """Return the sum over records of gradients, each scaled to a norm of at most `clip`: (K D + K,) in float64.

    Softmax regression has the gradient d x^T for the weight and d for the bias, with d = p - onehot(y). So its squared
    norm is |d|^2 (|x|^2 + 1), and no gradient of a single record is ever stored.
    """
    logits = torch.nn.functional.linear(x, weight, bias).requires_grad_()
    (d,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y, reduction="sum"), logits)
    tiny = torch.finfo(x.dtype).tiny  # squares that underflow must not hide a part of a norm
    square_of_x = torch.linalg.vector_norm(x, dim=1).square() + x.shape[1] * tiny
    square_of_d = torch.linalg.vector_norm(d, dim=1).square() + d.shape[1] * tiny
    factor = (clip / ((square_of_x + 1) * square_of_d).sqrt()).clamp(max=1.0)
    return torch.cat([((d * factor[:, None]).T @ x).flatten(), factor @ d]).double()


# 3. noise, mean, update


def train(x: Tensor, y: Tensor, classes: int, s: Settings) -> tuple[Tensor, Tensor, int]:
    """Return weights (K, D), biases (K,) and the number of steps, for records x (N, D) with labels y (N,)."""
    records, features = x.shape
    table = size_table(records, s.batch_size)
    steps = s.epochs * -(-records // s.batch_size)
    values = torch.zeros(classes * (features + 1))
    block = torch.empty(max(1, min(64, (1 << 19) // len(values))), len(values))  # noise of many steps at once
    for step in range(steps):
        if step % len(block) == 0:
            for part, piece in enumerate(block.view(-1).tensor_split(4)):
                normals(s.seed, "noise", step // len(block) * 4 + part, piece)
        weight, bias = values[: classes * features].view(classes, features), values[classes * features :]
        rows = torch.from_numpy(poisson_batch(s.seed, step, records, table))
        total = clipped_sum(weight, bias, x[rows], y[rows], s.clip)
        total.addcmul_(block[step % len(block)], torch.tensor(s.noise * s.clip))
        # divide by the EXPECTED size, which is public; the real one is not
        values.addcmul_((total / s.batch_size).float(), torch.tensor(s.learning_rate), value=-1.0)
    return values[: classes * features].view(classes, features), values[classes * features :], steps


# 4. the price


def epsilon_of(s: Settings, records: int, steps: int, delta: float) -> float:
    """Return the epsilon of all steps: Poisson-sampled Gaussian sums, composed by privacy loss distributions."""
    step = GaussianSum(s.noise, "add-remove", "poisson", s.batch_size / records, s.clip)
    return get("pld").epsilon([Release(step, steps)], delta)


def main() -> None:
    """Train, and print accuracy on the last 360 images, which the training does not see, and epsilon."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images / 16).float(), torch.from_numpy(labels).long()
    settings = Settings()
    weight, bias, steps = train(x[:-360], y[:-360], 10, settings)
    right = (torch.nn.functional.linear(x[-360:], weight, bias).argmax(dim=1) == y[-360:]).double().mean()
    print(f"accuracy {right:.4f}, epsilon {epsilon_of(settings, len(x) - 360, steps, 1e-5):.4f} at delta 1e-5")


if __name__ == "__main__":
    main()
