"""PATE: teachers on disjoint parts of the training records vote; a student learns from the released answers.

Released: the aggregation's answers to the first `queries` public records, in an order that a seed decides
(`methods/pate/settings.py`, with sensitivities and theorems). Nothing else computed from a training record reaches the
student, and only the student is published.

Why one record changes one vote. A record's part follows from its own coin (`data/splits.py`) and depends on no other
record. Teacher i is a function of its part, of streams named after it, and of public settings. The pack separates
teachers as it separates trials, and gives each the same public number of places for records (a place without a record
adds nothing). So neighbours under any adjacency differ in one teacher, and in one vote for each query.

Charges: all at once before the first answer if every query costs the same; else one by one, each before its release,
until the filter refuses. The noise of a query is drawn once, from a stream named after the query. A checkpoint keeps
answers, so that a resumed run draws none again.

NON-PRIVATE: votes, which the checkpoint keeps. The ensemble's accuracy and the data-dependent price are functions of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, Release
from dpsgd_cli.batching.memory import rows_that_fit
from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.data.dataset import UNKNOWN
from dpsgd_cli.data.splits import SECOND_FILE, Keys, places_for
from dpsgd_cli.engine import models
from dpsgd_cli.engine.independence import check_model, check_outputs, stand_in_rows
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.precision import MOST_ROWS
from dpsgd_cli.engine.streams import Streams
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import BudgetExceeded, PrivacyError, RunError
from dpsgd_cli.methods.base import Findings, Method
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.dp_sgd.run import WithoutPrivacy
from dpsgd_cli.methods.dp_sgd.settings import SgdMethod
from dpsgd_cli.methods.experiment import Experiment
from dpsgd_cli.methods.pate.price import VotingPlan
from dpsgd_cli.methods.pate.settings import AggregationRule, PateMethod, Training
from dpsgd_cli.methods.pate.votes import epsilon_at
from dpsgd_cli.noise.run import gaussian, laplace

NO_ANSWER, NOT_ASKED = -1, -2
_NUMBERS_AT_ONCE = 1 << 25
"""Approximate number of parameters of a pack of teachers; 4 bytes each, and several times that for a step."""


@dataclass(frozen=True)
class _QueryNoise:
    """Noise on statistics of a query's votes, from the trial's stream."""

    stream: Streams
    query: int
    teachers: int

    def gaussian(self, purpose: str, exact: np.ndarray, mechanism: GaussianSum) -> np.ndarray:
        return gaussian(self.stream, f"pate-{purpose}", self.query, exact, mechanism, self.teachers)

    def laplace(self, purpose: str, exact: np.ndarray, epsilon: float, sensitivity: float, changed: int) -> np.ndarray:
        return laplace(self.stream, f"pate-{purpose}", self.query, exact, epsilon, sensitivity, changed)


class Pate(Method):
    """PATE for R trials. Epoch 0 trains the teachers and releases answers; later epochs train the student."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = context.recipes[0].method
        assert isinstance(settings, PateMethod)
        if context.public is None or context.keys is None:
            raise PrivacyError("method pate needs public records (data.public) and training records in memory")
        self.settings = settings
        self.public = context.public
        self.plans = context.plans_of(VotingPlan)
        self.order = [own.permutation("queries", 0, len(self.public)) for own in context.lasting]
        self.votes: list[np.ndarray] = []
        self.answers: list[np.ndarray] = []
        self.predicted_right: list[dict[str, float | None]] = []
        self.student: WithoutPrivacy | None = None

    @property
    def epochs(self) -> int:
        return 1 + self.settings.student.epochs

    @property
    def steps(self) -> int:
        return 1

    def unfinished(self, done: int) -> str | None:
        return "its student has learnt nothing yet" if done < 2 else None

    def run_epoch(self, epoch: int) -> Diagnostics:
        if epoch == 0:
            for trial in range(self.context.trials):
                self._release(trial)
            self._enrol()
        elif self.student is not None:
            return self.student.run_epoch(epoch - 1)
        return Diagnostics(self.context.trials, self.context.pack.values.device)

    @property
    def output(self) -> Tensor:
        return self.context.pack.values if self.student is None else self.student.output

    def _release(self, trial: int) -> None:
        """Train the teachers of a trial, count their votes, and answer the queries."""
        plan, classes = self.plans[trial], _classes(self.context)
        predicted = Teaching(self.context, self.settings, trial).predictions()
        self.predicted_right.append(_of_known("teachers_right", predicted, self.public.y.cpu().numpy()))
        asked = predicted[:, self.order[trial][: plan.queries]]
        votes = np.stack([(asked == label).sum(axis=0) for label in range(classes)], axis=1)
        self.votes.append(votes)
        self.answers.append(self.answer(trial, plan, votes))

    def answer(self, trial: int, plan: VotingPlan, votes: np.ndarray) -> np.ndarray:
        """Return the released label of each query (Q,), or NO_ANSWER or NOT_ASKED; charge the trial's ledger."""
        answers = np.full(len(votes), NOT_ASKED)
        if not plan.is_adaptive:
            for release in plan.epochs[0]:
                self.context.ledgers[trial].spend(release, 0)
        try:
            for query, counts in enumerate(votes):
                if (answers >= 0).sum() == plan.answers:
                    break
                self._ask(trial, query, counts, answers)
        except BudgetExceeded:
            if not plan.is_adaptive:
                raise
        return answers

    def _ask(self, trial: int, query: int, counts: np.ndarray, answers: np.ndarray) -> None:
        """Charge one query and write its answer to `answers`; BudgetExceeded before a charge that does not fit."""
        plan, rule = self.plans[trial], _rule(self.plans[trial])

        noise = _QueryNoise(self.context.streams[trial], query, self.settings.teachers.count)

        def charge(mechanism: Mechanism | None) -> None:
            if plan.is_adaptive and mechanism is not None:
                self.context.ledgers[trial].spend(Release(mechanism), 0)

        charge(rule.asked(plan.sampling.adjacency))
        answers[query] = NO_ANSWER
        if rule.accepts(counts, noise):
            charge(rule.answered(plan.sampling.adjacency))
            answers[query] = rule.label(counts, noise)

    def _enrol(self) -> None:
        """Create the student, which learns from the answered queries; without any answer there is none."""
        lessons = [_lessons(order, answers) for order, answers in zip(self.order, self.answers, strict=True)]
        if not any(len(labels) for _, labels in lessons):
            return
        most = max(plan.queries for plan in self.plans)
        recipes = tuple(_descent(recipe, self.settings.student) for recipe in self.context.recipes)
        table, ledgers = _joined(self.public, lessons, most), _unlimited(recipes)
        self.student = WithoutPrivacy(replace(self.context, recipes=recipes, table=table, ledgers=ledgers))

    def findings(self) -> Findings | None:
        if not self.answers:
            return None
        truth = self.public.y.cpu().numpy()
        claimed, measured = [], []
        for trial, (answers, votes) in enumerate(zip(self.answers, self.votes, strict=True)):
            labels = truth[self.order[trial][: len(answers)]]
            given = answers >= 0
            row: dict[str, Any] = {"queries": int((answers > NOT_ASKED).sum()), "answered": int(given.sum())}
            row |= _of_known("answers_right", answers[given], labels[given])
            claimed.append(row)
            asked = answers > NOT_ASKED
            renyi = _rule(self.plans[trial]).renyi(votes[asked], given[asked])
            price = None if renyi is None else epsilon_at(renyi, self.plans[trial].delta)
            measured.append(
                {
                    "epsilon_data_dependent": price,
                    **_of_known("ensemble_right", votes.argmax(axis=1), labels),
                    **self.predicted_right[trial],
                }
            )
        empty = [str(trial) for trial, row in enumerate(claimed) if not row["answered"]]
        told = f"no query was answered (trial {', '.join(empty)}), so the student is untrained; lower the threshold"
        return Findings(claimed, measured, (told,) if empty else ())

    def charged_for(self, done: int) -> bool:
        if done == 0:
            return not self.answers
        counted = zip(self.plans, self.answers, self.context.ledgers, strict=True)
        return all(_agrees(plan, answers, ledger) for plan, answers, ledger in counted)

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "votes": [torch.from_numpy(votes) for votes in self.votes],
            "answers": [torch.from_numpy(answers) for answers in self.answers],
            "predicted_right": list(self.predicted_right),
            "student": None if self.student is None else self.student.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.context.pack.values.copy_(state["values"])
        self.votes = [votes.numpy() for votes in state["votes"]]
        self.answers = [answers.numpy() for answers in state["answers"]]
        self.predicted_right = list(state["predicted_right"])
        if state["student"] is not None:
            self._enrol()
            assert self.student is not None
            self.student.load_state(state["student"])


