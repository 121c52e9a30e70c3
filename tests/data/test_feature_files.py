"""Features from a file: joined row by row, and refused where they may belong to other records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from safetensors.numpy import save_file

import dpsgd_cli as dpsgd
from dpsgd_cli.data.dataset import Part
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.opening import load_raw, open_labelled, open_unlabelled
from dpsgd_cli.data.preparation import outline, training_rows
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError

ROWS = 24
TEXTS = [f"text {row % 20}" for row in range(ROWS)]
MADE = {text: np.random.default_rng(number).normal(size=3) for number, text in enumerate(sorted(set(TEXTS)))}
X = np.array([MADE[text] for text in TEXTS])
TOLD = {"kind": "file", "producer": "toy@1", "public": True, "aligned": {"column": "said", "decides": True}}


def written(folder: Path, rows: list[int] | None = None, shift: int = 0) -> Path:
    """Write `moods.csv` and `made.npz` with these rows of both; features are moved down by `shift` rows."""
    keep = list(range(ROWS)) if rows is None else rows
    frame = pd.DataFrame({"said": TEXTS, "mood": np.arange(ROWS) % 2}).iloc[keep]
    frame.to_csv(folder / "moods.csv", index=False)
    np.savez(folder / "made.npz", x=np.roll(X[keep], shift, axis=0), said=frame["said"].to_numpy(str), producer="toy@1")
    return folder


def own(file: str = "made.npz", **changes: Any) -> Data:
    told = TOLD | {"file": file} | changes
    return Data.model_validate({"path": "moods.csv", "target": "mood", "classes": [0, 1], "features": told})


def part(data: Data, folder: Path) -> Part:
    found = load_raw(data, folder).train
    assert isinstance(found, Part)
    return found


def _npy(folder: Path) -> None:
    np.save(folder / "made.npy", X)


def _safetensors(folder: Path) -> None:
    digests = np.array([list(hashlib.sha256(text.encode()).digest()) for text in TEXTS], np.uint8)
    save_file({"x": X.astype(np.float32), "said_sha256": digests}, folder / "made.safetensors", {"producer": "toy@1"})


def _parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in TEXTS]
    table = pyarrow.table({"x": X.tolist(), "said_sha256": hashes}).replace_schema_metadata({"producer": "toy@1"})
    pyarrow.parquet.write_table(table, folder / "made.parquet")


@pytest.mark.parametrize(
    ("write", "changes"),
    [(None, {}), (_npy, {"aligned": "order"}), (_safetensors, {}), (_parquet, {})],
    ids=["npz", "npy", "safetensors", "parquet"],
)
def test_features_of_every_kind_of_file_join_the_labels(
    tmp_path: Path, write: Callable[[Path], None] | None, changes: dict[str, Any]
) -> None:
    written(tmp_path)
    if write is not None:
        write(tmp_path)
    data = own("made.npz" if write is None else f"made.{write.__name__[1:]}", **changes)
    found = part(data, tmp_path)
    assert found.x.dtype == np.float32 and np.allclose(found.x, X, atol=1e-6)
    assert found.y.tolist() == [row % 2 for row in range(ROWS)]
    facts = outline(data, tmp_path)
    assert facts.input_shape == (3,)
    assert any("made by toy@1, which is declared public, from each record alone" in said for said in facts.declarations)


def test_a_record_removed_with_its_row_leaves_all_others_as_they_are(tmp_path: Path) -> None:
    """The parts of neighbours are neighbours, coins included; without its row, a file is refused."""

    def seen() -> list[tuple[float, ...]]:
        data = own()
        rows = training_rows(load_raw(data, tmp_path), data, tmp_path)
        return sorted((*x.tolist(), int(y)) for x, y in zip(rows.x, rows.y, strict=True))

    written(tmp_path)
    whole = seen()
    for gone in (0, 9, ROWS - 1):
        written(tmp_path, [row for row in range(ROWS) if row != gone])
        left = seen()
        assert len(whole) - len(left) in (0, 1) and not set(left) - set(whole)
    pd.DataFrame({"said": TEXTS[1:], "mood": np.arange(1, ROWS) % 2}).to_csv(tmp_path / "moods.csv", index=False)
    np.savez(tmp_path / "made.npz", x=X, said=np.array(TEXTS), producer="toy@1")
    for changes in ({}, {"aligned": "order"}):
        with pytest.raises(DataError, match="24 rows for 23 records"):
            part(own(**changes), tmp_path)


def test_rows_of_other_records_are_found_by_a_column(tmp_path: Path) -> None:
    """Why the order counts: in a file that is off by a row, one record removed pairs others anew."""
    shifted = np.roll(X, 1, axis=0)
    pairs = {(*x, row % 2) for row, x in enumerate(shifted)}
    without = [row for row in range(ROWS) if row != 5]
    fewer = {(*x, row % 2) for row, x in zip(without, np.roll(X[without], 1, axis=0), strict=True)}
    assert len(fewer - pairs) >= 1, "a pair that was not there before"
    written(tmp_path)
    np.savez(tmp_path / "made.npz", x=shifted, said=np.roll(TEXTS, 1), producer="toy@1")
    with pytest.raises(DataError, match=r"not in the order of the records: 'said' differs in 24 rows; row 1 is"):
        part(own(), tmp_path)


def test_features_that_a_batch_decides_are_found_by_equal_records(tmp_path: Path) -> None:
    """Batch normalisation, say: rows 1 and 21 have one text, and were computed in different batches."""
    written(tmp_path)
    batches = [X[:12], X[12:]]
    mixed = np.concatenate([(batch - batch.mean(axis=0)) / batch.std(axis=0) for batch in batches])
    np.savez(tmp_path / "made.npz", x=mixed, said=np.array(TEXTS), producer="toy@1")
    with pytest.raises(DataError, match=r"rows 1 and 21 have one 'said' and different features"):
        part(own(), tmp_path)
    assert len(part(own(aligned={"column": "said"}), tmp_path)) == ROWS, "a record may be more than its column"
    close = X * (1 + 1e-5 * np.random.default_rng(0).normal(size=X.shape))
    np.savez(tmp_path / "made.npz", x=close, said=np.array(TEXTS), producer="toy@1")
    assert len(part(own(), tmp_path)) == ROWS, "rounding is no mixing"


@pytest.mark.parametrize(
    ("arrays", "changes", "why"),
    [
        ({}, {"file": "maed.npz"}, r"features\.file: .*maed.npz: there is no such file"),
        ({}, {"file": "moods.csv"}, "unknown kind of file; features are .npz"),
        ({}, {"producer": "toy@2"}, r"features\.producer: .* made by 'toy@1', and the recipe says 'toy@2'"),
        ({"y": X}, {}, "has no array 'x'"),
        ({"x": X[:, 0]}, {}, r"has shape \(24,\)"),
        ({"x": X * np.nan}, {}, "NaN or infinite values in 24 rows"),
        ({"x": X}, {}, r"features\.aligned: .* has neither 'said' nor 'said_sha256'"),
        ({"x": X}, {"aligned": {"column": "sad"}}, "has no column 'sad'; did you mean 'said'"),
        ({"x": X}, {"aligned": "order", "test_file": "made.npz"}, "no test records of its own; leave it out"),
    ],
)
def test_a_file_that_does_not_fit_is_told_by_file_and_key(
    tmp_path: Path, arrays: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    written(tmp_path)
    if arrays:
        np.savez(tmp_path / "made.npz", **arrays)
    with pytest.raises(DataError, match=why):
        part(own(**changes), tmp_path)


@pytest.mark.parametrize(
    ("changes", "beside", "why"),
    [
        ({"public": False}, {}, "true declares that the producer is public"),
        ({"aligned": None}, {}, "aligned"),
        ({"sha256": "0" * 64}, {}, "a hash of features is one of all private records"),
        ({}, {"bounds": {"said": [0, 1]}}, "bounds: data.features.file has all"),
        ({}, {"task": "next-token", "target": None, "classes": None}, "has no tokens"),
        ({}, {"path": None, "target": None, "classes": None, "name": "sst2"}, "sha256: missing; give the SHA-256"),
    ],
)
def test_what_the_guarantee_rests_on_is_asked_for(changes: dict[str, Any], beside: dict[str, Any], why: str) -> None:
    told = {key: value for key, value in (TOLD | {"file": "made.npz"} | changes).items() if value is not None}
    data = {"path": "moods.csv", "target": "mood", "classes": [0, 1], "features": told} | beside
    with pytest.raises(ValueError, match=why):
        Data.model_validate({key: value for key, value in data.items() if value is not None})


def test_a_card_has_features_by_their_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test part has a file of its own, or x_test."""
    from tests.data.test_texts import CONTENT, card_of_moods

    lines = [line.split("\t") for line in CONTENT.splitlines()[1:]]
    monkeypatch.setenv("DPSGD_DATA", str(tmp_path / "data"))
    card_of_moods(tmp_path)
    said = np.array([line[0] for line in lines])
    x = np.arange(2.0 * len(lines)).reshape(-1, 2)
    np.savez(tmp_path / "made.npz", x=x, said=said)
    told = TOLD | {"file": "made.npz", "aligned": {"column": "said"}}
    data = Data.model_validate({"name": "moods.yaml", "features": told})
    found: Any = load_raw(data, tmp_path)
    assert np.array_equal(found.train.x, x) and outline(data, tmp_path).input_shape == (2,)
    shipped = Data.model_validate({"name": "sst2", "features": told | {"sha256": "0" * 64}})
    monkeypatch.setattr("dpsgd_cli.data.feature_files.sha256", lambda path: "1" * 64)
    from dpsgd_cli.data import feature_files

    with pytest.raises(DataError, match=r"features\.file: .*SHA-256 1111.*it is another file"):
        feature_files.joined(found, shipped, tmp_path)


