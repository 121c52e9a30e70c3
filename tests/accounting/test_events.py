"""Events of dp_accounting, out and in, priced by dp_accounting itself; histories of Opacus; refusals."""

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
from dpsgd_cli.accounting.events import Event, read_events, read_opacus_history, to_event
from dpsgd_cli.accounting.mechanism import (
    ApproximateDP,
    CorrelatedSums,
    GaussianSum,
    PureDP,
    Release,
    TruncatedSum,
    ZeroConcentrated,
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


def ours(event: Any) -> Any:
    """The JSON object of an event's own named tuples."""
    if isinstance(event, list):
        return [ours(one) for one in event]
    return {key: ours(value) for key, value in event._asdict().items()} if hasattr(event, "_asdict") else event


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


@pytest.mark.parametrize("adjacency", RELATIONS)
def test_what_goes_out_comes_back_with_its_price(adjacency: Adjacency, tmp_path: Path) -> None:
    others = [
        Release(ApproximateDP(0.2, 1e-7, adjacency), 3),
        Release(PureDP(0.3, adjacency)),
        Release(TruncatedSum(3.0, adjacency, "truncated-poisson", 0.01, records=1000, largest_batch=30), 50),
    ]
    releases = [*mixed(adjacency)[:3], *others]
    back = read_events(written(tmp_path, to_event(releases)), adjacency)
    pld = accountants.get("pld")
    assert pld.epsilon(back, 1e-5) == pytest.approx(pld.epsilon(releases, 1e-5), rel=1e-9)
    bounded = [Release(PureDP(0.3, adjacency, "exponential"), 9)]
    weaker = read_events(written(tmp_path, to_event(bounded)), adjacency)
    assert pld.epsilon(weaker, 1e-5) >= pld.epsilon(bounded, 1e-5)
    budget = [Release(ZeroConcentrated(0.1, adjacency), 2)]
    again = read_events(written(tmp_path, to_event(budget)), adjacency)
    assert again == budget


def test_an_event_of_dp_accounting_is_read_from_its_named_tuple(tmp_path: Path) -> None:
    step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.1))
    twice = dp_event.SelfComposedDpEvent(step, 2)
    event = dp_event.ComposedDpEvent(
        [
            dp_event.SelfComposedDpEvent(dp_event.ComposedDpEvent([twice, dp_event.GaussianDpEvent(30.0)]), 100),
            dp_event.NoOpDpEvent(),
            dp_event.ZCDpEvent(0.01),
            dp_event.LaplaceDpEvent(4.0),
        ]
    )
    found = read_events(written(tmp_path, ours(event.to_named_tuple())), "add-remove")
    assert found == [
        Release(GaussianSum(1.1, "add-remove", "poisson", 0.01), 200),
        Release(GaussianSum(30.0, "add-remove"), 100),
        Release(ZeroConcentrated(0.01, "add-remove")),
        Release(PureDP(0.25, "add-remove", "pure")),
    ]


def named(name: str, **fields: Any) -> Event:
    return {"class_name": name, **fields}


GAUSSIAN = named("GaussianDpEvent", noise_multiplier=1.0)
TWO = named("ComposedDpEvent", events=[GAUSSIAN, GAUSSIAN])


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (named("UnsupportedDpEvent"), "no release of a ledger is proved"),
        (named("NonPrivateDpEvent"), "no release of a ledger is proved"),
        (named("SampledWithoutReplacementDpEvent", source_dataset_size=9, sample_size=1, event=GAUSSIAN), "no release"),
        (named("MyDpEvent", module_name="mine", x=1), "which is not dp_accounting"),
        (GAUSSIAN | {"l2_norm": 2.0}, "has 'l2_norm', 'noise_multiplier', but must have noise_multiplier"),
        (named("GaussianDpEvent"), "has no fields"),
        (named("GaussianDpEvent", noise_multiplier="1"), "must be a finite number"),
        (named("GaussianDpEvent", noise_multiplier=True), "must be a finite number"),
        (named("GaussianDpEvent", noise_multiplier=-1.0), "must be at least 0"),
        (named("SelfComposedDpEvent", event=GAUSSIAN, count=1.5), "whole number"),
        (named("SelfComposedDpEvent", event=GAUSSIAN, count=-1), "whole number"),
        (named("ComposedDpEvent", events=GAUSSIAN), "events must be a list"),
        (named("PoissonSampledDpEvent", sampling_probability=0.1, event=TWO), "only one GaussianDpEvent"),
        (named("PoissonSampledDpEvent", sampling_probability=0.1, event=GAUSSIAN | {"dimension": 2}), "only one"),
        (named("PoissonSampledDpEvent", sampling_probability=1.5, event=GAUSSIAN), "must be in [0, 1]"),
        (named("ZCDpEvent", rho=0.1, xi=0.1), "xi is not 0"),
        (named("LaplaceDpEvent", noise_multiplier=0.0), "without noise"),
        ([GAUSSIAN], "an object with a class_name"),
    ],
)  # fmt: skip
def test_an_event_that_is_not_known_to_the_field_is_refused(event: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, named("ComposedDpEvent", events=[GAUSSIAN, event]))
    with pytest.raises(DataError) as refused:
        read_events(path, "add-remove")
    assert said in str(refused.value) and "events[1]" in str(refused.value)


def test_replaced_records_are_refused_both_ways(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one record's norm"):
        read_events(written(tmp_path, GAUSSIAN), "replace-one")
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
        ([1.1, 0.01, 0.5], "whole number"),
    ]:
        with pytest.raises(DataError, match=said):
            read_opacus_history(written(tmp_path, [entry]), "shuffle")


def test_the_command_exports_reads_and_asks_for_what_a_file_does_not_say(tmp_path: Path) -> None:
    numbers = ("--noise-multiplier", "1", "--sampling-rate", "0.01", "--steps", "1000")
    event, history = tmp_path / "event.json", tmp_path / "history.json"
    event.write_text(run(*numbers, "--export", "dp-accounting").stdout)
    history.write_text("[[1.0, 0.01, 1000]]")
    expected = rows(*numbers, "--accountant", "pld")["pld"]["epsilon"]
    given = (
        ("--events", str(event), "--adjacency", "add-remove"),
        ("--opacus-history", str(history), "--batching", "poisson"),
    )
    for source in given:
        assert rows(*source, "--accountant", "pld")["pld"]["epsilon"] == expected
    refused: list[tuple[tuple[str, ...], str]] = [
        (given[0][:2], "give --adjacency"),
        (given[1][:2], "give --batching"),
        ((*given[0], "--steps", "3"), "leave out other sources"),
        ((*given[0], *given[1]), "leave out other sources"),
        ((*given[1][:2], "--batching", "full"), "give --batching"),
        (("--events", str(tmp_path / "none.json"), "--adjacency", "add-remove"), "not a JSON file"),
    ]
    several = run(*numbers, "--batching", "poisson", "--batching", "full", "--export", "dp-accounting")
    assert several.exit_code == 2 and "2 different ledgers" in several.stderr
    for options, said in refused:
        result = run(*options)
        assert result.exit_code in (1, 2) and said in result.stderr
