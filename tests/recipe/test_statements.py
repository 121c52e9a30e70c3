"""Registries that are unions of sections: what every kind states is there, has no default, and is true."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, Adjacency
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.clipping.bounds import Bounds
from dpsgd_cli.clipping.settings import Clipping
from dpsgd_cli.common.plugins import named
from dpsgd_cli.common.sections import Section
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.dp_sgd.optimizers import make_average, make_update
from dpsgd_cli.methods.dp_sgd.settings import Averaging, Optimizer
from dpsgd_cli.methods.experiment import Descriptor, plan_for
from dpsgd_cli.methods.pate.settings import Aggregation, AggregationRule
from dpsgd_cli.methods.settings import METHODS
from dpsgd_cli.preconditioning.price import Preconditioner
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.schedules.settings import Schedule
from tests.methods.small_problem import recipe


def kinds(union: Any) -> list[Any]:
    """The classes of an annotated union."""
    return list(get_args(get_args(union)[0]))


def flat(classes: list[Any]) -> list[Any]:
    return [own for one in classes for own in (get_args(one) or (one,))]


OPTIMIZERS, CLIPPINGS, AGGREGATIONS = kinds(Optimizer), kinds(Clipping), kinds(Aggregation)
SCHEDULES = flat(kinds(Schedule))
PRECONDITIONERS = kinds(Preconditioner)
STATED = [*PRECONDITIONERS, *OPTIMIZERS, *CLIPPINGS, *AGGREGATIONS, *SCHEDULES, *METHODS.values()]
SAMPLES: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.5},
    "adam": {},
    "adamw": {},
    "flat": {"norm": 0.7},
    "per-layer": {"norm": [0.3, 0.4]},
    "automatic": {"norm": 0.7},
    "quantile": {"count_noise": 8.0},
    "uniform": {"initial": 3.0},
    "auto": {"initial": 3.0},
    "time": {"initial": 3.0, "decay": 0.1},
    "exponential": {"initial": 3.0, "decay": 0.1},
    "step": {"initial": 3.0, "decay": 0.5, "period": 2},
    "polynomial": {"initial": 3.0, "final": 1.0, "decay": 1.0, "period": 4},
    "piecewise": {"parts": [{"schedule": {"kind": "uniform", "initial": 3.0}}]},
    "list": {"multipliers": [3.0, 2.0, 1.0]},
    "influence": {"initial": 3.0, "weights": [1.0, 2.0, 3.0]},
    "validation": {"initial": 3.0, "decay": 0.5},
    "lnmax": {},
    "gnmax": {},
    "confident-gnmax": {},
}
"""Settings of every kind whose statements are tried."""


def made(kind: Any) -> Any:
    return kind.model_validate(SAMPLES[kind.model_fields["kind"].default])


def by_name(kind: Any) -> str:
    return str(kind.model_fields["kind"].default)


def test_every_kind_is_tried() -> None:
    tried = [*OPTIMIZERS, *CLIPPINGS, *AGGREGATIONS, *SCHEDULES]
    assert {by_name(kind) for kind in tried} == set(SAMPLES)
    assert all(kind.must_state for kind in STATED)


@pytest.mark.parametrize("kind", STATED, ids=by_name)
def test_a_kind_that_leaves_out_a_statement_cannot_be_made_even_where_it_derives_from_one(kind: Any) -> None:
    for left_out in kind.must_state:
        body = {name: getattr(kind, name) for name in kind.must_state if name != left_out}
        with pytest.raises(TypeError, match=f"must state {left_out}"):
            type(kind)("New", (kind,), {"__module__": __name__, **body})


def test_an_optimizer_or_average_that_nothing_makes_is_an_error_and_not_another_one() -> None:
    class Unknown(Section):
        fraction: float = 0.5

    with pytest.raises(AttributeError, match="made"):
        make_update(Unknown(), torch.zeros(1, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="averages by Unknown"):
        make_average(Unknown(), torch.zeros(1, 3), [4])  # type: ignore[arg-type]
    for kind in kinds(Averaging):
        assert make_average(kind(), torch.zeros(1, 3), [4]) is not None


@pytest.mark.parametrize("kind", CLIPPINGS, ids=by_name)
def test_no_factor_leaves_a_gradient_longer_than_its_bound_and_plain_ones_leave_short_ones(kind: Any) -> None:
    settings = made(kind)
    factors = named(settings.factors)
    bounds = torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64).unsqueeze(1)
    norms = torch.cat([torch.zeros(1), torch.logspace(-12, 9, 400)]).double()
    lengths = factors(bounds, norms, **settings.factor_settings) * norms
    assert bool((lengths.nan_to_num(nan=0.0) <= bounds * (1 + 1e-12)).all())
    short = (norms <= bounds) & (norms > 0)
    unchanged = bool((lengths[short] == norms.expand_as(lengths)[short]).all())
    assert settings.plain == (unchanged and not settings.in_units)


@pytest.mark.parametrize("kind", CLIPPINGS, ids=by_name)
def test_what_holds_bounds_agrees_with_what_is_said_of_them(kind: Any) -> None:
    """Bounds that move begin each step anew; those in units are charged as 1."""
    settings, held = made(kind), named(kind.held)
    assert issubclass(held, Bounds)
    assert settings.moves == (held.begin is not Bounds.begin)
    assert settings.in_units == (held is not Bounds)
    assert not settings.in_units or settings.bounds(2) == [1.0]
    assert settings.norm_bound(2) == pytest.approx(math.sqrt(sum(bound**2 for bound in settings.bounds(2))))


@pytest.mark.parametrize("kind", SCHEDULES, ids=by_name)
def test_schedules_follow_their_first_noise_just_where_they_say_so(kind: Any) -> None:
    settings = made(kind)
    follows = False
    if "initial" in kind.model_fields:
        double = settings.model_copy(update={"initial": 2 * settings.initial})
        follows = all(double.noise(t) == pytest.approx(2 * settings.noise(t)) for t in range(3))
    assert settings.follows_initial == follows


@pytest.mark.parametrize("kind", SCHEDULES, ids=by_name)
def test_noise_that_is_chosen_on_the_way_has_a_plan_that_says_so_and_all_other_noise_is_planned(kind: Any) -> None:
    settings = made(kind)
    if by_name(kind) == "python":
        assert not settings.adaptive
        return
    one = recipe(
        {"kind": "dp-gd"},
        privacy={"schedule": settings.model_dump(), "budget": {"rho": 50.0}, "delta": 1e-5},
        data={"path": "small.csv", "target": "y", "validation": {"records": 10, "public": True}},
        epochs=3,
    )
    plan = plan_for(one, Facts(60, feature_bound=1.0))
    assert plan.is_adaptive == settings.adaptive
    assert len(plan.noise_multipliers) == (1 if settings.adaptive else 3)


@pytest.mark.parametrize("kind", SCHEDULES, ids=by_name)
def test_what_is_planned_depends_on_every_number_of_a_schedule_unless_it_chooses_on_the_way(kind: Any) -> None:
    """A number that leaves all planned noise alone can only act on the way."""
    settings = made(kind)
    numbers = {name: value for name, value in settings if isinstance(value, int | float)}
    idle = []
    for name, value in numbers.items():
        other = settings.model_copy(update={name: value + 2 if isinstance(value, int) else value * 0.7})
        if all(other.noise(t) == settings.noise(t) for t in range(min(12, settings.length or 12))):
            idle.append(name)
    assert bool(idle) == settings.adaptive


def test_a_schedule_that_chooses_its_noise_and_has_no_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = next(kind for kind in SCHEDULES if by_name(kind) == "uniform")
    one = recipe({"kind": "dp-gd"}, privacy={"schedule": {"kind": "uniform", "initial": 3.0}, "delta": 1e-5}, epochs=3)
    monkeypatch.setattr(uniform, "adaptive", True)
    with pytest.raises(PrivacyError, match="chooses its noise while it runs"):
        plan_for(one, Facts(60, feature_bound=1.0))


@pytest.mark.parametrize("kind", AGGREGATIONS, ids=by_name)
def test_every_rule_of_votes_charges_something(kind: Any) -> None:
    rule = made(kind)
    for adjacency in NEIGHBOURS:
        charged = [one for one in (rule.asked(adjacency), rule.answered(adjacency)) if one is not None]
        assert charged
        assert {one.adjacency for one in charged} == {adjacency}


@pytest.mark.parametrize("left_out", ["asked", "answered", "accepts", "label", "renyi"])
def test_a_rule_of_votes_that_does_not_say_what_it_releases_cannot_be_made(left_out: str) -> None:
    names = {"asked", "answered", "accepts", "label", "renyi"} - {left_out}
    body = dict.fromkeys(names, lambda self, *given: None) | {"__module__": __name__}
    with pytest.raises(TypeError, match=left_out):
        type("New", (AggregationRule,), body)()


ONE_RECORD: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "second-moment": lambda u: np.outer(u, u).ravel(),
    "marginals": lambda u: np.abs(u),
}
"""What one record of norm at most 1 adds to what each preconditioner is made of; marginals have no negative entry."""


@pytest.mark.parametrize("adjacency", NEIGHBOURS)
@pytest.mark.parametrize("kind", PRECONDITIONERS, ids=by_name)
def test_no_record_moves_a_preconditioner_further_than_its_stated_sensitivity(kind: Any, adjacency: Adjacency) -> None:
    random, stated = np.random.default_rng(0), named(kind.sensitivity)(adjacency)
    rows = [row / np.linalg.norm(row) for row in random.normal(size=(60, 3))] + list(np.eye(3)) + [np.zeros(3)]
    parts = [ONE_RECORD[by_name(kind)](row) for row in rows]
    others = parts if NEIGHBOURS[adjacency].replaced else [0 * parts[0]]
    moved = max(float(np.linalg.norm(one - other)) for one in parts for other in others)
    assert 0.99 * stated <= moved <= stated * (1 + 1e-9)
    assert set(ONE_RECORD) == {by_name(one) for one in PRECONDITIONERS}


def test_what_has_no_privacy_has_no_planner_and_no_neighbours() -> None:
    for method in METHODS.values():
        told = method.descriptor
        assert (told.privacy == "refused") == (told.planner is None) == (told.adjacencies == ())
    with pytest.raises(ValueError, match="go with privacy"):
        Descriptor(runs="", planner=None, privacy="needed", adjacencies=("zero-out",), only_convex=False)
    with pytest.raises(ValueError, match="go with privacy"):
        Descriptor(runs="", planner="planner", privacy="needed", adjacencies=(), only_convex=False)


PLANNED: dict[str, dict[str, Any]] = {
    "dp-sgd": {"batching": "poisson", "batch_size": 6},
    "private-selection": {
        "batching": "full",
        "candidates": [{"kind": "uniform", "initial": 30.0}, {"kind": "uniform", "initial": 40.0}],
    },
    "dp-gd": {},
    "dp-agd": {},
    "objective-perturbation": {},
    "output-perturbation": {},
    "dp-least-squares": {},
    "privgene": {},
    "majority": {},
    "python": {"file": "own.py", "batching": "full"},
}
BUDGETS = {"private-selection": {"rho": 2.0}}


def of_method(name: str, adjacency: Adjacency) -> Recipe:
    linear = name in ("dp-least-squares", "python")
    privacy: dict[str, Any] = {"adjacency": adjacency, "budget": BUDGETS.get(name, {"epsilon": 4.0, "delta": 1e-5})}
    return recipe(
        {"kind": name, **PLANNED[name]},
        model={"kind": "linear"} if linear else {"kind": "convex", "l2": 0.01},
        privacy=privacy | ({"delta": 1e-5} if name in BUDGETS else {}),
        **({"epochs": 2} if "learning_rate" in METHODS[name].model_fields else {}),
    )


def test_every_method_with_a_guarantee_is_planned_here() -> None:
    """But PATE, whose recipes need public records (`tests/methods/test_pate.py`)."""
    assert set(PLANNED) | {"pate"} == {name for name, one in METHODS.items() if one.descriptor.privacy != "refused"}


@pytest.mark.parametrize("adjacency", NEIGHBOURS)
@pytest.mark.parametrize("name", PLANNED)
def test_a_method_is_planned_for_the_neighbours_that_it_states_and_refused_for_others(
    name: str, adjacency: Adjacency
) -> None:
    one = of_method(name, adjacency)
    if adjacency in METHODS[name].descriptor.adjacencies:
        plan = plan_for(one, Facts(60, feature_bound=2.0))
        assert {release.mechanism.adjacency for release in plan.releases} <= {adjacency}
        return
    with pytest.raises(PrivacyError, match=f"method {name} (is proved for|cuts the records)"):
        plan_for(one, Facts(60, feature_bound=2.0))
