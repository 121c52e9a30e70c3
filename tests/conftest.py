"""What every test may use: real data where it is, and one Hypothesis profile for people and one for CI."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shared machine may be slow: how long an example takes is never a reason to fail.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """Gives the folder of a real data set by name, or skips the test where DPSGD_DATA does not hold it."""

    def folder(name: str) -> Path:
        root = os.environ.get("DPSGD_DATA")
        if not root:
            pytest.skip(f"needs the real {name} data: set DPSGD_DATA")
        found = Path(root) / name
        if not found.is_dir():
            pytest.skip(f"needs the real {name} data: not in DPSGD_DATA")
        return found

    return folder