def test_from_a_file_of_features_to_predictions(tmp_path: Path) -> None:
    written(tmp_path)
    recipe = {
        "name": "moods",
        "data": own().model_dump(mode="json", exclude_unset=True) | {"preprocess": [{"unit-norm": {}}]},
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 1},
        "epochs": 2,
        "privacy": {"clipping": {"kind": "flat", "norm": 1}, "budget": {"epsilon": 8, "delta": 1e-3}},
        "seed": 0,
    }
    recipe["data"] |= {"split": {"test": 0.25}, "evaluation": "public"}  # type: ignore[operator]
    (tmp_path / "moods.yaml").write_text(yaml.safe_dump(recipe))
    result = dpsgd.train(str(tmp_path / "moods.yaml"), out=tmp_path / "out")
    document = json.loads((result.directory / "result.json").read_text())
    digest = sha256(tmp_path / "made.npz")
    assert document["provenance"]["nonprivate_data_sha256"]["made.npz"] == digest
    assert (
        digest not in json.dumps(document["provenance"]["data_sha256"]) + (result.directory / "recipe.yaml").read_text()
    )
    np.savez(tmp_path / "new.npz", x=X[:3], producer="toy@1", mood=[0, 1, 0])
    np.savez(tmp_path / "nobody.npz", x=X[:3])
    np.savez(tmp_path / "other.npz", x=X[:3], producer="toy@2")
    assert len(result.predict(tmp_path / "new.npz")) == 3
    for name, why in (("nobody.npz", "names no producer"), ("other.npz", "made by 'toy@2'")):
        with pytest.raises(DataError, match=why):
            result.predict(tmp_path / name)
    layout = load_raw(own(), tmp_path).layout
    assert open_labelled(tmp_path / "new.npz", own(), layout, (0, 1)).y.tolist() == [0, 1, 0]
    assert np.array_equal(open_unlabelled(X.astype(np.float32), own(), layout), X.astype(np.float32))
