"""Rows on disk against the same rows in memory."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.data import on_disk, opening
from dpsgd_cli.data.on_disk import DiskPart, DiskRows, stored
from dpsgd_cli.data.settings import Data, Split, ValidationSet
from dpsgd_cli.data.splits import Keys, content_keys
from dpsgd_cli.errors import DataError


@pytest.fixture
def file(tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """500 rows of 2 x 3, on disk and in memory."""
    rows = np.random.default_rng(0).random((500, 2, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    return stored(tmp_path / "x.npy"), rows


def test_rows_are_those_of_the_file(file: tuple[np.ndarray, np.ndarray]) -> None:
    """In any order, more than once, of all and of some."""
    held, rows = file
    some = np.flatnonzero(np.random.default_rng(1).random(500) < 0.3)
    for places, own in ((None, rows), (some, rows[some])):
        read = DiskRows(held, places)
        for count in (0, 1, 63, 1000):
            numbers = np.random.default_rng(count).integers(0, len(own), count)
            assert np.array_equal(read.at(numbers), own[numbers])
        assert np.array_equal(read[3:70], own[3:70]) and read[7:7].shape == (0, 2, 3)
        assert not isinstance(read[3:70], np.memmap)
        with pytest.raises(IndexError):
            read.at(np.array([0, len(own)]))


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.asfortranarray(np.ones((3, 2))), "Fortran order"),
        (np.ones((0, 2)), "must hold at least one row"),
        (np.array(3.0), "must hold at least one row"),
    ],
)
def test_what_has_no_rows_in_order_is_refused(tmp_path: Path, array: np.ndarray, said: str) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(DataError, match=said):
        stored(tmp_path / "x.npy")


def test_files_that_are_no_arrays_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"text")
    with pytest.raises(DataError, match="cannot be read as a npy array"):
        stored(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read as a npy array"):
        stored(tmp_path / "x.npy")


@given(st.integers(4, 60), st.integers(0, 9), st.sampled_from([2, 0.5]), st.sampled_from([1, 0.4]))
def test_cuts_on_disk_are_those_of_rows_in_memory(records: int, seed: int, test: float, validation: float) -> None:
    """One after the other, which is where a row's place in the file and its rank in what is left differ."""
    second = ValidationSet.model_validate(
        {"fraction" if validation < 1 else "records": validation, "seed": seed, "public": True}
    )
    values = np.arange(records) % 7 * 1.0
    for keys in (Keys.of_places([records]), content_keys(values)):
        try:
            first = keys.held_out(Split(test=test, seed=seed))
            then = keys[~first].held_out(second)
        except DataError:
            continue
        part = DiskPart(DiskRows(values), DiskRows(np.arange(records)), keys)
        rest, tested = part.cut(Split(test=test, seed=seed))
        found = [*rest.cut(second), tested]
        kept = np.flatnonzero(~first)
        expected = [kept[~then], kept[then], np.flatnonzero(first)]
        assert [own.y[:].tolist() for own in found] == [own.tolist() for own in expected]
        assert all(own.x[:].tolist() == values[own.y[:]].tolist() for own in found)


def test_keys_in_a_file_are_those_in_memory_and_the_file_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are counted a range of hashes at a time; identical ones, of which there are many, in their order."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, number in (("_KEYS_AT_ONCE", 90), ("CODED_AT_ONCE", 64)):
        monkeypatch.setattr(on_disk, name, number)
    random = np.random.default_rng(0)
    x, y = random.integers(0, 12, (500, 2)).astype(np.float64), random.integers(0, 2, 500)
    held_rows = []
    for name, rows in (("x", x), ("y", y)):
        np.save(tmp_path / f"{name}.npy", rows)
        held_rows.append(DiskRows(stored(tmp_path / f"{name}.npy")))
    keys, own = on_disk.stored_keys(*held_rows), content_keys(x, y)
    np.testing.assert_array_equal(keys.values[0:500], own.values)
    cut = Split(test=0.3)
    np.testing.assert_array_equal(keys.held_out(cut), own.held_out(cut))
    rest, held = DiskPart(held_rows[0], held_rows[1], keys).cut(cut)
    mask = own.held_out(cut)
    for part, chosen in ((rest, ~mask), (held, mask)):
        assert part.keys is not None
        np.testing.assert_array_equal(part.keys.values[0 : len(part)], own.values[chosen])
        np.testing.assert_array_equal(part.y[0 : len(part)], y[chosen])
    assert list((tmp_path / "cache" / "dpsgd" / "tables").iterdir()) == []


