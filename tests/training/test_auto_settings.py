"""The rule for what a recipe leaves `auto`: what it gives, what it reads, and that everybody gets the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from scipy.optimize import brentq
from scipy.stats import norm

from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.clipping.settings import FlatClipping
from dpsgd_cli.engine.settings import OneLayer
from dpsgd_cli.errors import UsageError
from dpsgd_cli.main import main
from dpsgd_cli.methods.dp_sgd.settings import Gradient
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe, resolved
from dpsgd_cli.training import auto_settings, loop
from dpsgd_cli.training.auto_rule import (
    COLUMNS_TARGETS,
    LINEAR,
    MLP,
    PRECONDITIONED,
    PublicFacts,
    RuleConstants,
    RuleProblem,
)
from dpsgd_cli.training.plans import plan_and_outline, resolve_auto
from dpsgd_cli.training.start import Member, start
from tests.conftest import Train

RECIPE = """
name: own
data: {path: own.csv, target: y, classes: [0, 1], bounds: {a: [0, 9], b: [0, 1]}, preprocess: [{bin: {}}]}
model: {kind: convex}
method: {kind: dp-gd}
privacy: {budget: {epsilon: 2, delta: 1.0e-4}}
seed: 0
"""


RECORDS = 454
"""Places of the training part of 500 records, about a fifth of which are test records (`data/splits.py`)."""


def rows(seed: int, n: int = 500) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    found = pd.DataFrame({"a": random.integers(0, 10, n), "b": random.random(n)})
    return found.assign(y=(found.a / 9 + found.b + random.normal(size=n) > 1).astype(int))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    rows(0).to_csv(tmp_path / "own.csv", index=False)
    (tmp_path / "own.yaml").write_text(RECIPE)
    return tmp_path / "own.yaml"


def found(file: Path | str, *overrides: str) -> Any:
    return resolve_auto(load_recipe(str(file), overrides))


def has_auto(recipe: Any) -> bool:
    """Return True if any setting of the recipe is `auto`."""
    method, privacy = recipe.method, recipe.privacy
    settings: list[Any] = [recipe.epochs, *auto_settings._of_features(recipe).values()]
    if isinstance(recipe.model, OneLayer):
        settings.append(recipe.model.bias)
    if isinstance(method, Gradient):
        settings += [method.learning_rate, method.batch_size, method.averaging]
        settings += [getattr(method.optimizer, "momentum", None), getattr(method, "preconditioner", None)]
    if privacy is not None:
        settings.append(privacy.schedule.kind)
    if privacy is not None and isinstance(privacy.clipping, FlatClipping):
        settings.append(privacy.clipping.norm)
    return any(isinstance(value, str) and value == "auto" for value in settings)


def values(loaded: Any) -> dict[str, Any]:
    return {choice.key: choice.value for choice in loaded.chosen}


def mu_of(epsilon: float, delta: float) -> float:
    """Balle and Wang 2018: delta of a Gaussian mechanism of mu at epsilon."""

    def over(mu: float) -> float:
        down, up = norm.cdf(mu / 2 - epsilon / mu), norm.logcdf(-mu / 2 - epsilon / mu)
        return float(down - math.exp(min(epsilon + up, 0)) - delta)

    return float(brentq(over, 1e-4, 100))


@pytest.mark.parametrize(
    ("given", "terms", "left", "least", "sampling"),
    [("null", LINEAR, 1, 0.5, 0), ("auto", PRECONDITIONED, 0.95, 0.4, 0.2)],
)
def test_all_noise_together_moves_an_output_by_what_the_rule_says(
    own: Path, given: str, terms: RuleConstants, left: float, least: float, sampling: float
) -> None:
    """T steps of noise z C / n, z = sqrt(T) / mu, at a reach of rate / (1 - momentum); the row is 1 long.

    Counts of single columns leave .95 of mu^2. The sampling error of 65 features is the same in all steps.
    """
    recipe = found(own, f"method.preconditioner={given}").recipe
    steps, clip, rate = recipe.epochs, recipe.privacy.clipping.norm, recipe.method.learning_rate
    z = math.sqrt(steps / left) / mu_of(2, 1e-4)
    sampled = steps * sampling / math.sqrt(RECORDS * 65)
    moved = rate / (1 - recipe.method.optimizer.momentum) * math.hypot(math.sqrt(steps) * z * clip / RECORDS, sampled)
    assert moved == pytest.approx(terms.noise, rel=1e-4)
    assert clip == least


@pytest.mark.parametrize(
    ("features", "bound", "outputs", "noise", "clip", "pace"),
    [
        (400, None, 3, 5, 0.1, 30), (256, None, 10, 5, 0.1, 19.2), (255, None, 3, 1.25, 0.5, 6),
        (400, 2.0, 3, 1.25, 0.5, 6), (400, None, 2, 1.25, 0.5, 6),
    ],
)  # fmt: skip
def test_many_features_without_bounds_of_several_classes_have_constants_of_their_own(
    own: Path, features: int, bound: float | None, outputs: int, noise: float, clip: float, pace: float
) -> None:
    """The highest rate is pace / (h R^2), with h = 1/2 and R^2 = features + 1 or bound^2 + 1."""
    recipe = load_recipe(str(own), ["method.preconditioner=null", "model={kind: linear}"]).recipe
    problem = RuleProblem(recipe, PublicFacts(1000, features, outputs, bound))
    assert isinstance(recipe.model, OneLayer)
    square = (features if bound is None else bound**2) + recipe.model.has_bias
    assert (problem.terms.noise, problem.clip) == (noise, clip)
    assert problem.fastest == pytest.approx(pace / (0.5 * square))


@pytest.fixture
def several(own: Path) -> list[str]:
    """`own` with three classes."""
    table = rows(0)
    table.assign(y=np.digitize(table.a / 9 + table.b, [0.7, 1.3])).to_csv(own.parent / "own.csv", index=False)
    return ["data.classes=[0, 1, 2]", "model={kind: linear}"]


@pytest.fixture
def numbers(own: Path) -> list[str]:
    """`own` with numbers to tell, most of them near the lower end of their bounds."""
    table, random = rows(0, 2500), np.random.default_rng(1)
    skewed = np.exp(1 + 0.2 * table.a * table.b + 0.3 * random.normal(size=2500)).clip(upper=200)
    table.assign(y=skewed).to_csv(own.parent / "own.csv", index=False)
    return ["data.classes=null", "data.task=regression", "data.target_bounds=[0, 200]", "model={kind: linear}"]


def test_outputs_of_several_classes_may_move_twice_as_far_and_at_a_pace_by_their_features(
    own: Path, several: list[str]
) -> None:
    """2.8, and an eighth of 129 features over a curvature of 1/2; a residual of sqrt(2) is clipped at .4 of that."""
    recipe = found(own, *several).recipe
    clip, z = recipe.privacy.clipping.norm, math.sqrt(recipe.epochs / 0.95) / mu_of(2, 1e-4)
    assert clip == pytest.approx(0.4 * math.sqrt(2), rel=1e-5)
    reach = recipe.method.learning_rate / (1 - recipe.method.optimizer.momentum)
    assert reach * math.sqrt(2) * math.sqrt(recipe.epochs) * z * clip / RECORDS == pytest.approx(2.8, rel=1e-4)
    rich = found(own, *several, "privacy.budget.epsilon=1e5").recipe
    assert rich.method.learning_rate == pytest.approx(129 / 8 / 0.5, rel=1e-5)
    given = ["data.preprocess=[{scale: {}}]", "method.preconditioner={kind: second-moment, share: 0.15}"]
    scaled = found(own, *several, "privacy.budget.epsilon=1e5", *given).recipe
    assert scaled.method.learning_rate == pytest.approx(12 / 0.5 / 2, rel=1e-5)


@pytest.mark.parametrize("model", ["{kind: linear}", "{kind: convex, loss: squared}"])
def test_targets_have_a_constant_of_their_own_and_a_pace_at_which_squares_descend(
    own: Path, numbers: list[str], model: str
) -> None:
    """With it rows are sqrt(2) long, and the curvature along them is 2: 2 (1 + .8) / 2 is the fastest that descends."""
    given = [*numbers, f"model={model}"]
    told = found(own, *given, "privacy.budget.epsilon=0.5")
    recipe, plan = told.recipe, plan_and_outline(told)[0]
    assert plan is not None and recipe.model.bias is True and values(told)["model.bias"] is True
    # counts have .05 of mu^2, and calibration .05 of the rest
    clip, z = recipe.privacy.clipping.norm, math.sqrt(recipe.epochs / 0.95**2) / mu_of(0.5, 1e-4)
    assert clip == pytest.approx(0.05 * math.sqrt(2), rel=1e-5)
    reach = recipe.method.learning_rate / (1 - recipe.method.optimizer.momentum)
    moved = reach * math.sqrt(2) * math.sqrt(recipe.epochs) * z * clip / plan.sampling.records
    assert moved == pytest.approx(0.5 * 0.2, rel=1e-4)
    rich = found(own, *given, "privacy.budget.epsilon=1e5").recipe
    assert rich.method.learning_rate == pytest.approx(0.4) and rich.method.learning_rate < 2 * (1 + 0.9) / 2
    assert rich.method.optimizer.momentum == 0.9 and rich.epochs == 1000
    assert rich.privacy.clipping.norm == pytest.approx(0.4 * math.sqrt(2), rel=1e-5)
    assert found(own, *given, "method.learning_rate=0.1").recipe.model.bias is False


def test_steps_of_an_average_have_noise_by_their_influence_and_the_same_price(own: Path) -> None:
    """Without curvature the noise of an average of weights is sum (c_t z_t)^2, c_t being what step t moves of it."""
    ours, even = (plan_and_outline(found(own, f"privacy.schedule={{kind: {kind}}}"))[0] for kind in ("auto", "uniform"))
    assert ours is not None and even is not None
    one, other = (np.array(plan.noise_multipliers) for plan in (ours, even))
    assert (one**-2).sum() == pytest.approx(0.95 * mu_of(2, 1e-4) ** 2, rel=1e-6)
    assert (other**-2).sum() == pytest.approx((one**-2).sum(), rel=1e-6)
    steps, momentum = len(one), 0.8
    moved = [sum(1 - momentum ** (k - t + 1) for k in range(max(steps // 2, t), steps)) for t in range(steps)]
    assert np.linalg.norm(moved * one) < 0.93 * np.linalg.norm(moved * other)


@pytest.mark.parametrize(
    "override",
    [
        "method.preconditioner=null",
        "method.averaging=null",
        "method.learning_rate=3",
        "method={kind: dp-sgd, batching: shuffle}",
        "epochs=until-budget",
        "privacy.schedule={kind: uniform, initial: auto}",
    ],
)
def test_other_noise_is_uniform(own: Path, override: str) -> None:
    """Also where its length or its average is not known, or more than one step makes an epoch."""
    given = [override, "privacy.schedule={kind: auto, initial: 200}"] if "until" in override else [override]
    assert found(own, *given).recipe.privacy.schedule.kind == "uniform"


@pytest.mark.parametrize(
    ("beyond", "records", "chosen"), [(0.99, 2000, False), (1.01, 2000, True), (1.01, 1000, False)]
)
def test_products_are_what_the_budget_and_the_records_pay_for(
    own: Path, beyond: float, records: int, chosen: bool
) -> None:
    """From an n mu of 5,000 on, and 10 records for each of 133 features: 4 x 32 cosines, a constant, 2 x 2 products."""
    rows(0, records).to_csv(own.parent / "own.csv", index=False)
    places = plan_and_outline(found(own))[1].train_records
    epsilon = float(brentq(lambda epsilon: places * mu_of(epsilon, 1e-4) - beyond * 5_000, 0.1, 2000))
    told = found(own, f"privacy.budget.epsilon={epsilon}", "data.preprocess=[{bin: {waves: 32}}]")
    assert told.recipe.data.preprocess[0].bin.products is chosen
    assert found(own, "data.preprocess=[{bin: {products: true}}]").recipe.data.preprocess[0].bin.products is True
    none = found(own, f"privacy.budget.epsilon={epsilon}", "method.preconditioner=null")
    assert none.recipe.data.preprocess[0].bin.products is False


def test_training_counts_the_columns_of_its_table(own: Path) -> None:
    """The constant, a of [0, 9] and b of [0, 1]; all features are of some column."""
    loaded = found(own)
    trials = start([Member(loaded, loop.plan_recipe(loaded)[0])])
    columns = trials.context.columns()
    assert columns is not None
    cells = columns.cells
    assert len(cells) == 3 and min(len(one.values) for one in cells[1:]) > 8
    every = np.concatenate([one.features for one in cells])
    assert sorted(every.tolist()) == list(range(trials.context.table.x.shape[1]))


@pytest.mark.parametrize(("epsilon", "waves"), [(0.3, 4), (1.5, 8), (4, 16), (20, 32)])
def test_cosines_are_those_that_records_and_budget_allow(own: Path, epsilon: float, waves: int) -> None:
    """The most of 4, 8, 16 and 32 that are at most sqrt(n mu); and all else is chosen for these features."""
    root = math.sqrt(RECORDS * mu_of(epsilon, 1e-4))
    assert waves <= root < 2 * waves or waves == 32 <= root
    told = found(own, f"privacy.budget.epsilon={epsilon}")
    assert told.recipe.data.preprocess[0].bin.waves == values(told)["data.preprocess.0.bin.waves"] == waves
    [said] = [choice.why for choice in told.chosen if choice.key == "method.preconditioner"]
    _, outline = plan_and_outline(told)
    assert outline.input_shape == (4 * waves + 1,) and said.startswith(f"{4 * waves + 1} features")
    _, same = plan_and_outline(load_recipe(str(own), [f"privacy.budget.epsilon={epsilon}"]))
    assert same == outline


def test_recipes_whose_features_follow_their_budgets_are_no_pack(own: Path) -> None:
    """They would train on the features of the first."""
    loaded = [load_recipe(str(own), [f"privacy.budget.epsilon={epsilon}"]) for epsilon in (3, 4, 290)]
    members = [Member(one, loop.plan_recipe(one)[0]) for one in map(resolve_auto, loaded)]
    options = loop.Options(own.parent / "out")
    with pytest.raises(UsageError, match="do not train on the same data"):
        loop.run_pack([members[0], members[2]], options)
    assert len(loop.run_pack(members[:2], options)) == 2


def test_trials_of_a_pack_have_the_probabilities_of_their_own_clip_norms(own: Path) -> None:
    """As alone, where one member's residuals count up to .4 and another's up to .9."""
    loaded = [load_recipe(str(own), [f"privacy.clipping.norm={norm}"]) for norm in (0.4, 0.9)]
    options = [loop.Options(own.parent / name) for name in ("pack", "alone")]
    together = loop.run_pack([Member(one, loop.plan_recipe(one)[0]) for one in map(resolve_auto, loaded)], options[0])
    for one, packed in zip(loaded, together, strict=True):
        alone = loop.run(resolve_auto(one), options[1])
        found, expected = (pd.read_csv(path / "trials.csv")["test_log_loss"].tolist() for path in (packed, alone))
        assert found == pytest.approx(expected, rel=1e-5)


IMAGES = """
name: own
data:
  path: own.npz
  bounds: [0, 255]
  classes: [0, 1, 2]
  split: {test: 20}
  preprocess: [{unit-norm: {}}]
