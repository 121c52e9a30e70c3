"""Training of recipes at equal budgets for a comparison, unless they have a result; packed like a sweep.

`account/matching.py` matches the budgets; `results/comparison.py` compares the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpsgd_cli.account.matching import Terms, matched
from dpsgd_cli.common.interrupts import kill_is_interrupt
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import RecipeError, RunError
from dpsgd_cli.results import store
from dpsgd_cli.results.comparison import Entry
from dpsgd_cli.sweep import booking, planning
from dpsgd_cli.sweep.expansion import cell_of
from dpsgd_cli.sweep.running import PackJob, is_pending, run_job


def trained(recipes: Sequence[str], terms: dict[str, Any], out: Path, say: Callable[[str], None]) -> list[Entry]:
    """Return every recipe at every budget as an entry, trained if it has no result.

    Raises one RecipeError for all recipes that cannot run, and RunError if a training fails.
    """
    asked = matched(recipes, Terms(**terms))
    cells = [cell_of(number, loaded, {}) for number, (_, _, loaded) in enumerate(asked)]
    problems = [
        f"{label}{'' if epsilon is None else f' at epsilon {epsilon:g}'}: {error}"
        for (label, epsilon, _), cell in zip(asked, cells, strict=True)
        if (error := planning.shared_planner().plan(cell).error) is not None
    ]
    if problems:
        raise RecipeError(problems)
    with kill_is_interrupt():
        left = [pack for pack in planning.packs(cells) if any(is_pending(cell, out, True) for cell in pack)]
        store.prepare_place(out / "comparison.probe")
        book = booking.book_of(cells)
        if book is not None:
            booking.reserve(book, out, cells, "compare")
        for number, pack in enumerate(left, start=1):
            outcome = run_job(PackJob(pack, out, retry_failed=True, charged="runs"))
            say(f"pack {number}/{len(left)}: {count(outcome.trials, 'trial')} in {outcome.seconds:.1f} s")
            if outcome.failed:
                raise RunError("\n".join(f"{name}: {error}" for name, error in outcome.failed.items()))
    return [
        Entry(label, epsilon, out / cell.directory, store.read_whole(out / cell.directory))
        for (label, epsilon, _), cell in zip(asked, cells, strict=True)
    ]
