"""Arrays that are kept between runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpsgd_cli.data import array_cache


def test_an_array_is_kept_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = array_cache.place("features", ["settings"], [np.zeros(2)])
    array_cache.keep(place, np.arange(3.0))
    (file,) = tmp_path.rglob("*.npy")
    assert file.stat().st_mode & 0o777 == 0o600
    kept = array_cache.load(place)
    assert kept is not None
    assert kept.tolist() == [0, 1, 2]
