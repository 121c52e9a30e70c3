"""What `dpsgd account` is asked and answers: cases, what can be afforded, rows and tables. Prices are in `privacy/`.

From Python the room itself is called, `dpsgd_cli.account(...)`, which does what `calling.account` says.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A package of the same name as the function that users call: whichever was imported first, both are there."""

    def __call__(self, *sources: Any, **given: Any) -> Any:
        return importlib.import_module("dpsgd_cli.account.calling").account(*sources, **given)


sys.modules[__name__].__class__ = _Room
