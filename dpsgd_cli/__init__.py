"""dpsgd: an experiment runner for differentially private gradient methods.

    import dpsgd_cli as dpsgd

    result = dpsgd.train("recipe.yaml", {"privacy.budget.epsilon": 1})
    result.privacy["epsilon"], result.metrics["test_accuracy"]["mean"]
    result.predict(frame)

    dpsgd.train(frame, target="churn", epsilon=1, delta=1e-5, bounds={"age": (18, 90)}, classes=["no", "yes"])

Importing it loads nothing: torch is loaded by `train` and `load`, and never by `account`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsgd_cli.account import account as account
    from dpsgd_cli.library import Result as Result
    from dpsgd_cli.library import load as load
    from dpsgd_cli.library import train as train

__version__ = "0.1.0"
__all__ = ["Result", "account", "load", "train"]


def __getattr__(name: str) -> Any:
    if name == "account":
        return importlib.import_module("dpsgd_cli.account")
    if name in __all__:
        return getattr(importlib.import_module("dpsgd_cli.library"), name)
    raise AttributeError(f"module 'dpsgd_cli' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
