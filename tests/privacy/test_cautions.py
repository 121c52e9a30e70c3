"""A statement that says little is called so, from the number on from which it does."""

from __future__ import annotations

import pytest

from dpsgd_cli.privacy.cautions import cautions


@pytest.mark.parametrize(
    ("epsilon", "delta", "records", "says"),
    [
        (100.0, 1e-5, 60_000, []),
        (100.1, 1e-5, 60_000, ["epsilon 100.1000 is above 100"]),
        (1.0, 1 / 64, 64, ["delta 0.015625 is not below 1 / 64"]),
        (1.0, 1 / 65, 64, []),
        (None, 1e-5, 64, []),
        (3e8, 0.5, 64, ["delta 0.5 is not below", "epsilon 3e+08 is above"]),
    ],
)
def test_cautions(epsilon: float | None, delta: float, records: int, says: list[str]) -> None:
    found = cautions(epsilon, delta, records)
    assert len(found) == len(says)
    assert all(text.startswith(begin) for text, begin in zip(found, says, strict=True))
