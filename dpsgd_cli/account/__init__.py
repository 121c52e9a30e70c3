"""Questions and answers of `dpsgd account`: cases, solving for a budget, rows and tables. Prices are in `accounting/`.

From Python, call the package itself: `dpsgd_cli.account(...)` calls `calling.account`.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """Callable package: package and function share a name, and both work in whichever order they are imported."""

    def __call__(self, *sources: Any, **given: Any) -> Any:
        return importlib.import_module("dpsgd_cli.account.calling").account(*sources, **given)


sys.modules[__name__].__class__ = _Room