model: {kind: linear, bias: false}
method: {kind: dp-gd}
privacy: {budget: {epsilon: 1, delta: 1.0e-4}}
seed: 0
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """100 of 64 pixels, of which 80 train."""
    drawn = np.random.default_rng(0).integers(0, 256, (100, 1, 8, 8), np.uint8)
    np.savez(tmp_path / "own.npz", x=drawn, y=np.arange(100) % 3)
    (tmp_path / "own.yaml").write_text(IMAGES)
    return tmp_path / "own.yaml"


@pytest.mark.parametrize(("features", "preconditioned"), [(2048, True), (2049, False)])
def test_more_features_than_2048_are_not_preconditioned(images: Path, features: int, preconditioned: bool) -> None:
    told, _ = auto_settings.before_plan(load_recipe(str(images)).recipe, PublicFacts(50_000, features, 3, 1.0))
    assert (told.method.preconditioner is not None) == preconditioned  # type: ignore[union-attr]


PHOTOGRAPHS = PublicFacts(50_000, 3 * 32 * 32, 10, None)


def of_network(images: Path, *overrides: str, known: PublicFacts = PHOTOGRAPHS) -> tuple[Any, Plan]:
    """A recipe of a network with everything chosen, for Poisson batches unless `overrides` differ, and its plan."""
    given = ("data.preprocess=null", "model={kind: cnn}", "method={kind: dp-sgd}", "privacy.budget.delta=1e-5")
    recipe, _ = auto_settings.before_plan(load_recipe(str(images), (*given, *overrides)).recipe, known)
    plan = plan_for(recipe, Facts(known.records, groups=recipe.model.layers))
    return auto_settings.after_plan(recipe, known, plan)[0], plan


