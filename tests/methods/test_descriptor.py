"""What every method's descriptor names can be imported, and is what it should be."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from dpsgd_cli.common.plugins import named
from dpsgd_cli.methods.base import Method, own
from dpsgd_cli.methods.settings import METHODS


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_what_a_descriptor_names_is_there(settings: Any) -> None:
    runs = named(settings.descriptor.runs)
    assert runs is own or issubclass(runs, Method)
    if settings.descriptor.privacy == "refused":
        return
    planner = named(settings.descriptor.planner)
    assert list(inspect.signature(planner).parameters) == ["recipe", "facts"]


def test_no_descriptor_is_inherited() -> None:
    """A method that forgot its own would run, or be planned, as another."""
    assert all("descriptor" in vars(settings) for settings in METHODS.values())
    described = {(settings.descriptor.runs, settings.descriptor.planner) for settings in METHODS.values()}
    assert len(described) == len(METHODS)
