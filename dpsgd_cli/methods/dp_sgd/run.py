"""DP-SGD: clipped sums with Gaussian noise (Abadi et al. 2016, Algorithm 1; Yu et al. 2019, Algorithm 1).

`GradientMethod.step` is a whole step, from the batch to the new weights; descent without privacy (`sgd`) uses it, too.

Released at each step: sum over the batch of clipped per-example gradients, plus noise N(0, s^2) on every coordinate.

Sensitivity: one record adds a vector of L2 norm at most C (flat) or sqrt(sum C_l^2) (per-layer), so the sum moves
by at most S = that norm under add-remove and zero-out, and twice that under replace-one. The sum is divided by a public
constant (the batch size of the recipe, N for full), never by the realised batch size. Everything else that turns the
sum into new weights is public, too.

Price: s = z S is a Gaussian mechanism of noise multiplier z on the batch. `methods/dp_sgd/price.py` states the cost of
a step or an epoch by batching, with the theorems. The `as-published` convention uses s_l = z C_l (twice that under
replace-one) on layer l and is recorded as noise multiplier z / sqrt(M).

Lee and Kifer (2018) compare DP-AGD with DP-SGD whose noise is the least that an accountant allows:
`privacy.accountant: rdp-markov` (moments, Abadi et al. 2016) or `strong-composition` (of amplified Gaussian mechanisms,
Bassily et al. 2014, with its exact constants). Both are proved for Poisson batches under add-remove. The published
baselines drew batches of fixed size and accounted for Poisson batches.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.accounting.adjacency import replace_factor
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.calibration.price import LABEL as CALIBRATION
from dpsgd_cli.calibration.run import Calibrating
from dpsgd_cli.clipping.bounds import bounds_of
from dpsgd_cli.clipping.run import Clipping, Diagnostics, SumClipped, add_clipped_sums, require_bound, sum_clipped
from dpsgd_cli.common.sections import Section
from dpsgd_cli.common.text_format import count
from dpsgd_cli.engine.context import AroundNoise
from dpsgd_cli.engine.processes import Reduction
from dpsgd_cli.engine.settings import OneLayer
from dpsgd_cli.engine.tensors import Examples, Table, to_device, to_host
from dpsgd_cli.errors import PrivacyError, RecipeError
from dpsgd_cli.intervals.price import LABEL as INTERVALS
from dpsgd_cli.intervals.run import infer
from dpsgd_cli.methods.base import Method
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.dp_sgd.batches import Batches
from dpsgd_cli.methods.dp_sgd.optimizers import factors_of, make_average, make_update, project_to_ball
from dpsgd_cli.methods.dp_sgd.settings import TailIterates, section_of
from dpsgd_cli.methods.risks.affine import CodedSums, fits
from dpsgd_cli.methods.risks.problem import l2_of, radii_of
from dpsgd_cli.noise.correlation import StepNoise, step_noise
from dpsgd_cli.noise.price import NoiseStrategy
from dpsgd_cli.noise.run import Grid, NoiseSource
from dpsgd_cli.preconditioning.maps import MAP
from dpsgd_cli.preconditioning.run import Preconditioning
from dpsgd_cli.schedules.learning_rate import rate_at
from dpsgd_cli.schedules.run import AdaptiveSchedules


class GradientMethod(Method):
    """Stochastic or full-batch gradient descent. A trial whose own plan is over keeps its weights while others go on.

    Subclasses define how sums are clipped, made private (`privatise`) and charged (`spend`). They set `lengths` before
    this constructor runs.
    """

    lengths: list[int]
    """Number of epochs of each trial."""
    clipping: Clipping | None = None
    """Clipping of an example's gradient; None for none."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = section_of(context.recipes[0])
        self.batches = Batches(context, max(self.lengths))
        self.divisor = float(settings.batch or len(context.table))
        context.pack.expect(int(self.divisor))
        self.learning_rate = self._rates(0)
        self.rate_changes = any(isinstance(section_of(r).rate, Section) for r in context.recipes)
        self.weight_decay = context.column([section_of(r).weight_decay + l2_of(r) for r in context.recipes])
        self.decays = bool(self.weight_decay.any())
        self.update = make_update(settings.optimizer, context.pack.values)
        self.rates_by_step = any(getattr(section_of(r).rate, "by_step", False) for r in context.recipes)
        self.factors = factors_of(settings.groups, context.pack)
        if self.factors is not None:
            self.update.decays = self.factors[1]
            self.weight_decay = self.weight_decay * self.factors[1]
        self.radii = context.column(radii_of(context.recipes))
        self.constrained = not bool(self.radii.isinf().all())
        self.average = make_average(settings.average, context.pack.values, [self.steps * n for n in self.lengths])
        self.dropout_keys = [stream.integer("dropout") for stream in context.lasting]
        self.reduction = Reduction(context.team, context.pack.sums)
        self.around: list[AroundNoise] = [self.reduction]
        watcher, sums = context.watcher, context.pack.sums
        watching = None if watcher is None else watcher.around(sums, self.divisor, self.units)
        self.around += [] if watching is None else [watching]
        self.sum_clipped: SumClipped = sum_clipped
        if self.batches.compiled:
            from dpsgd_cli.clipping.compiling import Captured, Compiled  # takes a while to import

            self.sum_clipped = Compiled() if context.recipes[0].runtime.compile is True else Captured()

    @abstractmethod
    def spend(self, epoch: int, trial: int) -> None:
        """Charge the trial for the whole epoch, before anything of the epoch is released."""

    @abstractmethod
    def privatise(self, epoch: int, step: int) -> None:
        """Add noise to `pack.sums` in place, so that they may be released.

        Only one process calls it, with the sums of all processes; if `reduction.apart`, all call it, and each has the
        sums of all processes in its part of the numbers only.
        """

    def learning_rates(self, epoch: float) -> list[float]:
        """Return the learning rate of each trial in `epoch`."""
        rates = []
        for recipe, length in zip(self.context.recipes, self.lengths, strict=True):
            rate = section_of(recipe).rate
            if rate == "theorem":
                raise RecipeError(
                    f"method.learning_rate: there is no theorem for method {recipe.method.kind}; give a number"
                )
            rates.append(rate_at(rate, epoch, length))
        return rates

    def _rates(self, epoch: float) -> Tensor:
        """Return `learning_rates` as (R, 1).

        Raises RecipeError if a user's own method returns anything but one number per trial.
        """
        found: Any = self.learning_rates(epoch)
        numbers = isinstance(found, list | tuple) and all(isinstance(rate, int | float) for rate in found)
        if not numbers or len(found) != self.context.trials:
            raise RecipeError(
                f"{type(self).__name__}.learning_rates({epoch}) gives {found!r}; it must give a list of"
                f" {count(self.context.trials, 'number')}, one a trial"
            )
        return self.context.column(list(found))

    @property
    def epochs(self) -> int:
        return max(self.lengths)

    @property
    def steps(self) -> int:
        return self.batches.sampler.steps_per_epoch

    def unfinished(self, done: int) -> str | None:
        return None

    @property
    def output(self) -> Tensor:
        return self.context.pack.values if self.average is None else self.average.average

    def run_epoch(self, epoch: int) -> Diagnostics:
        over = [trial for trial, length in enumerate(self.lengths) if epoch >= length]
        for trial in range(self.context.trials):
            if trial not in over:
                self.spend(epoch, trial)
        if self.rate_changes:
            self.learning_rate = self._rates(epoch)
        # indices, not a mask: a mask would need a synchronisation with the GPU for its count
        held = to_device(torch.tensor(over, dtype=torch.long), self.context.pack.values.device)
        kept = {name: tensor[held] for name, tensor in self._trained().items()} if over else {}
        seen = Diagnostics(self.context.trials, self.context.pack.values.device)
        for step in range(epoch * self.steps, (epoch + 1) * self.steps):
            self.step(epoch, step, seen)
        for name, own in kept.items():
            self._trained()[name][held] = own
        team = self.context.team
        return seen if team.size == 1 else Diagnostics.of(team.total(seen.sums()))

    def step(self, epoch: int, step: int, seen: Diagnostics) -> None:
        """Run one step of every trial: batch, clipped sums, noise, mean, update."""
        pack = self.context.pack
        pack.sums.zero_()
        pack.session.passes.masks.begin(self.dropout_keys, step)
        self.begin()
        require_bound(pack, self.clipping)
        self.add_sums(epoch, step, seen)
        beside = [] if self.side_statistics is None else [self.side_statistics]
        for hook in self.around:
            hook.before_noise(beside)
        if self.reduction.adds_noise:
            self.privatise(epoch, step)
        gradient = pack.sums.div_(self.divisor).to(pack.values.dtype)
        for hook in self.around:
            hook.after_noise(epoch, step, gradient, beside)
        self.follow()
        if self.decays:
            gradient.addcmul_(pack.values, self.weight_decay)
        self.update.apply(pack.values, gradient, self._rate_of(step), step)
        if self.constrained:
            project_to_ball(pack.values, self.radii)
        if self.average is not None:
            self.average.add(pack.values, step)

    def _rate_of(self, step: int) -> Tensor:
        """Return the learning rate of a step, (R, 1), or (R, P) with groups of parameters."""
        if self.rates_by_step:
            # in the middle of the step, so that neither the first nor the last step has rate 0
            self.learning_rate = self._rates((step + 0.5) / self.steps)
        return self.learning_rate if self.factors is None else self.learning_rate * self.factors[0]

    def begin(self) -> None:
        """Prepare a step; does nothing unless overridden."""

    @property
    def side_statistics(self) -> Tensor | None:
        """Statistics released together with the gradient sum, shape (R, n), float64; None for none."""
        return None

    def units(self, epoch: int) -> Sequence[Tensor | float]:
        """Return the units in which an audit sees the sums, and those beside them (`AuditHook.around`)."""
        del epoch
        return [1.0]

    def follow(self) -> None:
        """Update the method's state from the released `side_statistics`; does nothing unless overridden."""

    def add_sums(self, epoch: int, step: int, seen: Diagnostics) -> None:
        """Add the clipped gradients of this process's part of the step's batch to `pack.sums`."""
        del epoch
        for examples in self.pieces(step):
            add_clipped_sums(self.context.pack, examples, self.context.loss, self.clipping, seen, self.sum_clipped)

    def pieces(self, step: int) -> Iterator[Examples]:
        """Return the step's batch as the model's input, in pieces that fit in memory."""
        return self.batches.pieces(step)

    def _trained(self) -> dict[str, Tensor]:
        """Return every tensor (R, n) that steps change and continue from, by name."""
        found = {"values": self.context.pack.values, **{f"update.{k}": v for k, v in self.update.state.items()}}
        if self.average is not None:
            found["average"] = self.average.average
            if self.average.previous is not None:
                found["previous"] = self.average.previous
        return found

    def state(self) -> dict[str, Any]:
        return {name: to_host(tensor) for name, tensor in self._trained().items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, tensor in self._trained().items():
            tensor.copy_(state[name])


class WithoutPrivacy(GradientMethod):
    """Method `sgd`: descent without privacy; its weights are not protected and its ledger stays empty."""

    def __init__(self, context: Context) -> None:
        self.lengths = [int(recipe.epochs) for recipe in context.recipes]
        super().__init__(context)

    def spend(self, epoch: int, trial: int) -> None:
        del epoch, trial

    def privatise(self, epoch: int, step: int) -> None:
        del epoch, step


class DpSgd(GradientMethod):
    """DP-SGD for R trials with one kind of clipping; bounds, schedules and lengths may differ between trials."""

    def __init__(self, context: Context) -> None:
        self.plans = context.plans_of(Plan)
        self.adaptive = AdaptiveSchedules(context, self.plans, context.recipes[0].data.task)
        self.lengths = self.adaptive.lengths
        super().__init__(context)
        if self.adaptive.runs and isinstance(section_of(context.recipes[0]).average, TailIterates):
            raise PrivacyError(
                "privacy.schedule validation ends training by itself, so method.averaging cannot count from the end;"
                " use ema or none"
            )
        self.sections = [recipe.required_privacy for recipe in context.recipes]
        pack = context.pack
        self.bounds = bounds_of(context, [section.clipping for section in self.sections])
        self.clipping = self.bounds.clipping
        self.sensitivities = self.bounds.sensitivities
        self.moves = context.column([replace_factor(plan.sampling.adjacency) for plan in self.plans])
        self.noise = NoiseSource(context.streams, pack.size, pack.values.device, pack.values.dtype)
        self.correlations = [None if p.correlated is None else NoiseStrategy.of(p.correlated) for p in self.plans]
        self.step_noise = step_noise(self.correlations, pack.size, pack.values.device)
        if context.team.size > 1 and type(self).privatise is DpSgd.privatise and context.watcher is None:
            apart = self.noise.apart and type(self.step_noise) is StepNoise
            self.around[0] = self.reduction = Reduction(context.team, pack.sums, apart)
        self._scale: tuple[int, Tensor, Grid | None] | None = None
        self._done = 0
        self.preconditioning, self.calibrating = None, None
        kinds = [recipe.method.conditioned for recipe in context.recipes if recipe.method.conditioned is not None]
        if kinds:
            self.preconditioning = Preconditioning(context, self.plans, kinds, context.columns)
        if any(recipe.method.calibrated is not None for recipe in context.recipes):
            norms = [section.clipping.norm_bound(None) for section in self.sections]
            self.calibrating = Calibrating(context, self.plans, norms, bool(kinds))
        self._inferred: Sequence[np.ndarray] = ()
        self._check_priced()

    def _check_priced(self) -> None:
        """Raise PrivacyError if batching, sizes or sensitivities differ from those that the plans priced."""
        table, settings = self.context.table, section_of(self.context.recipes[0])
        size = settings.batch or len(table)
        runs = (settings.batching, len(table), size)
        for plan, bound in zip(self.plans, self.sensitivities, strict=True):
            sampling = plan.sampling
            priced = (sampling.batching, sampling.records, sampling.batch_size)
            if priced != runs:
                raise PrivacyError(
                    f"the plan priced (batching, records, batch size) {priced} but not {runs}; plan this run anew"
                )
            moved = bound * replace_factor(sampling.adjacency)
            if not math.isclose(plan.sensitivity, moved, rel_tol=1e-6):
                raise PrivacyError(
                    f"the plan priced sensitivity {plan.sensitivity:g} under {sampling.adjacency}, but the bounds of"
                    f" {len(self.context.pack.layers)} layers give {moved:g}; plan this run anew"
                )

    @property
    def finished(self) -> bool:
        return self.epochs <= self._done

    def spend(self, epoch: int, trial: int) -> None:
        own = self.adaptive.releases(epoch, trial)
        for release in self.plans[trial].epochs[epoch] if own is None else own:
            self.context.ledgers[trial].spend(release, epoch)

    @property
    def output(self) -> Tensor:
        own = super().output
        own = own if self.preconditioning is None else self.preconditioning.through(own)
        return own if self.calibrating is None else self.calibrating.applied(own)

    def rows_for_output(self, table: Table) -> Table:
        return table if self.preconditioning is None else self.preconditioning.table(table)

    @property
    def cuts(self) -> Sequence[Tensor]:
        return () if self.preconditioning is None else self.preconditioning.cuts

    def after_training(self) -> dict[str, Sequence[np.ndarray]]:
        """Calibrate trials that were stopped before their last epoch, and make the rounds of intervals."""
        self.calibrate(range(self.context.trials))
        if not self._inferred and self.plans[0].mechanisms(INTERVALS):
            if self.preconditioning is not None:
                self.preconditioning.prepare()
            # behind a cut, weights of the preconditioned rows
            weights = super().output if self.cuts else self.output
            model = self.context.recipes[0].model
            bias = isinstance(model, OneLayer) and model.has_bias
            self._inferred = infer(self.context, self.plans, bias, weights, self.cuts)
        return {
            MAP: () if self.preconditioning is None else self.preconditioning.maps,
            INTERVALS: self._inferred,
            CALIBRATION: () if self.calibrating is None else [own.numpy() for own in self.calibrating.corrections],
        }

    @cached_property
    def coded(self) -> CodedSums | None:
        """Sums over all rows of a table of codes, from the preconditioner's release on; None if rows are needed."""
        if section_of(self.context.recipes[0]).batching != "full" or not fits(self.context):
            return None
        return CodedSums(self.context, None if self.preconditioning is None else self.preconditioning.ready)

    def add_sums(self, epoch: int, step: int, seen: Diagnostics) -> None:
        span = None if self.coded is None else self.batches.span(step)
        if self.coded is None or span is None:
            super().add_sums(epoch, step, seen)
        else:
            self.coded.add(*span, self.clipping, seen)

    def pieces(self, step: int) -> Iterator[Examples]:
        for x, y, mask in super().pieces(step):
            yield x if self.preconditioning is None else self.preconditioning.units(x), y, mask

    def run_epoch(self, epoch: int) -> Diagnostics:
        if self.preconditioning is not None:
            self.preconditioning.prepare()
        # a number that no step has
        self.context.pack.session.passes.masks.begin(self.dropout_keys, -1 - epoch)
        self.clipping = self.bounds.clipping
        seen = super().run_epoch(epoch)
        self._done = epoch + 1
        self.adaptive.look(epoch, self.output)
        self.calibrate([trial for trial, length in enumerate(self.lengths) if length == self._done])
        return seen

    def calibrate(self, ended: Sequence[int]) -> None:
        """Release the corrections of the trials that `ended`, once each (`calibration/price.py`)."""
        if self.calibrating is not None:
            self.calibrating.release(ended, super().output, self.output, self.rows_for_output(self.context.table))

    def privatise(self, epoch: int, step: int) -> None:
        if self._scale is None or self._scale[0] != epoch:
            self._scale = (epoch, self._noise_scale(epoch), self._grid(epoch) if self.noise.secure else None)
        unit, (_, scale, grid) = self.bounds.unit, self._scale
        sums, team, scale = self.context.pack.sums, self.context.team, scale if unit is None else scale * unit
        if self.reduction.apart:
            self.noise.add(sums, step, scale, grid, team.part(sums.numel()))
        else:
            self.step_noise.add(sums, step, self.noise, scale, grid)
        if team.first:
            self.bounds.privatise(step, self.moves, grid)

    def _grid(self, epoch: int) -> Grid:
        """Return the noise grid of all trials' sums in `epoch` and of the statistics released with them."""
        pack, known = self.context.pack, self.correlations
        multipliers = {of(epoch, trial) for trial in range(pack.trials) for of in (self._multiplier, self._applied)}
        steps, moved = 1, 1.0
        if known[0] is not None:
            # correlated noise takes back noise of steps with other multipliers, in their grid spacings
            multipliers |= {z for plan in self.plans for z in plan.noise_multipliers}
            steps = self.epochs * self.steps
            moved = max(multipliers) / min(multipliers)
            moved *= max(one.moved_by_rounding for one in known if one is not None)
        numbers = pack.size + (0 if self.side_statistics is None else self.side_statistics.shape[1])
        return Grid.of(numbers * steps, self.context.table.summed, multipliers, moved)

    def begin(self) -> None:
        self.bounds.begin()
        self.clipping = self.bounds.clipping

    @property
    def side_statistics(self) -> Tensor | None:
        return self.bounds.side_statistics

    def follow(self) -> None:
        self.bounds.follow(self.divisor)

    def units(self, epoch: int) -> Sequence[Tensor | float]:
        charged, applied = (
            self.context.column([of(epoch, trial) for trial in range(self.context.trials)]).double()
            for of in (self._multiplier, self._applied)
        )
        return self.bounds.units(charged, applied)

    def _noise_scale(self, epoch: int) -> Tensor:
        """Return the standard deviation of the noise on the sum: (R, 1), or (R, P) if it differs between layers."""
        multipliers = [self._applied(epoch, trial) for trial in range(self.context.trials)]
        # rounded to float32, secure noise could be less than what is charged; seeded runs keep their dtype
        dtype = torch.float64 if self.noise.secure else self.context.pack.values.dtype
        deviations = [z * plan.sensitivity for z, plan in zip(multipliers, self.plans, strict=True)]
        scale = self.context.column(deviations, dtype)
        published = [section.clipping.noise_by_layer for section in self.sections]
        if not any(published):
            return scale
        doubled = [plan.sensitivity / bound for plan, bound in zip(self.plans, self.sensitivities, strict=True)]
        unit, multiplier = self.context.column(doubled, dtype), self.context.column(multipliers, dtype)
        by_layer = self.bounds.clipping.norms.T * unit * multiplier
        chosen = self.context.column([float(own) for own in published]) > 0
        return torch.where(chosen, by_layer.index_select(1, self.context.pack.group_of), scale)

    def _multiplier(self, epoch: int, trial: int) -> float:
        """Return the noise multiplier of a trial in `epoch`; its last one if the trial is over."""
        if trial in self.adaptive.runs:
            return self.adaptive.runs[trial].noise.multiplier
        planned = self.plans[trial].noise_multipliers
        return planned[min(epoch, len(planned) - 1)]

    def _applied(self, epoch: int, trial: int) -> float:
        """Return the noise multiplier of the gradient sums; above the charged one if counts are released, too."""
        return self.sections[trial].clipping.applied(self._multiplier(epoch, trial))

    def _trained(self) -> dict[str, Tensor]:
        return super()._trained() | self.bounds.kept

    def published(self) -> dict[str, list[float]]:
        return self.bounds.published()

    def charged_for(self, done: int) -> bool:
        return self.adaptive.charged_for(done)

    def state(self) -> dict[str, Any]:
        own = {"adaptive": self.adaptive.state(), "done": self._done, "noise": self.step_noise.state()}
        # they never change, so snapshots share them
        own |= {"cuts": [] if self.preconditioning is None else self.preconditioning.kept}
        own |= {"calibration": None if self.calibrating is None else self.calibrating.corrections.clone()}
        return super().state() | own

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.adaptive.load_state(state["adaptive"])
        self.step_noise.load_state(state["noise"])
        self._done = state["done"]
        if self.preconditioning is not None and state["cuts"]:
            self.preconditioning.load(state["cuts"])
        if self.calibrating is not None:
            self.calibrating.corrections.copy_(state["calibration"])