class Teaching:
    """Teachers of one trial, trained in packs of a bounded number of parameters."""

    def __init__(self, context: Context, settings: PateMethod, trial: int) -> None:
        self.context, self.trial, self.count = context, trial, settings.teachers.count
        self.recipe = _descent(context.recipes[trial], settings.teachers)
        if settings.teachers.model is not None:
            self.recipe = self.recipe.changed(model=settings.teachers.model)
        assert context.public is not None and context.keys is not None
        self.public = _rows(context.public, trial)
        table = context.table
        self.table = Table(_rows(table, trial), table.y, per_trial=False)
        lasting = context.lasting[trial]
        seed = lasting.integer("parts") % 2**32
        self.part = context.keys.parts(self.count, "teachers", seed)
        self.seeds = [lasting.under(f"teacher-{i}").integer("init") for i in range(self.count)]
        self.records = _places(context.keys, self.count, len(context.table))

    def predictions(self) -> np.ndarray:
        """Train all teachers and return their classes for the public records, int16 (n, Q). NON-PRIVATE."""
        size = max(1, _NUMBERS_AT_ONCE // self._pack([0]).size)
        pieces = [range(start, min(start + size, self.count)) for start in range(0, self.count, size)]
        return np.concatenate([self.of_piece(piece) for piece in pieces])

    def _pack(self, numbers: Sequence[int]) -> Pack:
        context = self.context
        place = Placement(context.pack.values.device, context.pack.values.dtype)
        shape = self.table.input_shape
        build = models.builder(self.recipe.model, shape, _classes(context), context.base)
        pack = Pack(build, [self.seeds[i] for i in numbers], place, self.recipe.model.kind in models.BUILT_IN)
        rows = stand_in_rows(shape, self.table.x)
        check_outputs(pack, rows, (_classes(context),))
        check_model(pack, shape, self.table.x)
        return pack

    def of_piece(self, numbers: Sequence[int]) -> np.ndarray:
        pack = self._pack(numbers)
        rows = min(rows_that_fit(pack, stand_in_rows(self.table.input_shape, self.table.x)), MOST_ROWS)
        held_out = torch.from_numpy(self.part[:, None] != np.asarray(numbers))
        streams = self.context.streams[self.trial]
        recipes = (self.recipe,) * len(numbers)
        method = WithoutPrivacy(
            replace(
                self.context,
                recipes=recipes,
                plans=(None,) * len(numbers),
                ledgers=_unlimited(recipes),
                streams=tuple(streams.under(f"teacher-{i}") for i in numbers),
                pack=pack,
                table=self.table.with_folds(held_out, self.records),
                most_rows=rows,
            )
        )
        for epoch in range(method.epochs):
            method.run_epoch(epoch)
        pack.values.copy_(method.output)
        return _classified(pack, self.public[None], rows)


def _places(keys: Keys, teachers: int, records: int) -> int:
    """Return the public number of places of a teacher's part; the training part has places for `records`."""
    if not keys.by_place:
        return places_for(records, 1 / teachers)
    # each part has an equal share of each file's places, and one more if they do not divide evenly
    last = [keys.values[keys.values // SECOND_FILE == file].max() for file in np.unique(keys.values // SECOND_FILE)]
    return int(sum(place % SECOND_FILE // teachers + 1 for place in last))


@torch.no_grad()
def _classified(pack: Pack, x: Tensor, most: int) -> np.ndarray:
    """Return the classes (n, Q) that the pack's models predict for rows (n or 1, Q, ...), int16."""
    pieces = [pack(x[:, start : start + most]).argmax(dim=-1) for start in range(0, x.shape[1], most)]
    return torch.cat(pieces, dim=1).cpu().numpy().astype(np.int16)


def _of_known(name: str, predicted: np.ndarray, labels: np.ndarray) -> dict[str, float | None]:
    """Return the accuracy of predictions (..., Q) under `name`; empty if a label (Q,) is unknown."""
    if (labels == UNKNOWN).any():
        return {}
    return {name: float((predicted == labels).mean()) if len(labels) else None}


def _classes(context: Context) -> int:
    with torch.no_grad():
        outputs = context.pack(context.table.x.new_zeros(1, 1, *context.table.input_shape)).shape[-1]
    if outputs < 2:
        raise RunError("method pate counts votes for at least two classes, and the data have one")
    return int(outputs)


def _descent(recipe: Experiment, settings: Training) -> Experiment:
    """Return the recipe that trains by `settings` alone, without privacy."""
    own = settings.model_dump(include=set(SgdMethod.model_fields) - {"kind"})
    changes = {"method": SgdMethod(**own), "privacy": None, "epochs": settings.epochs, "folds": None}
    # rows are prepared, and what their private columns hold has been released
    columns = ("discovery", "bounds", "categorical") if recipe.data.private_columns else ()
    prepared = dict.fromkeys(("evaluation", *columns))
    return recipe.changed(**changes, data=recipe.data.changed(**prepared))


def _unlimited(recipes: Sequence[Experiment]) -> tuple[Ledger, ...]:
    """Return empty ledgers, for trainings that release nothing themselves."""
    return tuple(Ledger() for _ in recipes)


def _rows(table: Table, trial: int) -> Tensor:
    return table.x[trial] if table.per_trial else table.x


def _lessons(order: np.ndarray, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows (n,) of public records with an answer, and their labels (n,), int64.

    `answers` belong to the first records in `order`; a negative one is no answer.
    """
    given = np.flatnonzero(answers >= 0)
    return order[given], answers[given].astype(np.int64)


def _joined(public: Table, lessons: Sequence[tuple[np.ndarray, np.ndarray]], most: int) -> Table:
    """Return one table of all trials' lessons; each trial uses its own, in `most` places."""
    device = public.y.device
    x = torch.cat([_rows(public, t)[torch.from_numpy(rows).to(device)] for t, (rows, _) in enumerate(lessons)])
    y = torch.from_numpy(np.concatenate([labels for _, labels in lessons])).to(device)
    owner = np.repeat(np.arange(len(lessons)), [len(rows) for rows, _ in lessons])
    held_out = torch.from_numpy(owner[:, None] != np.arange(len(lessons)))
    return Table(x, y, per_trial=False).with_folds(held_out, most)


def _rule(plan: VotingPlan) -> AggregationRule:
    assert plan.aggregation is not None
    return plan.aggregation


def _agrees(plan: VotingPlan, answers: np.ndarray, ledger: Ledger) -> bool:
    """Return True if a ledger holds the cost of the answers.

    A query whose answer the filter refused was charged as asked, but not as answered.
    """
    if not plan.is_adaptive:
        return True
    adjacency, rule = plan.sampling.adjacency, _rule(plan)
    charged: dict[Mechanism | None, int] = {release.mechanism: release.count for release in ledger.releases}
    asked, answered = charged.get(rule.asked(adjacency), 0), charged.get(rule.answered(adjacency), 0)
    return asked == (answers > NOT_ASKED).sum() and answered == (answers >= 0).sum()
