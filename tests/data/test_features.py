"""Frozen extractors: per record, public, kept, and refused with advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpsgd_cli import data
from dpsgd_cli.data import features
from dpsgd_cli.data.dataset import Layout, Step
from dpsgd_cli.data.on_disk import Transform
from dpsgd_cli.data.step_settings import Features, PretrainedFeatures, ScatteringFeatures
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.loading import load_recipe


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda project: tmp_path / "cache")


def extractor(settings: Features, base: Path) -> features.Extract:
    return features.EXTRACTORS[settings.kind](settings, base)


def transform_of(step: Step, shape: tuple[int, ...]) -> Transform:
    return step.transform(Layout(shape), None)


def images(count: int, channels: int = 3, side: int = 8) -> np.ndarray:
    return np.random.default_rng(0).random((count, channels, side, side), np.float32)


def test_features_act_on_each_record_alone_and_fit_the_planned_layout() -> None:
    step = extractor(ScatteringFeatures(orientations=2, pool=1, groups=3), Path())
    rows = images(40)
    transform = transform_of(step, rows.shape[1:])
    found = transform(rows)
    assert found.shape[1:] == step.plan(Layout(rows.shape[1:])).shape == (27, 1, 1)
    assert np.allclose(found[17:20], transform(rows[17:20]), atol=1e-5)
    grouped = found.reshape(40, 3, 9)
    assert np.abs(grouped.mean(axis=2)).max() < 1e-5
    assert np.allclose(grouped.std(axis=2), 1, atol=0.05)
    assert transform(rows[:0]).shape == (0, 27, 1, 1)


def test_other_records_do_not_change_what_a_record_becomes() -> None:
    """The same alone and among records that are a thousand times as bright."""
    step = extractor(ScatteringFeatures(orientations=2, groups=3), Path())
    rows = images(3)
    others = rows * 1000
    others[1] = rows[1]
    alone, among = (transform_of(step, rows.shape[1:])(x)[1] for x in (rows, others))
    assert np.allclose(alone, among, rtol=1e-4, atol=1e-6)
    assert alone.shape == step.plan(Layout(rows.shape[1:])).shape


def test_features_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = images(3)
    step = extractor(ScatteringFeatures(orientations=2), Path())
    first = transform_of(step, rows.shape[1:])(rows)
    (kept,) = (tmp_path / "cache" / "features").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(features.Scatter, "network", lambda *_: pytest.fail("made again"))
    assert (transform_of(step, rows.shape[1:])(rows) == first).all()
    other = extractor(ScatteringFeatures(orientations=4), Path())
    with pytest.raises(pytest.fail.Exception, match="made again"):
        transform_of(other, rows.shape[1:])(rows)


@pytest.mark.parametrize(
    ("settings", "shape", "said"),
    [
        (ScatteringFeatures(), (3, 8, 6), "square images"),
        (ScatteringFeatures(), (20,), "square images"),
        (ScatteringFeatures(), (3, 7, 7), "of side 8 or more"),
        (ScatteringFeatures(groups=7), (3, 8, 8), "243 channels cannot be cut into 7"),
    ],
)
def test_what_does_not_fit_is_refused_before_data_is_read(
    settings: Features, shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        extractor(settings, Path()).plan(Layout(shape))


def test_a_network_of_another_recipe_is_cut_before_its_last_layer(
    tmp_path: Path, write_recipe: Callable[..., Path], train: Callable[..., Path]
) -> None:
    public = write_recipe(
        model={"kind": "mlp", "hidden": [5]}, method={"kind": "sgd", "batching": "full"}, privacy=None, save_model=True
    )
    first = train(public)
    result = str(first.relative_to(tmp_path))
    section = {"path": "tiny.npz", "bounds": [0, 1], "classes": [0, 1, 2], "preprocess": [{"unit-norm": {}}]}
    second = write_recipe(data=section | {"features": {"kind": "pretrained", "result": result, "public": True}})
    recipe = load_recipe(str(second)).recipe
    found = data.prepare(recipe.data, tmp_path, 1, lambda *_: pytest.fail("no noise"), "add-remove")
    from safetensors.numpy import load_file

    weights = load_file(first / "model.safetensors")
    raw = np.load(tmp_path / "tiny.npz")["x"].astype(np.float32)
    hidden = np.maximum(raw @ weights["trial-0/1.weight"].T + weights["trial-0/1.bias"], 0)
    expected = hidden / np.maximum(np.linalg.norm(hidden, axis=1, keepdims=True), 1e-30)
    assert np.allclose(found.train_x, expected, atol=1e-5)
    assert any(result in said and "declared public" in said for said in found.declarations)
    assert "features" in found.sha256
    train(second)


def test_a_private_network_is_no_free_extractor() -> None:
    with pytest.raises(ValueError, match="trained on private data is no free extractor"):
        PretrainedFeatures(result="somewhere")
