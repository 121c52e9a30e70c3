"""`dpsgd account`: questions, cases, solving for a budget, rows and tables. Prices are in `accounting/`.

From Python, call the package itself: `dpsgd_cli.account(...)` is `account` below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dpsgd_cli.account import report
from dpsgd_cli.account.options import OF_THE_COMMAND, OPTIONS, Asked
from dpsgd_cli.account.question import cases_of, rows_of
from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.common.text_format import suggested
from dpsgd_cli.errors import UsageError


def account(
    *sources: str | Path, overrides: Mapping[str, Any] | Sequence[str] = (), trust_code: bool = False, **flags: Any
) -> list[dict[str, Any]]:
    """Return the privacy cost of numbers, recipes, result directories or ledgers, or what a budget affords.

    `sources` and `flags` are those of `dpsgd account --help`, with `_` for `-`. `overrides` replaces recipe settings by
    dotted key. A Python file that a recipe names runs only if this user trained with it, or with `trust_code`.

    Returns one row per accountant, as `--format json` prints them: `accountant`, `epsilon` (None if it refuses, with
    the reason in `note`), `delta`, `adjacency`, `batching`, `bound` (`upper` or `estimate`), ... Raises the errors of
    `dpsgd_cli.errors`; UsageError for a file that is not trusted. Needs no torch.

    >>> row = account(noise_multiplier=4, sampling_rate=0.01, steps=10000, accountant="moments")[0]
    >>> f"epsilon {row['epsilon']:.2f} at delta {row['delta']:g}, {row['bound']}"
    'epsilon 1.26 at delta 1e-05, upper'
    """
    from dpsgd_cli.recipe.overrides import assignments  # NumPy and pydantic, which the command does without

    known = [name for name in OPTIONS if name not in OF_THE_COMMAND]
    unknown = [name for name in flags if name not in known]
    if unknown:
        raise UsageError(f"account takes no {unknown[0]!r}{suggested(unknown[0], known)}")
    given = {
        name: (value,) if OPTIONS[name].value == () and isinstance(value, str) else value
        for name, value in flags.items()
    }
    asked = Asked((*map(str, sources), *assignments(overrides)), **given)
    with trusting(really=trust_code):
        rows: list[dict[str, Any]] = json.loads(report.as_json(rows_of(asked, cases_of(asked))))
    return rows


class _Room(ModuleType):
    """Callable package: package and function share a name, and both work in whichever order they are imported."""

    def __call__(self, *sources: Any, **given: Any) -> Any:
        return account(*sources, **given)


sys.modules[__name__].__class__ = _Room
