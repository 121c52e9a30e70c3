"""Tier D compares every public column of neighbours that train on equal noisy sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsgd_cli.audit.neighbours import compare
from dpsgd_cli.audit.stage import without_folds
from dpsgd_cli.data import outline
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import plan_of, resolve_auto
from tests.audit.planted import FULL, audited, public_loss


@pytest.mark.parametrize("planted", [False, True])
def test_a_training_loss_in_a_public_column_is_found(
    planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted:
        public_loss(monkeypatch, tmp_path)
    loaded = resolve_auto(load_recipe("quickstart", [*FULL, "seed=0", "epochs=2"]))
    known = outline(loaded.recipe.data, loaded.base)
    plan = plan_of(without_folds(loaded), known)
    assert plan is not None
    found = {one.name: one.refutes(0.95) for one in compare(loaded, known, plan)}
    assert found.pop("public columns, from equal noisy sums") == planted
    assert not any(found.values())


OWN = """
from torch import nn

def model(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, outputs))
"""


def test_a_users_own_model_can_be_audited(tmp_path: Path) -> None:
    """Canaries' layers change attributes of their own in every pass, which no check may take for the model's."""
    (tmp_path / "own.py").write_text(OWN)
    model = f"model={{kind: python, file: {tmp_path / 'own.py'}, factory: model}}"
    found = audited([*FULL, model, "epochs=2"], tiers="C", trials=2)
    assert not found["refuted"] and found["findings"]
