"""Every kind of mistake in a recipe is reported at its line, in words, and none hides or causes another."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dpsgd_cli.common.yaml_tree import SourceLocation, from_plain, read_tree
from dpsgd_cli.recipe.check import validate
from dpsgd_cli.recipe.schema import Recipe

KINDS = "linear, convex, mlp, cnn, wrn, python or huggingface"
GOOD = """\
name: x
data: {name: digits}
model: {kind: linear}
method: {kind: dp-sgd, batch_size: 10}
privacy:
  schedule: {kind: exponential, initial: 10, decay: 0.01}
  budget: {rho: 1}
epochs: until-budget
seed: 0
"""


def problems(text: str) -> list[str]:
    tree, wrong = read_tree(text, SourceLocation("r.yaml", 1))
    assert tree is not None
    assert wrong == []
    recipe, found = validate(tree, Recipe)
    assert (recipe is None) == bool(found)
    return [str(problem) for problem in found]


def test_a_good_recipe_has_no_problem() -> None:
    assert problems(GOOD) == []


# (what is replaced, by what, the one problem that is reported)
BROKEN = [
    # wrong values
    ("initial: 10", "initial: -1", "6: privacy.schedule.initial: must be a number above 0 or auto, got -1"),
    ("initial: 10", "initial: ten", "6: privacy.schedule.initial: must be a number above 0 or auto, got 'ten'"),
    ("initial: 10", "initial: '10'", "6: privacy.schedule.initial: must be a number above 0 or auto, got '10'"),
    ("initial: 10", "initial: true", "6: privacy.schedule.initial: must be a number above 0 or auto, got true"),
    ("initial: 10", "initial: .inf", "6: privacy.schedule.initial: must be a number above 0 or auto, got Infinity"),
    ("initial: 10", "initial:", "6: privacy.schedule.initial: must be a number above 0 or auto, got nothing"),
    ("initial: 10", "initial: [1]", "6: privacy.schedule.initial: must be a number above 0 or auto, got [1]"),
    ("batch_size: 10", "batch_size: 2.5", "4: method.batch_size: must be a whole number at least 1 or auto, got 2.5"),
    ("batch_size: 10", "batch_size: 0", "4: method.batch_size: must be a whole number at least 1 or auto, got 0"),
    ("seed: 0", "seed: true", "9: seed: must be a whole number at least 0, got true"),
    ("seed: 0", "seed: 0\nsave_model: yes", "10: save_model: must be true or false, got 'yes'"),
    ("name: digits", "name: 3", "2: data.name: must be text, got 3"),
    ("linear}", "mlp, hidden: 100}", "3: model.hidden: must be a list, each entry a whole number at least 1, got 100"),
    ("linear}", "mlp, hidden: [9, x]}", "3: model.hidden.1: must be a whole number at least 1, got 'x'"),
    (
        "kind: dp-sgd",
        "kind: sgd-ma",
        "4: method.kind: sgd-ma is dp-sgd with another accountant; write kind: dp-sgd, and accountant: rdp-markov in"
        " privacy",
    ),
    (
        "until-budget",
        "forever",
        "8: epochs: must be a whole number at least 1 and at most 1e+06, until-budget or auto, got 'forever'",
    ),
    (
        "until-budget",
        "until_budget",
        "8: epochs: must be a whole number at least 1 and at most 1e+06, until-budget or auto, got 'until_budget';"
        " did you mean until-budget?",
    ),
    (
        "batch_size: 10",
        "batch_size: 10, batching: poison",
        "4: method.batching: must be poisson, shuffle, full, fixed or random-allocation, got"
        " 'poison'; did you mean poisson?",
    ),
    (
        "  budget",
        "  accountant: zcpd\n  budget",
        "7: privacy.accountant: must be auto, basic-composition, advanced-composition, strong-composition, zcdp,"
        " moments, rdp, pld, gaussian, zcdp-tight, rdp-markov, lemma-15.1, lemma-15.5 or nikolov, got 'zcpd'; did"
        " you mean zcdp?",
    ),
    ("x\n", "a b\n", "1: name: must be text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$, got 'a b'"),
    (
        "name: digits",
        "name: digits, split: {test: 1.5}",
        "2: data.split.test: must be a number above 0 and below 1, a whole number at least 1 or 0, got 1.5",
    ),
    (
        "name: digits",
        "path: a.csv, target: y, bounds: {age: [0]}",
        "2: data.bounds.age: must be a list of 2 values (a number, a number), got [0]",
    ),
    (
        "batch_size: 10",
        "batch_size: 10, optimizer: {kind: adam, betas: [0.9, x]}",
        "4: method.optimizer.betas.1: must be a number, got 'x'",
    ),
    # sections
    (
        "privacy:\n  schedule: {kind: exponential, initial: 10, decay: 0.01}\n  budget: {rho: 1}",
        "privacy: 3",
        "5: privacy: must be a section with keys adjacency, unit, clipping, schedule, budget, budget_covers, delta,"
        " accountant, book, noise, noise_source, got 3",
    ),
    ("{kind: linear}", "linear", f"3: model: must be a section with kind: {KINDS}, got 'linear'"),
    (
        "name: digits",
        "name: digits, preprocess: [unit-norm]",
        "2: data.preprocess.0: must be a section with keys one-hot, bin, scale, unit-norm, bias, pca, got"
        " 'unit-norm'; did you mean {unit-norm: {}}?",
    ),
    # kinds
    ("kind: linear", "", f"3: model.kind: missing; give {KINDS}"),
    ("linear", "linnear", f"3: model.kind: must be {KINDS}, got 'linnear'; did you mean linear?"),
    ("linear", "transformer", f"3: model.kind: must be {KINDS}, got 'transformer'"),
    ("linear", "[linear]", f'3: model.kind: must be {KINDS}, got ["linear"]'),
    (
        "exponential, initial: 10",
        "uniform, initial: 8",
        "6: privacy.schedule.decay: not a key of kind: uniform (but of time, exponential, step, polynomial or"
        " validation);"
        " remove it or choose another kind",
    ),
    # several sections without a kind
    (
        "rho: 1",
        "rho: 1, epsilon: 3",
        "7: privacy.budget: must be a section with keys rho or a section with keys epsilon, delta,"
        ' got {"rho": 1, "epsilon": 3}',
    ),
    ("rho: 1", "epsilon: 3", "7: privacy.budget.delta: missing; give a number above 0 and below 1 (At this delta.)"),
    ("rho: 1", "epsilon: 0, delta: 1e-5", "7: privacy.budget.epsilon: must be a number above 0, got 0"),
    # missing keys
    (
        "name: x\n",
        "# x\n",
        "2: name: missing; give text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$ (Names the result directory.)",
    ),
    ("model: {kind: linear}", "", f"1: model: missing; give a section with kind: {KINDS} (What is trained.)"),
    (
        ", decay: 0.01",
        "",
        "6: privacy.schedule.decay: missing; give a number above 0 or auto (k in initial * exp(-k floor(t / period)).)",
    ),
    # unknown keys
    ("seed: 0", "sed: 0", "9: sed: unknown key; did you mean seed?"),
    ("batch_size", "batch-size", "4: method.batch-size: unknown key; did you mean method.batch_size?"),
    ("batch_size", "batchsize", "4: method.batchsize: unknown key; did you mean method.batch_size?"),
    (
        "method: {kind: dp-sgd, ",
        "BATCH_SIZE: 10\nmethod: {kind: dp-sgd, ",
        "4: BATCH_SIZE: unknown key; did you mean method.batch_size?",
    ),
    ("seed: 0", "seed: 0\nnorm: 1", "10: norm: unknown key; did you mean privacy.clipping.norm?"),
    ("seed: 0", "seed: 0\ndelta: 1e-5", "10: delta: unknown key; did you mean privacy.delta?"),
    ("batch_size: 10", "batch_size: 10, repeats: 3", "4: method.repeats: unknown key; did you mean repeats?"),
    (
        "name: digits",
        "name: digits, preprocess: [{onehot: {}}]",
        "2: data.preprocess.0.onehot: unknown key; did you mean data.preprocess.0.one-hot?",
    ),
    ("kind: linear", "kind: linear, xyzzy: 1", "3: model.xyzzy: unknown key; the keys here are loss, kind, bias"),
    (
        "name: digits",
        "name: digits, split: {test: half}",
        "2: data.split.test: must be a number above 0 and below 1, a whole number at least 1 or 0, got 'half'",
    ),
    # rules that join several values
    ("batch_size: 10", "batching: full, batch_size: 10", "4: method.batching: full takes no batch_size"),
    ("name: digits", "path: a.csv", "2: data: a table needs target, the name of the label column"),
    (
        "name: digits",
        "name: digits, preprocess: [{pca: {components: 3}}]",
        "2: data.preprocess.0.pca: give either noise_multiplier (private) or public: true",
    ),
    (
        "  budget",
        "  noise_source: secure\n  budget",
        "7: privacy.noise_source: secure cannot be seeded; leave seed out",
    ),
]


@pytest.mark.parametrize(("old", "new", "problem"), BROKEN, ids=[row[2].split(";")[0][:60] for row in BROKEN])
def test_one_mistake_is_one_problem_at_its_line(old: str, new: str, problem: str) -> None:
    assert old in GOOD
    assert problems(GOOD.replace(old, new, 1)) == [f"r.yaml:{problem}"]


@pytest.mark.parametrize("text", ["- a", "3", "words"])
def test_what_is_no_mapping_is_told_what_a_recipe_is(text: str) -> None:
    (only,) = problems(text)
    assert only.startswith("r.yaml:1: must be a section with keys name, description, data, model, method, privacy")


def test_all_problems_are_reported_together() -> None:
    text = """\
