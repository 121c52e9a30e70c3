"""DP-SGD: clipped sums with Gaussian noise (Abadi et al. 2016, Algorithm 1; Yu et al. 2019, Algorithm 1).

Released at each step: sum over the batch of clipped per-example gradients, plus noise N(0, s^2) on every coordinate.

Sensitivity: one record adds a vector of L2 norm at most C (flat) or sqrt(sum C_l^2) (per-layer), so the sum moves
by at most S = that norm under add-remove and zero-out, and twice that under replace-one. The divisor
is a public constant, and so is everything else that turns the sum into new weights.

Price: s = z S is a Gaussian mechanism of noise multiplier z on the batch; what a step or an epoch then costs
by batching is in `privacy/gradient_plan.py`, with the theorems. The `as-published` convention uses s_l = z C_l (twice
that under replace-one) on layer l and is recorded as noise multiplier z / sqrt(M).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.core.averaging import TailAverage
from dpsgd_cli.core.clipping import Clipping, Diagnostics
from dpsgd_cli.core.noise import NoiseSource, add_noise, noise_precision
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.adaptive_schedule import Pacer
from dpsgd_cli.methods.base import Context
from dpsgd_cli.methods.gradient import GradientMethod, section_of
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.recipe.batching import moves_of_a_sum
from dpsgd_cli.recipe.schema.descriptor import named
from dpsgd_cli.recipe.schema.privacy import Privacy


class DpSgd(GradientMethod):
    """All trials share one kind of clipping; bounds, schedules and lengths may differ."""

    pacer: Pacer | None = None

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.plans = [_planned(plan) for plan in context.plans]
        self.pacer = Pacer(context, self.plans)
        if self.pacer.runners and isinstance(self.average, TailAverage):
            raise PrivacyError(
                "privacy.schedule validation ends training by itself, so method.averaging cannot count from the end;"
                " use ema or none"
            )
        self.sections = [_section(recipe.privacy) for recipe in context.recipes]
        pack = context.pack
        self.bounds = _bounds(self.sections, len(pack.layers), pack.values)
        self.sensitivities = self.bounds.sensitivities
        precision = noise_precision(context.streams, pack.values.dtype)
        self.noise = NoiseSource(context.streams, pack.size, pack.values.device, precision)
        self._scale: tuple[int, Tensor] | None = None
        self._done = 0
        self._check_priced()

    def _check_priced(self) -> None:
        """Refuse to run anything else than what the plans priced."""
        table, settings = self.context.table, section_of(self.context.recipes[0])
        runs: tuple[str, int, int] = (settings.batching, len(table), settings.batch_size or len(table))
        for plan, bound in zip(self.plans, self.sensitivities, strict=True):
            sampling = plan.sampling
            priced = (sampling.batching, sampling.records, sampling.batch_size)
            if priced != runs:
                raise PrivacyError(
                    f"the plan priced (batching, records, batch size) {priced} but not {runs}; plan this run anew"
                )
            moved = bound * moves_of_a_sum(sampling.adjacency)
            if not math.isclose(plan.sensitivity, moved, rel_tol=1e-6):
                raise PrivacyError(
                    f"the plan priced sensitivity {plan.sensitivity:g} under {sampling.adjacency}, but the bounds of"
                    f" {len(self.context.pack.layers)} layers give {moved:g}; plan this run anew"
                )

    @property
    def lengths(self) -> list[int]:
        if self.pacer is not None:
            return self.pacer.lengths
        return [_planned(plan).most_epochs for plan in self.context.plans]

    def clipping(self) -> Clipping:
        return self.bounds

    @property
    def finished(self) -> bool:
        return self.epochs <= self._done

    def run_epoch(self, epoch: int) -> Diagnostics:
        seen = super().run_epoch(epoch)
        self._done = epoch + 1
        assert self.pacer is not None
        self.pacer.look(epoch, self.output)
        return seen

    def spend(self, epoch: int, trial: int) -> None:
        if self.pacer is not None and trial in self.pacer.runners:
            self.pacer.spend(epoch, trial)
            return
        for release in self.plans[trial].epochs[epoch]:
            self.context.ledgers[trial].spend(release, epoch)

    def privatise(self, epoch: int, step: int) -> None:
        if self._scale is None or self._scale[0] != epoch:
            self._scale = (epoch, self._noise_scale(epoch))
        add_noise(self.context.pack.sums, self.noise.draw(step), self._scale[1])

    def _noise_scale(self, epoch: int) -> Tensor:
        """Standard deviation of the noise on the sum: (R, 1), or (R, P) where layers differ."""
        multipliers = [self._multiplier(epoch, trial) for trial in range(self.context.trials)]
        scale = self.context.column([z * plan.sensitivity for z, plan in zip(multipliers, self.plans, strict=True)])
        published = [section.clipping.noise_by_layer for section in self.sections]
        if not any(published):
            return scale
        doubled = [plan.sensitivity / bound for plan, bound in zip(self.plans, self.sensitivities, strict=True)]
        by_layer = self.bounds.norms.T * self.context.column(doubled) * self.context.column(multipliers)
        chosen = self.context.column([float(own) for own in published]) > 0
        return torch.where(chosen, by_layer.index_select(1, self.context.pack.group_of), scale)

    def _multiplier(self, epoch: int, trial: int) -> float:
        """Noise multiplier of a trial in `epoch`; its last one when it is over."""
        if self.pacer is not None and trial in self.pacer.runners:
            return self.pacer.runners[trial].noise.multiplier
        planned = self.plans[trial].noise_multipliers
        return planned[min(epoch, len(planned) - 1)]

    def charged_for(self, done: int) -> bool:
        assert self.pacer is not None
        return self.pacer.charged_for(done)

    def state(self) -> dict[str, Any]:
        assert self.pacer is not None
        return super().state() | {"pacer": self.pacer.state(), "done": self._done}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        assert self.pacer is not None
        self.pacer.load_state(state["pacer"])
        self._done = state["done"]


def _planned(plan: Plan | None) -> Plan:
    if plan is None:
        raise PrivacyError("dp-sgd was started without a plan")
    return plan


def _section(privacy: Privacy | None) -> Privacy:
    if privacy is None:
        raise PrivacyError("dp-sgd was started without a privacy section")
    return privacy


def _bounds(sections: list[Privacy], layers: int, like: Tensor) -> Clipping:
    """Clip bounds of every trial: (1, R) flat, (M, R) per layer."""
    kinds = {section.clipping.kind for section in sections}
    if len(kinds) > 1:
        raise PrivacyError(f"trials that train together share one kind of clipping, not {sorted(kinds)}")
    kind = sections[0].clipping
    columns = [section.clipping.bounds(layers) for section in sections]
    norms = torch.tensor(columns, dtype=torch.float64).T.to(like)
    return Clipping(norms, flat=not kind.by_layer, factors=named(kind.factors))
