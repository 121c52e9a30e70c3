"""Whoever adds an entry to a registry states everything that a guarantee rests on: its record has no default."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dpsgd_cli.accounting.accountants import AccountantEntry
from dpsgd_cli.accounting.adjacency import BatchingKind, NeighbourKind
from dpsgd_cli.engine.loss_bounds import LossKind
from dpsgd_cli.methods.experiment import Descriptor
from dpsgd_cli.results.reading import ResultFile

EXTENSIONS = {
    "minibatch", "distributable", "auto_tunable", "per_trial_keys", "correlates", "adaptive_clipping", "by_unit",
    "discovers",
}  # fmt: skip
"""What a method does beyond its plan; whoever leaves one out is refused it."""


@pytest.mark.parametrize("record", [AccountantEntry, BatchingKind, NeighbourKind, LossKind, ResultFile, Descriptor])
def test_a_record_of_a_registry_has_no_default(record: Any) -> None:
    optional = {
        field.name
        for field in dataclasses.fields(record)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    assert optional == (EXTENSIONS if record is Descriptor else set())