name: a b
data: {name: digits, nme: 3, preprocess: [{pca: {components: 0, public: true}}]}
modl: {kind: linear}
method: {kind: sgd, batch_size: many, learning_rate: -1}
privacy: {budget: {rho: 0}}
runtime:
seed: -1
"""
    places = [problem.split(": must")[0].split(": unknown")[0] for problem in problems(text)]
    assert sorted(places[:8]) == [
        "r.yaml:1: name",
        "r.yaml:2: data.nme",
        "r.yaml:2: data.preprocess.0.pca.components",
        "r.yaml:3: modl",
        "r.yaml:4: method.batch_size",
        "r.yaml:4: method.learning_rate",
        "r.yaml:5: privacy.budget.rho",
        "r.yaml:6: runtime",
    ]
    assert places[8] == "r.yaml:7: seed"
    assert sorted(places[9:]) == [
        "r.yaml:1: epochs: method sgd has no budget to stop at; give a number",
        "r.yaml:5: privacy: method sgd has no privacy; leave this section out or use dp-sgd",
    ]


def test_a_misspelt_key_is_checked_as_if_it_were_spelt_right() -> None:
    assert problems(GOOD.replace("batch_size: 10", "batchsize: 0")) == [
        "r.yaml:4: method.batchsize: unknown key; did you mean method.batch_size?",
        "r.yaml:4: method.batch_size: must be a whole number at least 1 or auto, got 0",
    ]


def test_long_values_are_shortened() -> None:
    (only,) = problems(GOOD.replace("seed: 0", f"seed: {'very ' * 50}long"))
    assert only.endswith("...")
    assert len(only) < 140


BASE: dict[str, Any] = {
    "name": "x",
    "data": {
        "path": "a.csv",
        "target": "y",
        "bounds": {"age": [0, 1]},
        "categorical": {"job": ["a", 1]},
        "preprocess": [{"pca": {"components": 3, "public": True}}, {"scale": {"to": [0, 1]}}],
        "split": {"test": 0.5},
    },
    "model": {"kind": "mlp", "hidden": [3], "activation": "relu"},
    "method": {"kind": "dp-sgd", "batch_size": 3, "optimizer": {"kind": "adam"}, "averaging": {"decay": 0.5}},
    "privacy": {
        "clipping": {"kind": "per-layer", "norm": [1, 2]},
        "schedule": {"kind": "uniform", "initial": "auto"},
        "budget": {"epsilon": 1, "delta": 0.1},
    },
    "runtime": {"threads": 1},
    "epochs": 3,
}
KEYS = st.sampled_from(["kind", "norm", "rho", "test", "initial", "decay", "bias", "scale", "name", "zz", "period"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(-2, 3)
    | st.sampled_from(["auto", "flat", "sgd", "adam", "linear", "uniform", "step", "poisson", "full", "zz", "x\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)


def slots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in plain data."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [slot for key in keys for slot in slots(value[key])]


@st.composite
def mutants(draw: st.DrawFn) -> Any:
    """A recipe with one to three places changed, keys added or keys removed."""
    data = copy.deepcopy(BASE)
    for _ in range(draw(st.integers(1, 3))):
        home, key = draw(st.sampled_from(slots(data)))
        action = draw(st.sampled_from(["change", "add", "remove"]))
        if action == "remove":
            del home[key]
        elif action == "add" and isinstance(home, dict):
            home[draw(KEYS)] = draw(VALUES)
        elif action == "add":
            home.append(draw(VALUES))
        else:
            home[key] = draw(VALUES)
    return data


@settings(max_examples=300)
@given(mutants())
def test_whatever_is_wrong_is_told_and_the_tree_left_as_it_was(data: Any) -> None:
    """A recipe that pydantic refuses has problems, each once; one that it takes has none."""
    tree = from_plain(data, SourceLocation("r.yaml", 1))
    recipe, found = validate(tree, Recipe)
    try:
        assert recipe == Recipe.model_validate_json(json.dumps(data), strict=True) and not found
    except ValidationError:
        assert recipe is None and found
    assert len({str(problem) for problem in found}) == len(found)
    assert tree.plain() == data
