"""The whole path from a `data:` section to arrays: shapes, what is declared, and each trial's own noise."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsgd_cli import data
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.data import cards, preprocess, splits
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError
from dpsgd_cli.preconditioning.second_moments import blocks, second_moments, with_noise

HERE = Path()
PRIVATE = {"pca": {"components": 5, "noise_multiplier": 4}}


def section(**settings: Any) -> Data:
    return Data.model_validate(settings)


def normal(trial: int, purpose: str, exact: np.ndarray, mechanism: GaussianSum, records: int) -> np.ndarray:
    draws = np.random.default_rng([trial, *purpose.encode()]).standard_normal(exact.shape)
    return np.asarray(exact + mechanism.noise_multiplier * mechanism.sensitivity * draws)


def refuse(trial: int, purpose: str, exact: np.ndarray, mechanism: GaussianSum, records: int) -> np.ndarray:
    raise AssertionError("no noise was announced")


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "digits"},
        {"name": "breast-cancer"},
        {"name": "digits", "preprocess": [{"unit-norm": {}}, {"bias": {}}]},
        {"name": "digits", "preprocess": [PRIVATE, {"bias": {}}], "split": {"test": 100, "seed": 3}},
    ],
)
def test_outline_says_what_prepare_gives(settings: dict[str, Any]) -> None:
    outline = data.outline(section(**settings), HERE)
    dataset = data.prepare(section(**settings), HERE, 2, normal, "add-remove")
    assert outline.train_records == len(dataset.train_y)
    assert outline.test_records == len(dataset.test_y)
    assert outline.input_shape == dataset.train_x.shape[1 + dataset.per_trial :]
    assert dataset.test_x.shape[dataset.per_trial :] == (outline.test_records, *outline.input_shape)
    assert outline.outputs == len(dataset.classes or ())
    assert outline.declarations == dataset.declarations
    assert f"The number of training records is public: {outline.train_records}." in dataset.declarations
    assert any(said.startswith(f"The {outline.test_records} test records are public") for said in dataset.declarations)
    assert (dataset.train_x.dtype, dataset.train_y.dtype) == (np.float32, np.int64)


@pytest.mark.parametrize("name", cards.names())
def test_every_card_has_an_outline_without_its_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPSGD_DATA", str(tmp_path))
    outline = data.outline(section(name=name), HERE)
    assert outline.train_records > outline.test_records > 0
    assert outline.input_shape
    assert data.private_releases(section(name=name), "add-remove") == []


def test_published_sizes() -> None:
    sizes = {name: data.outline(section(name=name), HERE) for name in ("adult", "mnist", "breast-cancer-wisconsin")}
    assert {name: (o.train_records, o.test_records, o.outputs) for name, o in sizes.items()} == {
        "adult": (32561, 16281, 2),
        "mnist": (60000, 10000, 10),
        "breast-cancer-wisconsin": (560, 123, 2),
    }


def test_a_split_named_in_the_recipe_is_cut_from_all_rows() -> None:
    outline = data.outline(section(name="adult", split={"test": 12210}), HERE)
    assert (outline.train_records, outline.test_records) == (48842 - 12210, 12210)


def test_private_releases_are_known_from_the_recipe_alone() -> None:
    settings = section(name="mnist", preprocess=[{"pca": {"components": 60, "noise_multiplier": 16}}])
    assert data.private_releases(settings, "zero-out") == [
        Release(GaussianSum(16, "zero-out", "full", label="pca", sensitivity=1))
    ]
    (replaced,) = data.private_releases(settings, "replace-one")
    assert isinstance(replaced.mechanism, GaussianSum)
    assert replaced.mechanism.sensitivity == pytest.approx(2**0.5)
    public = section(name="mnist", preprocess=[{"pca": {"components": 60, "public": True}}])
    assert data.private_releases(public, "zero-out") == []
    assert any("declared public" in said for said in data.outline(public, HERE).declarations)


def test_each_trial_has_its_own_noise_and_does_not_see_the_pack() -> None:
    settings = section(name="digits", preprocess=[PRIVATE, {"unit-norm": {}}])
    pack = data.prepare(settings, HERE, 3, normal, "add-remove")
    alone = data.prepare(settings, HERE, 1, lambda _, *rest: normal(2, *rest), "add-remove")
    assert pack.per_trial
    assert pack.train_x.shape == (3, 1438, 5)
    assert pack.train_x[2].tolist() == alone.train_x[0].tolist()
    assert not np.allclose(pack.train_x[0], pack.train_x[1])
    np.testing.assert_allclose(np.linalg.norm(pack.test_x, axis=-1), 1, rtol=1e-5)


def test_private_pca_is_the_noisy_covariance_of_the_training_part() -> None:
    plain = data.prepare(section(name="digits"), HERE, 1, refuse, "replace-one")
    private = data.prepare(section(name="digits", preprocess=[PRIVATE]), HERE, 1, normal, "replace-one")
    rows = plain.train_x.reshape(1438, 64)
    noise = GaussianSum(4, "replace-one", sensitivity=2**0.5)
    noisy = with_noise(
        second_moments(blocks(rows), 64), lambda exact: normal(0, "preprocess-0", exact, noise, len(rows))
    )
    np.testing.assert_allclose(private.train_x[0], rows @ preprocess.directions(noisy, 5), rtol=1e-4, atol=1e-4)


def test_two_private_steps_never_share_draws() -> None:
    asked: list[tuple[int, str, tuple[int, ...]]] = []

    def record(trial: int, purpose: str, exact: np.ndarray, mechanism: GaussianSum, records: int) -> np.ndarray:
        asked.append((trial, purpose, exact.shape))
        assert records == 1438 and mechanism.noise_multiplier == {"preprocess-0": 4, "preprocess-1": 1}[purpose]
        return normal(trial, purpose, exact, mechanism, records)

    steps = [PRIVATE, {"pca": {"components": 2, "noise_multiplier": 1}}]
    settings = section(name="digits", preprocess=steps)
    dataset = data.prepare(settings, HERE, 2, record, "add-remove")
    assert dataset.train_x.shape == (2, 1438, 2)
    assert sorted(asked) == [(t, f"preprocess-{i}", (n,)) for t in (0, 1) for i, n in ((0, 64 * 65 // 2), (1, 15))]
    assert len(data.private_releases(settings, "add-remove")) == 2


def test_fitted_scaling_is_recorded_and_warned_of() -> None:
    dataset = data.prepare(
        section(name="digits", preprocess=[{"scale": {"by": "standard"}}]), HERE, 1, refuse, "add-remove"
    )
    assert len(dataset.nonprivate) == 1
    assert "scale by standard" in dataset.nonprivate[0]
    assert dataset.nonprivate[0] in dataset.warnings
    flat = dataset.train_x.reshape(1438, 64)
    np.testing.assert_allclose(flat.mean(axis=0), 0, atol=1e-5)
    assert abs(dataset.test_x.mean()) > 1e-6


def test_own_csv_end_to_end(tmp_path: Path) -> None:
    rows = "".join(f"{age},{'ab'[age % 2]},{'no' if age < 30 else 'yes'}\n" for age in range(20, 40))
    (tmp_path / "own.csv").write_text("age,job,y\n" + rows)
    settings = section(path="own.csv", target="y", categorical={"job": ["a", "b"]}, bounds={"age": [25, 35]})
    outline, dataset = data.outline(settings, tmp_path), data.prepare(settings, tmp_path, 1, refuse, "add-remove")
    assert (outline.train_records, outline.test_records, outline.input_shape, outline.outputs) == (20, 4, (4,), 2)
    assert len(dataset.train_y) + len(dataset.test_y) == 20 and dataset.train_records == 20
    assert dataset.declarations == outline.declarations
    assert (dataset.train_x.min(), dataset.train_x.max()) == (0, 1)
    assert (dataset.train_x[:, 1:].sum(axis=1) == 1).all()


@pytest.mark.parametrize("split", [{"test": 0.3, "seed": 2}, {"test": 12, "seed": 2}])
@pytest.mark.parametrize("validation", [None, {"fraction": 0.25, "public": True}, {"records": 6, "public": True}])
@pytest.mark.parametrize("kind", ["csv", "npy"])
def test_one_row_more_in_the_file_adds_one_training_record_at_most(
    tmp_path: Path, split: dict[str, Any], validation: dict[str, Any] | None, kind: str
) -> None:
    """Whatever the row holds; over ten sizes of the file, some of which move a row between parts."""
    found = []
    for rows in range(40, 51):
        if kind == "csv":
            (tmp_path / "own.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(rows)))
            named: dict[str, Any] = {"path": "own.csv", "target": "y", "preprocess": []}
        else:
            np.save(tmp_path / "x.npy", np.arange(rows, dtype=np.float32)[:, None])
            np.save(tmp_path / "y.npy", np.arange(rows) % 2)
            named = {"path": "x.npy", "target": "y.npy", "preprocess": []}
        settings = section(**named, classes=[0, 1], split=split, validation=validation)
        dataset = data.prepare(settings, tmp_path, 1, refuse, "add-remove")
        found.append(set(np.asarray(dataset.train_x[:]).ravel().tolist()))
        outline = data.outline(settings, tmp_path)
        exact = isinstance(split["test"], int) and "fraction" not in (validation or {})
        assert len(dataset.train_y) <= outline.train_records == dataset.train_records and outline.files == (rows,)
        assert not exact or (outline.train_records, outline.test_records) == (len(dataset.train_y), len(dataset.test_y))
    steps = [len(after) - len(before) for before, after in itertools.pairwise(found)]
    assert all(before <= after for before, after in itertools.pairwise(found)), "no record leaves the training part"
    assert set(steps) <= {0, 1} and sum(steps) > 0


def test_categories_that_would_reach_training_as_codes_are_refused() -> None:
    with pytest.raises(DataError, match=r"training: job.* would be used as numbers but hold categories; put one-hot"):
        data.outline(section(name="bank", preprocess=[{"scale": {}}]), HERE)


def test_the_interface_needs_no_heavy_library() -> None:
    code = "import sys, dpsgd_cli.data; print([m for m in ('torch', 'pandas', 'scipy', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_card_s_default_steps_are_used_only_where_the_recipe_names_none() -> None:
    assert data.outline(section(name="adult"), HERE).input_shape == (108,)
    unscaled = data.outline(section(name="breast-cancer", preprocess=[]), HERE)
    assert unscaled.input_shape == (30,)
    assert data.prepare(section(name="breast-cancer", preprocess=[]), HERE, 1, refuse, "add-remove").train_x.max() > 100


def test_pooled_files_number_identical_records_together(tmp_path: Path) -> None:
    """Four times the same record in two files: pooled they have four coins, apart two for each file."""
    same = "x,y\n1,0\n1,0\n"
    for name in ("own.csv", "test.csv"):
        (tmp_path / name).write_text(same)
    named: dict[str, Any] = {
        "path": "own.csv",
        "test_path": "test.csv",
        "target": "y",
        "classes": [0, 1],
        "bounds": [0, 9],
    }
    pooled = data.prepare(section(**named, split={"test": 1}, preprocess=[]), tmp_path, 1, refuse, "add-remove")
    assert pooled.keys is not None and len(set(pooled.keys.values.tolist())) == 4
    apart = section(**named, validation={"records": 1, "public": True}, preprocess=[])
    found = data.prepare(apart, tmp_path, 1, refuse, "add-remove").keys
    assert found is not None and len(set(found.values.tolist())) == 2, "the validation record has the third"


def test_a_part_with_more_records_than_places_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(60)))
    settings = section(path="own.csv", target="y", classes=[0, 1], bounds=[0, 60])
    monkeypatch.setattr(splits, "_DEVIATIONS", -3)
    with pytest.raises(DataError, match=r"leaves more training records than the 39 places that were planned"):
        data.prepare(settings, tmp_path, 1, refuse, "add-remove")
