"""The worked examples in the package's docstrings."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WITH_EXAMPLES = [path for path in sorted((ROOT / "dpsgd_cli").rglob("*.py")) if ">>> " in path.read_text("utf-8")]


@pytest.mark.parametrize("name", [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in WITH_EXAMPLES])
def test_examples_give_what_they_say(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".__init__"))
    failed, tried = doctest.testmod(module)
    assert tried > 0 and failed == 0
