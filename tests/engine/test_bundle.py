"""The file of trained models: what goes in comes out, and what belongs to one trial goes with that trial alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dpsgd_cli.engine import bundle
from dpsgd_cli.engine.bundle import Bundle
from dpsgd_cli.errors import DataError

WHOLE = Bundle(
    [{"weight": torch.full((2,), float(trial))} for trial in range(3)],
    {"classes": ["no", "yes"], "layout": {"shape": [4]}},
    {"0": np.zeros(1), "0/1": np.array([0.5]), "1/1": np.array([1.5]), "2/1": np.asfortranarray(np.eye(2, 3))},
    {"1/2": np.array([7.0])},
)


@pytest.mark.parametrize("span", [slice(0, 3), slice(1, 2), slice(1, 3)])
def test_trials_are_read_back_with_what_is_theirs_and_nothing_of_others(tmp_path: Path, span: slice) -> None:
    (tmp_path / bundle.NAME).write_bytes(WHOLE.of_trials(span).to_bytes())
    found = bundle.read(tmp_path / bundle.NAME)
    numbers = range(span.start, span.stop)
    assert found.about == WHOLE.about
    assert [weights["weight"].tolist() for weights in found.weights] == [[trial, trial] for trial in numbers]
    own = {f"{trial - span.start}/1": WHOLE.kept[f"{trial}/1"].tolist() for trial in numbers}
    assert {key: held.tolist() for key, held in found.kept.items()} == {"0": [0.0]} | own
    assert {key: held.tolist() for key, held in found.unreleased.items()} == {f"{1 - span.start}/2": [7.0]}


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not tensors")
    with pytest.raises(DataError, match="cannot be read as the file of a model"):
        bundle.read(tmp_path / "x")