@pytest.mark.parametrize("model", ["cnn", "wrn"])
def test_batches_of_a_network_make_the_noise_and_the_steps_that_the_rule_says(images: Path, model: str) -> None:
    """T = .2 n mu / 2 steps, with noise multiplier 1; 2 is the most that a step of clip norm .1 goes with momentum.

    The noise multiplier is the plan's own. All noise together moves a weight by .2.
    """
    recipe, plan = of_network(images, f"model={{kind: {model}}}")
    batch, rate, sampling = recipe.method.batch_size, recipe.method.learning_rate, plan.sampling
    steps, z = recipe.epochs * sampling.steps_per_epoch, plan.noise_multipliers[0]
    assert abs(steps - 0.2 * 50_000 * mu_of(1, 1e-5) / 2) <= sampling.steps_per_epoch
    assert z == pytest.approx(1, rel=0.15)
    assert recipe.privacy.clipping.norm == 0.1 and recipe.method.averaging.kind == "ema"
    reach = rate / (1 - recipe.method.optimizer.momentum)
    assert reach * 0.1 * math.sqrt(steps) * z / batch == pytest.approx(0.2, rel=1e-4)
    assert reach * 0.1 <= 2


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("method.batch_size=300", "method.batch_size", 300),
        ("epochs=3", "epochs", 3),
        ("privacy.clipping.norm=2", "privacy.clipping.norm", 2),
        ("privacy.clipping={kind: per-layer, norm: 0.1}", "privacy.clipping.norm", 0.1),
        ("method.batching=shuffle", "method.batch_size", 8192),
        ("method.batching=full", "method.batch_size", None),
    ],
)
def test_what_a_recipe_of_a_network_states_stays(images: Path, override: str, key: str, value: float | None) -> None:
    """Shuffled batches have no rate that amplifies, so they are as large as a linear model's."""
    found: Any = of_network(images, override)[0]
    assert not has_auto(found)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_neighbouring_images_settle_a_network_alike(images: Path) -> None:
    """No pixel and no label is read; only their number changes what is chosen."""
    given = ("data.preprocess=null", "model={kind: cnn}", "method={kind: dp-sgd}")
    first, random = resolved(found(images, *given).recipe), np.random.default_rng(1)
    for count, same in ((100, True), (70, False)):
        drawn = random.integers(0, 9, (count, 1, 8, 8), np.uint8)
        np.savez(images.parent / "own.npz", x=drawn, y=np.arange(count) // 5 % 3)
        assert (resolved(found(images, *given).recipe) == first) == same


@pytest.mark.parametrize("override", ["privacy.budget.epsilon=800", "data.preprocess=[{scale: {}}, {unit-norm: {}}]"])
def test_neighbouring_data_settle_alike_to_the_bit(own: Path, override: str) -> None:
    """The number of records, the bounds and the classes are public; no value of a record is read, not even the last.

    At this budget the clip norm follows the number of records, too.
    """
    first = resolved(found(own, override).recipe)
    changed = rows(0)
    changed.loc[[0, 499], ["a", "b", "y"]] = [-1e6, 1e9, 1]
    for other in (changed, rows(7), rows(7).assign(a=3, b=0.5)):
        other.to_csv(own.parent / "own.csv", index=False)
        assert resolved(found(own, override).recipe) == first
    rows(0, 50).to_csv(own.parent / "own.csv", index=False)
    assert resolved(found(own, override).recipe) != first


@pytest.mark.parametrize(
    ("override", "rest"),
    [
        ("privacy.clipping.norm=0.3", {"epochs", "method.learning_rate", "method.averaging"}),
        ("epochs=7", {"privacy.clipping.norm", "method.learning_rate", "method.averaging"}),
        ("method.averaging=null", {"epochs", "privacy.clipping.norm", "method.learning_rate"}),
        ("method.optimizer.momentum=0", {"epochs", "privacy.clipping.norm", "method.learning_rate"}),
        ("method.learning_rate=3", {"epochs", "model.bias"}),
        ("method.optimizer={kind: adam}", {"epochs", "model.bias"}),
    ],
)
def test_what_is_given_stays_and_the_rest_is_chosen(own: Path, override: str, rest: set[str]) -> None:
    told = found(own, override)
    key, _, value = override.partition("=")
    assert key not in values(told) and rest <= set(values(told))
    alone = load_recipe(str(own), [override])
    here: Any = told.recipe
    there: Any = alone.recipe
    for name in key.split("."):
        here, there = getattr(here, name), getattr(there, name)
    assert here == there, value


def test_a_learning_rate_of_ones_own_gets_what_goes_with_any(own: Path) -> None:
    recipe = found(own, "method.learning_rate=3").recipe
    assert recipe.privacy.clipping.norm == 1 and recipe.method.averaging is None
    assert recipe.method.optimizer.momentum == 0


@pytest.mark.parametrize(("records", "epsilon"), [(2, 1e-4), (10**6, 1e4)])
@pytest.mark.parametrize(
    ("kind", "outputs", "bound"),
    [("convex", 1, 1.0), ("linear", 2, 1.0), ("linear", 100, 28.0), ("linear", 1, None), ("mlp", 10, None)],
)
def test_extremes_get_steps_that_are_finite(
    own: Path, kind: str, outputs: int, bound: float | None, epsilon: float, records: int
) -> None:
    method = "dp-gd" if kind == "convex" else "dp-sgd, batching: full"
    changes = (f"model={{kind: {kind}}}", f"method={{kind: {method}}}", f"privacy.budget.epsilon={epsilon}")
    recipe, known = load_recipe(str(own), changes).recipe, PublicFacts(records, 20, outputs, bound)
    recipe, _ = auto_settings.before_plan(recipe, known)
    plan, _ = plan_and_outline(LoadedRecipe(recipe, own.parent, "own"))
    assert plan is not None
    told: Any = auto_settings.after_plan(recipe, known, plan)[0]
    linear = COLUMNS_TARGETS if (kind, outputs) == ("linear", 1) else PRECONDITIONED
    terms = MLP if kind == "mlp" else linear
    assert terms.fewest <= told.epochs <= terms.most
    assert 0 < told.privacy.clipping.norm < math.inf
    assert 0 < told.method.learning_rate < 1000


@pytest.mark.parametrize(("batching", "records"), [("poisson", RECORDS), ("shuffle", 402)])
def test_batches_are_chosen_where_they_are_asked_for(own: Path, batching: str, records: int) -> None:
    """By place, as for zero-out, the split has a size of its own."""
    told = found(own, f"method={{kind: dp-sgd, batching: {batching}}}")
    assert values(told)["method.batch_size"] == records and told.recipe.method.learning_rate > 0


def test_account_prices_what_train_trains(own: Path, train: Train) -> None:
    result = json.loads((train(own) / "result.json").read_text())["privacy"]
    done = CliRunner().invoke(main, ["account", str(own), "--accountant", "gaussian", "--format", "json"])
    (priced,) = json.loads(done.stdout)
    assert priced["epsilon"] == pytest.approx(result["epsilon"], rel=1e-12) and priced["rho"] == result["rho"]
