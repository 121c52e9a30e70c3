"""Every planted bug is refuted, by the tiers that are made for it; the same recipes without it are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dpsgd_cli.recipe.loading import load_recipe
from tests.audit.planted import BUGS, audited, run

pytestmark = pytest.mark.long
CLEAN = {(bug.recipe, *bug.overrides): bug for bug in BUGS.values()}


def check_data(recipe: str, real_data: Callable[[str], Path]) -> None:
    """Skip where an audit asks the records whose they are, and they are not at hand."""
    data = load_recipe(recipe).recipe.data
    if data.unit is not None:
        assert data.name is not None
        real_data(data.name)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_refuted(
    name: str, real_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_data(BUGS[name].recipe, real_data)
    found = run(name, monkeypatch, tmp_path)
    tiers = {row["tier"] for row in found["findings"] if row["refuted"]}
    assert found["refuted"] and set(BUGS[name].found_by) <= tiers, found["refuted_by"]


@pytest.mark.parametrize("settings", CLEAN, ids=lambda settings: settings[0])
def test_the_clean_copy_is_not(settings: tuple[str, ...], real_data: Callable[[str], Path]) -> None:
    check_data(settings[0], real_data)
    found = audited(list(settings[1:]), recipe=settings[0], trials=60)
    assert not found["refuted"] and found["findings"], found["refuted_by"]
