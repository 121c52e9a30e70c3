"""Recipes are found, read, resolved, written and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.errors import RecipeError
from dpsgd_cli.recipe.loading import dump_recipe, load_recipe, recipe_hash, shipped_recipes
from dpsgd_cli.recipe.schema import Recipe

TEXT = """\
name: x
data: {name: digits}
model: {kind: linear}
method: {kind: dp-sgd, batch_size: 10, learning_rate: 1e-3}
privacy: {budget: {rho: 1}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(TEXT)
    return path


def problems(source: Path | str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(source), overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_a_sweep_is_no_recipe(file: Path) -> None:
    assert problems("sweeps/ci") == ["sweeps/ci: this is a sweep, not a recipe; use `dpsgd sweep sweeps/ci`"]
    file.write_text("name: x\nrecipes: [quickstart]\n")
    assert problems(str(file)) == [f"{file}: this is a sweep, not a recipe; use `dpsgd sweep {file}`"]


def test_a_file_comes_before_a_shipped_recipe_of_the_same_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    file.rename("quickstart")
    assert load_recipe("quickstart").recipe.name == "x"


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("quikstart", "did you mean quickstart?"),
        ("quickstart.yaml", "did you mean quickstart?"),
        ("recipes/yu2019/mnist-time.yaml", "did you mean yu2019/mnist-time?"),
        ("yu2019/mnist-exponental", "did you mean yu2019/mnist-exponential?"),
        ("own.yml", "did you mean own.yaml?"),
        ("mnist-tme", "did you mean yu2019/mnist-time?"),
        ("xyzzy", "shipped recipes: `dpsgd recipe list` shows them"),
    ],
)
def test_a_missing_recipe_suggests_the_nearest(
    source: str, advice: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert problems(source) == [f"{source}: no such file, and no shipped recipe of that name; {advice}"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty; see `dpsgd recipe show quickstart` for an example"),
        (b"# only a comment\n", "empty; see `dpsgd recipe show quickstart` for an example"),
        (b"name: caf\xe9\n", "not UTF-8 text (byte 9); save it as UTF-8"),
        (b"a" * 1_000_001, "more than 1000000 bytes; a recipe is a small YAML file, is this one?"),
    ],
)
def test_what_is_no_recipe_file_is_one_clear_message(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    assert problems(file) == [f"{file}: {message}"]


def test_a_byte_order_mark_and_windows_line_ends_are_read(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert load_recipe(str(file)).recipe.name == "x"
    file.write_bytes(TEXT.replace("x\n", "a b\n").replace("\n", "\r\n").encode())
    assert problems(file)[0].startswith(f"{file}:1: name: ")


def test_every_shipped_recipe_survives_being_resolved(tmp_path: Path) -> None:
    for name in shipped_recipes():
        recipe = load_recipe(name).recipe
        copy = tmp_path / "copy.yaml"
        copy.write_text(dump_recipe(recipe))
        again = load_recipe(str(copy)).recipe
        assert again == recipe
        assert recipe_hash(again) == recipe_hash(recipe)
        assert dump_recipe(again) == dump_recipe(recipe)


POSITIVE = st.floats(1e-300, 1e300)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["no", "1e5", "~", "0o7", "a: b"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
STEPS = st.sampled_from([{"unit-norm": {}}, {"bias": {"value": 2}}, {"one-hot": {"columns": ["a"]}}, {"scale": {}}])
SCHEDULES = st.one_of(
    st.fixed_dictionaries({"kind": st.just("uniform"), "initial": POSITIVE | st.just("auto")}),
    st.fixed_dictionaries({"kind": st.just("time"), "initial": POSITIVE, "decay": POSITIVE}),
    st.fixed_dictionaries({"kind": st.just("step"), "initial": POSITIVE, "decay": st.floats(0.01, 0.99)}),
)
RECIPES = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
        "data": st.fixed_dictionaries({"name": WORDS, "preprocess": st.none() | st.lists(STEPS, max_size=2)}),
        "model": st.fixed_dictionaries(
            {"kind": st.just("python"), "file": WORDS, "arguments": st.dictionaries(WORDS, ANYTHING, max_size=2)}
        ),
        "method": st.fixed_dictionaries(
            {"kind": st.just("dp-sgd"), "batch_size": st.integers(1, 10**9), "learning_rate": POSITIVE}
        ),
        "privacy": st.fixed_dictionaries({"schedule": SCHEDULES, "budget": st.fixed_dictionaries({"rho": POSITIVE})}),
    },
    optional={"description": WORDS, "epochs": st.integers(1, 9), "seed": st.integers(0) | st.none()},
)


@given(RECIPES)
def test_what_is_written_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(data)
    file = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    file.write_text(dump_recipe(recipe), "utf-8")
    assert load_recipe(str(file)).recipe == recipe


SAME = ["description=why", "device=cpu", "threads=1", "micro_batch=9", "checkpoint_seconds=1"]
OTHER = ["runtime.dtype=float64", "runtime.evaluate_every=2", "seed=1", "repeats=2", "method.batch_size=11", "name=y"]


@pytest.mark.parametrize("override", [SAME[0], *(f"runtime.{one}" for one in SAME[1:]), *OTHER])
def test_the_hash_tells_apart_what_can_change_a_result_and_nothing_else(file: Path, override: str) -> None:
    changed = recipe_hash(load_recipe(str(file), [override]).recipe) != recipe_hash(load_recipe(str(file)).recipe)
    assert changed == (override in OTHER)


def test_the_hash_is_8_hex_digits_that_do_not_depend_on_how_the_file_is_written(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("# comment\n" + "\n".join(reversed(TEXT.splitlines())) + "\nrepeats: 1\n")
    first = recipe_hash(load_recipe(str(file)).recipe)
    assert recipe_hash(load_recipe(str(other)).recipe) == first
    assert len(first) == 8
    assert int(first, 16) >= 0
