"""Budgets as recipes give them."""

from __future__ import annotations

from pydantic import Field

from dpsgd_cli.common.sections import Delta, Positive, Section


class RhoBudget(Section):
    rho: Positive = Field(description="Total zCDP.")


class EpsilonBudget(Section):
    epsilon: Positive = Field(description="Total epsilon.")
    delta: Delta = Field(description="At this delta.")
