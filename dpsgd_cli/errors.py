"""Errors that a user can cause, and their exit codes.

DpsgdError                    exit code
├── UsageError            2   Wrong flags or arguments.
├── RecipeError           2   A recipe that does not parse, validate or make sense (holds ALL its problems).
├── DataError             2   A file that is missing, damaged or differs from its card.
├── PrivacyError          2   A combination that has no guarantee.
│   ├── UnsupportedMechanism  An accountant refuses a mechanism by name.
│   │   └── FailedAccountant  Its numbers are beyond the range of floats: it states nothing.
│   └── InfeasibleBudget      No noise level or number of epochs fits the budget.
├── BudgetExceeded        1   A release would have exceeded the budget; it was not made.
├── ModelError            2   A model that cannot be trained privately.
└── RunError              1   Training or writing failed (disk full, diverged, damaged checkpoint).

An interruption is a RunError, too, with the exit code that shells expect: 130 for Ctrl-C, 143 for SIGTERM.
SaidElsewhere is not an error: it ends a process of a team silently. Only `dpsgd_cli.main` turns these into messages and
exit codes. Any other exception is a bug of dpsgd; the message says so, and names the file that holds the traceback.
"""

from __future__ import annotations


class DpsgdError(Exception):
    """Base of all expected errors; `str(error)` is the message to the user."""

    exit_code = 1


class SaidElsewhere(SystemExit):
    """Silent end of a process, because another one of its team has printed the reason."""


class UsageError(DpsgdError):
    exit_code = 2


class RecipeError(DpsgdError):
    """One or more problems of one recipe, reported together.

    `problems` holds one line of text each, which begins with `file:line` if that is known.
    """

    exit_code = 2

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(DpsgdError):
    exit_code = 2


class PrivacyError(DpsgdError):
    exit_code = 2


class UnsupportedMechanism(PrivacyError):
    """An accountant was asked about a mechanism, batching or adjacency that it does not cover."""


class FailedAccountant(UnsupportedMechanism):
    """An accountant's own numbers failed (overflow, NaN), so it states nothing."""


class InfeasibleBudget(PrivacyError):
    """No setting of the free parameter satisfies the budget."""


class BudgetExceeded(DpsgdError):
    """Refusal BEFORE a release that would exceed the budget; nothing was released."""

    exit_code = 1


class ModelError(DpsgdError):
    exit_code = 2


class RunError(DpsgdError):
    exit_code = 1
