"""Frozen extractors: per record, public, kept, and refused with advice."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsgd_cli import data
from dpsgd_cli.data import features
from dpsgd_cli.data.dataset import Layout, Step
from dpsgd_cli.data.extractor_settings import (
    ColourFeatures,
    Features,
    HogFeatures,
    PatchFeatures,
    PretrainedFeatures,
    ScatteringFeatures,
)
from dpsgd_cli.data.on_disk import Transform
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.loading import load_recipe


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda project: tmp_path / "cache")


TINY_PATCHES = PatchFeatures(patches=6, size=3, pool=2)
WITHOUT_DATA: list[Features] = [
    ScatteringFeatures(orientations=2, grey=True, unit_orders=True, mirror=True),
    TINY_PATCHES,
    HogFeatures(cell=2, orientations=4),
    ColourFeatures(pool=2),
]


def extractor(settings: Features, base: Path) -> features.Extract:
    return features.EXTRACTORS[settings.kind](settings, base)


def transform_of(step: Step, shape: tuple[int, ...]) -> Transform:
    return step.fit(np.zeros((0, *shape), np.float32), Layout(shape))


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


def joined(*settings: Features) -> Step:
    step = features.step_of(Data(name="cifar10", features=list(settings)), Path())
    assert step is not None
    return step


@pytest.mark.parametrize("settings", [*WITHOUT_DATA, None], ids=lambda one: one.kind if one else "joined")
def test_other_records_do_not_change_what_a_record_becomes(settings: Features | None) -> None:
    """The same to the bit, alone and among records that are a thousand times as bright."""
    step = joined(*WITHOUT_DATA) if settings is None else extractor(settings, Path())
    rows = images(3)
    others = rows * 1000
    others[1] = rows[1]
    alone, among = (step.fit(rows[:0], Layout(rows.shape[1:]))(x)[1] for x in (rows, others))
    assert np.allclose(alone, among, rtol=1e-4, atol=1e-6)
    assert alone.shape == step.plan(Layout(rows.shape[1:])).shape


@pytest.mark.parametrize(
    ("settings", "shape", "norm"),
    [
        (ScatteringFeatures(orientations=4, unit_orders=True, grey=True), (25, 2, 2), math.sqrt(3)),
        (PatchFeatures(patches=10, size=3, stride=2, pool=3), (5, 3, 3), 1),
        (HogFeatures(cell=2, orientations=4), (16, 3, 3), 1),
        (ColourFeatures(pool=2), (3, 2, 2), 1),
    ],
)
def test_features_without_data_have_their_shapes_and_norms(
    settings: Features, shape: tuple[int, ...], norm: float
) -> None:
    found = transform_of(extractor(settings, Path()), (3, 8, 8))(images(4))
    assert found.shape == (4, *shape)
    assert np.allclose(np.linalg.norm(found.reshape(4, -1), axis=1), norm, rtol=1e-4)


def test_orders_of_scattering_are_square_roots_at_unit_norm() -> None:
    rows = images(2)
    plain = transform_of(extractor(ScatteringFeatures(orientations=2), Path()), rows.shape[1:])(rows)
    settings = ScatteringFeatures(orientations=2, unit_orders=True)
    found = transform_of(extractor(settings, Path()), rows.shape[1:])(rows).reshape(2, 3, 9, 4)
    for own, raw in zip(found, plain.reshape(2, 3, 9, 4), strict=True):
        for paths, power in ((slice(0, 1), 1), (slice(1, 5), 0.5), (slice(5, 9), 0.5)):
            expected = raw[:, paths] ** power
            assert np.allclose(own[:, paths], expected / np.linalg.norm(expected), rtol=1e-4)


def test_mirror_images_have_the_same_features_where_that_is_asked_for() -> None:
    settings = [one.model_copy(update={"mirror": one.kind != "patches"}) for one in WITHOUT_DATA]
    step = joined(*settings)
    rows = images(2)
    transform = transform_of(step, rows.shape[1:])
    assert np.allclose(transform(rows), transform(rows[..., ::-1]), atol=0.02)


def test_a_list_joins_the_features_of_each_record() -> None:
    rows = images(3)
    found = transform_of(joined(*WITHOUT_DATA), rows.shape[1:])(rows)
    parts = [transform_of(extractor(one, Path()), rows.shape[1:])(rows).reshape(3, -1) for one in WITHOUT_DATA]
    assert found.dtype == np.float16
    assert np.allclose(found, np.concatenate(parts, axis=1), atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [{"patches": 8}, {"size": 4}, {"stride": 2}, {"shrink": 2}, {"pool": 1}, {"images": "strokes"}, {"seed": 1}],
    ids=str,
)
def test_any_other_setting_is_kept_apart(tmp_path: Path, change: dict[str, Any]) -> None:
    rows = images(2, side=16)
    for settings in (TINY_PATCHES, TINY_PATCHES.model_copy(update=change)):
        transform_of(joined(settings), rows.shape[1:])(rows)
    assert len(list((tmp_path / "cache" / "features").iterdir())) == 2


def test_other_cuts_find_the_same_features(tmp_path: Path) -> None:
    """However rows are cut, and whatever is held out: one array a file, of which each row is in its place."""
    rows = images(12, side=4)
    np.savez(tmp_path / "own.npz", x=rows, y=np.arange(12) % 2)
    section = {"path": "own.npz", "bounds": [0, 1], "classes": [0, 1], "preprocess": []}
    section |= {"features": [{"kind": "colour-means", "pool": 2}]}
    whole = rows.reshape(12, 3, 2, 2, 2, 2).mean(axis=(3, 5)).reshape(12, 12)
    whole /= np.linalg.norm(whole, axis=1, keepdims=True)
    for test in (3, 5):
        settings = Data.model_validate(section | {"split": {"test": test}})
        settings = settings.protecting(None, by_place=True)
        found = data.prepare(settings, tmp_path, 1, lambda *_: pytest.fail("no noise"), "add-remove")
        joined_again = np.concatenate([found.train_x, found.test_x])
        assert found.keys is not None and np.allclose(joined_again, whole[found.keys.values], atol=1e-3)
    assert len(list((tmp_path / "cache" / "features").iterdir())) == 1


def test_what_shaped_the_features_is_declared() -> None:
    assert "dead-leaves images that a public seed draws" in (joined(*WITHOUT_DATA).declaration or "")
    assert joined(HogFeatures()).declaration is None
    assert joined(HogFeatures()).made_from == {}


def test_features_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = images(3)
    step = extractor(ScatteringFeatures(orientations=2), Path())
    first = transform_of(step, rows.shape[1:])(rows)
    assert len(list((tmp_path / "cache" / "features").iterdir())) == 1
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
        (PatchFeatures(), (3, 7, 7), "patches takes square images .* of side 8 or more"),
        (HogFeatures(), (1, 7, 7), "hog takes square images"),
        (ColourFeatures(), (12,), "colour-means takes square images"),
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
        model={"kind": "mlp", "hidden": [5]},
        method={"kind": "sgd", "batching": "full"},
        privacy=None,
        save_model=True,
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
