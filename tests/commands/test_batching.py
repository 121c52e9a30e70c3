"""`dpsgd recipe batching`: what Table I of Yu et al. shows."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dpsgd_cli.commands.recipe import draw
from dpsgd_cli.main import main
from dpsgd_cli.recipe.batching import BATCHINGS


@pytest.mark.parametrize(("records", "size"), [(10, 1), (12, 3), (7, 2)])
def test_shuffled_batches_hold_each_record_once_and_poisson_batches_do_not(records: int, size: int) -> None:
    found = draw(records, size, 0)
    assert sorted(n for batch in found["shuffle"] for n in batch) == list(range(records))
    assert {len(batch) for batch in found["fixed"]} == {size}
    steps = len(found["shuffle"])
    assert [len(batches) for batches in found.values()] == [steps] * 3
    assert len({len(batch) for batch in found["poisson"]}) > 1
    assert set(found) < set(BATCHINGS)


def test_the_command_shows_all_three() -> None:
    result = CliRunner().invoke(main, ["recipe", "batching", "--seed", "3"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines[::2]] == ["shuffle", "poisson", "fixed"]
    assert lines[0].count("[") == lines[2].count("[") == lines[4].count("[") == 10
    assert lines[1].startswith("         0 records in no batch, 0 in several; an epoch is one Gaussian")
    again = CliRunner().invoke(main, ["recipe", "batching", "--seed", "3"])
    assert again.output == result.output


def test_a_batch_larger_than_the_data_is_refused() -> None:
    result = CliRunner().invoke(main, ["recipe", "batching", "--batch-size", "11"])
    assert result.exit_code == 2
    assert "more than the 10 records" in result.output
