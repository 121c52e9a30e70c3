"""The lists of mutants fit the code as it is."""

from __future__ import annotations

from tests.mutants.run import ROOT, read_mutants


def test_every_change_can_be_made_and_none_is_listed_twice() -> None:
    """Which fails when the code has moved on: say in the list what stands there now."""
    every = read_mutants(ROOT)  # which refuses a test that does not exist
    wrong = [(m.told, reason) for m in every if (reason := m.stale(ROOT)) is not None]
    wrong += [
        (m.told, "no such test file") for m in every for t in m.tests if not (ROOT / t.partition("::")[0]).is_file()
    ]
    assert not wrong
    places = [(mutant.file, mutant.place, mutant.replace, mutant.by) for mutant in every]
    assert len(places) == len(set(places)) > 0
