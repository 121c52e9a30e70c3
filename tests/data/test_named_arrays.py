"""Tokens, masks and labels that are arrays: no integer is rounded on its way from a file to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpsgd_cli.batching.streamed import StreamedTable
from dpsgd_cli.data.opening import load_raw
from dpsgd_cli.data.own_arrays import next_tokens
from dpsgd_cli.data.preparation import outline, pipeline_of
from dpsgd_cli.data.settings import Data, TextInput
from dpsgd_cli.engine.named_inputs import NamedInputs
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import DataError
from dpsgd_cli.users.run import UnitTable

LARGE = (1 << 53) + 1
TOKENS = np.array([[1, LARGE, 3], [4, 5, LARGE - 2]])
CPU = torch.device("cpu")


def saved(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "a.npz", **arrays)
    return folder


def prepared(data: Data, folder: Path) -> np.ndarray:
    raw = load_raw(data, folder)
    (rows,), _ = pipeline_of(data, folder, raw.layout, {}).run([raw.train.x], 1)
    return np.asarray(rows)


def test_integers_of_a_file_reach_the_model_as_they_are(tmp_path: Path) -> None:
    """Neither float32 nor float64 holds 2^53 + 1; and nobody is advised to give bounds."""
    data = Data(path="a.npz", classes=[0, 1])
    rows = prepared(data, saved(tmp_path, x=TOKENS, y=[0, 1]))
    assert np.array_equal(rows, TOKENS)
    table = Table.load(rows, np.array([0, 1]), False, CPU, torch.float32)
    picked = table._gather(torch.tensor([[1, 0]]), None)[0]
    assert picked.dtype == torch.int64 and picked.tolist() == [TOKENS[::-1].tolist()]
    assert outline(data, tmp_path).integers


def test_integers_on_disk_stay_integers(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", TOKENS)
    np.save(tmp_path / "y.npy", np.array([0, 1]))
    raw = load_raw(Data(path="x.npy", target="y.npy", classes=[0, 1]), tmp_path)
    table = StreamedTable.open(raw.train.x, raw.train.y, CPU, torch.float32)  # type: ignore[arg-type]
    assert table._gather(torch.tensor([[1]]), None)[0].tolist() == [[TOKENS[1].tolist()]]


def test_bytes_are_pixels_and_bounds_make_numbers(tmp_path: Path) -> None:
    x = np.array([[0, 255], [51, 102]])
    data = Data(path="a.npz", classes=[0, 1])
    pixels = prepared(data, saved(tmp_path, x=x.astype(np.uint8), y=[0, 1]))
    bounded = prepared(data.changed(bounds=(0, 255)), saved(tmp_path, x=x, y=[0, 1]))
    for rows in (pixels, bounded):
        np.testing.assert_allclose(rows, x / 255, rtol=1e-6)


INPUTS = {"input_ids": {"shape": [3]}, "pixel_values": {"shape": [2, 2], "kind": "real"}}


def test_named_arrays_come_back_under_their_names(tmp_path: Path) -> None:
    tokens, pixels = TOKENS % (1 << 24), np.random.default_rng(0).random((2, 2, 2))
    folder = saved(tmp_path, input_ids=tokens, pixel_values=pixels, y=[0, 1])
    data = Data.model_validate({"path": "a.npz", "classes": [0, 1], "inputs": INPUTS})
    rows = prepared(data, folder)

    class Both(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
            assert input_ids.tolist() == tokens.tolist() and input_ids.dtype == torch.int64
            assert pixel_values.shape == (2, 2, 2) and np.allclose(pixel_values, pixels)
            return input_ids

    assert data.inputs is not None
    shapes = {name: told.shape for name, told in data.inputs.items()}
    NamedInputs(Both(), shapes, frozenset(["input_ids"]))(torch.from_numpy(rows))


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"input_id": TOKENS}, "did you mean 'input_id'"),
        ({"input_ids": TOKENS[:, :2]}, r"shape \(2, 2\) of int64, but data\.inputs says \(N, 3\)"),
        ({"input_ids": TOKENS.astype(float)}, "holds float64; save integers"),
        ({"input_ids": TOKENS, "pixel_values": np.zeros((2, 2, 2))}, r"above 2\^24"),
        ({"input_ids": TOKENS[:1] % 7}, "different numbers of rows"),
    ],
)
def test_what_does_not_fit_the_names_is_refused(tmp_path: Path, arrays: dict[str, Any], told: str) -> None:
    folder = saved(tmp_path, **({"pixel_values": np.zeros((2, 2, 2)), "y": [0, 1]} | arrays))
    with pytest.raises(DataError, match=told):
        load_raw(Data.model_validate({"path": "a.npz", "classes": [0, 1], "inputs": INPUTS}), folder)


@pytest.mark.parametrize(
    ("data", "y", "wanted"),
    [
        ({"task": "token-classification", "classes": ["a", "b"]}, [[0, 1, -100], [1, 1, 0]], [[0, 1, -1], [1, 1, 0]]),
        ({"task": "multi-label", "classes": ["a", "b"]}, [[0, 1], [1, -1]], [[0, 1], [1, -1]]),
        ({"task": "next-token"}, None, [[LARGE, 3, -1], [5, LARGE - 2, -1]]),
    ],
)
def test_labels_are_arrays_of_any_shape(tmp_path: Path, data: dict[str, Any], y: Any, wanted: Any) -> None:
    saved(tmp_path, x=TOKENS, **({} if y is None else {"y": y}))
    raw = load_raw(Data.model_validate({"path": "a.npz"} | data), tmp_path)
    np.testing.assert_allclose(np.asarray(raw.train.y), wanted)


def test_padding_has_no_next_token() -> None:
    assert next_tokens(np.array([[5, 7, -1, -1], [1, 2, 3, 4]])).tolist() == [[7, -1, -1, -1], [2, 3, 4, -1]]


def test_integers_beside_pixels_are_those_that_float32_holds(tmp_path: Path) -> None:
    data = Data.model_validate({"path": "a.npz", "classes": [0, 1], "inputs": INPUTS})
    pixels = np.zeros((2, 2, 2))
    most = np.full((2, 3), 1 << 24)
    saved(tmp_path, input_ids=most, pixel_values=pixels, y=[0, 1])
    assert load_raw(data, tmp_path).train.x[:, :3].tolist() == most.tolist()  # type: ignore[index]
    saved(tmp_path, input_ids=most + 1, pixel_values=pixels, y=[0, 1])
    with pytest.raises(DataError, match=r"above 2\^24"):
        load_raw(data, tmp_path)


def test_a_users_places_without_a_row_keep_other_tokens_as_they_are() -> None:
    rows = Table(torch.from_numpy(TOKENS), torch.tensor([0, 1]), False)
    x, _ = UnitTable.of(rows, torch.tensor([[0, -1], [1, 0]]))._of(torch.tensor([[[0, -1], [1, 0]]]))
    assert x.tolist() == [[TOKENS[0].tolist(), TOKENS[1].tolist(), [0, 0, 0], TOKENS[0].tolist()]]


def test_a_tokenizer_of_its_own_folder_has_to_be_declared_public() -> None:
    asked = {"column": "review", "length": 8, "folder": "words"}
    with pytest.raises(ValueError, match="public: a tokenizer that private records shaped tells of them"):
        TextInput.model_validate(asked)
    assert TextInput.model_validate(asked | {"public": True}).folder == "words"