def test_a_cut_is_a_uniform_set() -> None:
    """4000 cuts of 3 of 6 rows: each row 2000 times, each pair 800 times, to 5 deviations (1e-5 by chance)."""
    seen = np.zeros((4000, 6), dtype=bool)
    for seed in range(4000):
        seen[seed] = Keys.of_places([6]).held_out(Split(test=3, seed=seed))
    pairs = seen.astype(int).T @ seen
    deviation = {1 / 2: np.sqrt(4000 / 4), 1 / 5: np.sqrt(4000 * 4 / 25)}
    for i in range(6):
        for j in range(i, 6):
            rate = 1 / 2 if i == j else 1 / 5
            assert abs(pairs[i, j] - 4000 * rate) < 5 * deviation[rate]
    always = np.tile(np.arange(6) < 3, (4000, 1)).astype(int)
    assert abs((always.T @ always)[0, 1] - 800) > 5 * deviation[1 / 5], "a set that is always the same is found"


def test_transforms_are_those_of_rows_in_memory(file: tuple[np.ndarray, np.ndarray]) -> None:
    held, rows = file
    out = Keys.of_places([500]).held_out(Split(test=150, seed=4))
    rest = DiskRows(held).only(np.flatnonzero(~out))
    doubled = rest.then(lambda x: 2 * x).reshape(350, 6)
    expected = 2 * rows[~out].reshape(350, 6)
    assert doubled.shape == (350, 6) and doubled.dtype == np.float32 and len(doubled) == 350
    assert np.array_equal(doubled[10:200], expected[10:200]) and np.array_equal(doubled[:], expected)
    assert doubled[5:5].shape == (0, 6)
    places = np.array([[3, 1, 3], [349, 0, 7]])
    assert np.array_equal(doubled.at(places), expected[places])
    with pytest.raises(ValueError, match="stay on disk"):
        rest.reshape(700, 3)


def allocated(run: Callable[[], object]) -> float:
    """The most that Python and NumPy held of their own while `run` ran, in MiB."""
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """256 MiB of rows are checked, cut, drawn from and read through in less than an eighth of that; np.load takes all.

    A file of a quarter of that size takes as much, but for 64 bytes a row for keys and coins.
    """

    def use(folder: Path) -> None:
        data = Data(path="x.npy", target="y.npy", classes=[0, 1])
        source = opening.load_raw(data, folder)
        assert isinstance(source.train, DiskPart)
        keyed = dataclasses.replace(source.train, keys=content_keys(source.train.x, source.train.y))
        train, test = keyed.cut(Split(test=0.01))
        rng = np.random.default_rng(0)
        for _ in range(20):
            train.x.at(rng.integers(0, len(train), 1000))
        for part in (train, test):
            for start in range(0, len(part), 2000):
                assert not part.x[start : start + 2000].any()

    peaks = []
    for records in (1 << 15, 1 << 17):
        folder = tmp_path / str(records)
        folder.mkdir()
        np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (records, 512)).flush()
        np.save(folder / "y.npy", (np.arange(records) % 2).astype(np.uint8))
        peaks.append(allocated(partial(use, folder)))
    assert max(peaks) < 32 and peaks[1] < 1.1 * peaks[0] + 64 * (1 << 17) / 2**20
    assert allocated(lambda: np.load(folder / "x.npy")) > 256 - 1
