"""Events of dp_accounting, priced by dp_accounting itself; histories of Opacus; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.events import read_opacus_history, to_event
from dpsgd_cli.accounting.mechanism import (
    CorrelatedSums,
    GaussianSum,
    PureDP,
    Release,
)
from dpsgd_cli.errors import DataError, UnsupportedMechanism
from tests.cli.accounting import rows, run

RELATIONS = {
    "add-remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero-out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
}


def mixed(adjacency: Adjacency) -> list[Release]:
    """Releases that both libraries price."""
    return [
        Release(GaussianSum(1.2, adjacency, "poisson", 0.02), 300),
        Release(GaussianSum(8.0, adjacency), 5),
        Release(CorrelatedSums(2.0, adjacency, "poisson", 0.1, bands=4), 20),
        Release(PureDP(0.1, adjacency, "laplace"), 2),
    ]


def theirs(event: Any) -> Any:
    """The event of dp_accounting that a JSON object names."""
    if not isinstance(event, dict):
        return [theirs(one) for one in event] if isinstance(event, list) else event
    fields = {key: theirs(value) for key, value in event.items() if key not in ("module_name", "class_name")}
    return getattr(dp_event, event["class_name"])(**fields)


def test_parts_of_the_data_are_events_of_which_the_greatest_is_the_claim(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "trial": 0,
        "seed": None,
        "epoch": None,
        "mechanism": "gaussian",
        "adjacency": "add-remove",
        "count": 1,
    }
    common |= {"batching": "full", "sampling_rate": 1.0, "sensitivity": 1.0, "label": "one"}
    lines = [common | {"phase": phase, "noise_multiplier": z} for phase, z in (("train", 4.0), ("held-out", 2.0))]
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    events = json.loads(run(str(ledger), "--export", "dp-accounting").stdout)
    found = [PLDAccountant().compose(theirs(event)).get_epsilon(1e-5) for event in events]
    claim = rows(str(ledger), "--delta", "1e-5", "--accountant", "gaussian")["gaussian"]["epsilon"]
    assert len(found) == 2 and max(found) == pytest.approx(claim, rel=1e-3)


def written(folder: Path, event: Any) -> Path:
    path = folder / "event.json"
    path.write_text(json.dumps(event))
    return path


@pytest.mark.parametrize("adjacency", RELATIONS)
def test_dp_accounting_prices_what_is_exported_as_we_do(adjacency: Adjacency) -> None:
    accountant = PLDAccountant(RELATIONS[adjacency], 1e-3)
    accountant.compose(theirs(json.loads(json.dumps(to_event(mixed(adjacency))))))
    epsilon = accountants.get("pld").epsilon(mixed(adjacency), 1e-5)
    assert epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def test_replaced_records_and_random_allocation_have_no_event() -> None:
    with pytest.raises(UnsupportedMechanism, match="one record's norm"):
        to_event([Release(GaussianSum(1.0, "replace-one"))])
    with pytest.raises(UnsupportedMechanism, match="have no event"):
        to_event([Release(GaussianSum(1.0, "add-remove", "random-allocation", 0.1))])


def test_an_opacus_history_is_poisson_batches_or_whole_shuffled_epochs(tmp_path: Path) -> None:
    path = written(tmp_path, {"history": [[1.1, 0.01, 500], [1.0, 0.01, 100]], "mechanism": "rdp"})
    assert read_opacus_history(path, "poisson") == [
        Release(GaussianSum(1.1, "add-remove", "poisson", 0.01), 500),
        Release(GaussianSum(1.0, "add-remove", "poisson", 0.01), 100),
    ]
    assert read_opacus_history(path, "shuffle") == [
        Release(GaussianSum(1.1, "zero-out", "shuffle"), 5),
        Release(GaussianSum(1.0, "zero-out", "shuffle"), 1),
    ]
    for entry, said in [
        ([1.1, 0.01, 150], "no whole number of epochs of 100"),
        ([1.1, 0.011, 100], "whole number of steps"),
        ([1.1, 0.01], "must be"),
        (["1.1", 0.01, 100], "three numbers"),
        ([float("nan"), 0.01, 100], "three numbers"),
        ([1.1, 0.01, 0.5], "whole number"),
    ]:
        with pytest.raises(DataError, match=said):
            read_opacus_history(written(tmp_path, [entry]), "shuffle")


def test_the_command_exports_and_asks_for_what_a_history_does_not_say(tmp_path: Path) -> None:
    numbers = ("--noise-multiplier", "1", "--sampling-rate", "0.01", "--steps", "1000")
    history = tmp_path / "history.json"
    history.write_text("[[1.0, 0.01, 1000]]")
    given = ("--opacus-history", str(history), "--batching", "poisson")
    expected = rows(*numbers, "--accountant", "pld")["pld"]["epsilon"]
    assert rows(*given, "--accountant", "pld")["pld"]["epsilon"] == expected
    several = run(*numbers, "--batching", "poisson", "--batching", "full", "--export", "dp-accounting")
    assert several.exit_code == 2 and "2 cases; give one" in several.stderr
    refused: list[tuple[tuple[str, ...], str]] = [
        (given[:2], "give --batching"),
        ((*given, "--steps", "3"), "leave out other sources"),
        ((*given[:2], "--batching", "full"), "give --batching"),
        (("--opacus-history", str(tmp_path / "none.json"), "--batching", "poisson"), "not a JSON file"),
    ]
    for options, said in refused:
        result = run(*options)
        assert result.exit_code in (1, 2) and said in result.stderr
