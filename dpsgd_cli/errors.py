"""Every error that a user can cause, and the exit code that each one becomes.

DpsgdError                    exit code
├── UsageError            2   wrong flags or arguments
├── RecipeError           2   a recipe that does not parse, validate or make sense (holds ALL its problems)
├── DataError             1   a file that is missing, damaged or does not hold what its card says
├── PrivacyError          2   a combination that has no guarantee
│   ├── UnsupportedMechanism  an accountant refuses a mechanism by name
│   │   └── FailedAccountant  its numbers are beyond what floats hold: it states nothing
│   └── InfeasibleBudget      no noise level or epoch count fits the budget
├── BudgetExceeded        1   a release would have passed the budget; it was not made
├── ModelError            2   a model that cannot be trained privately
└── RunError              1   training or writing failed (disk full, diverged, damaged checkpoint)

An interruption is a RunError too, with the exit code that shells know it by: 130 for Ctrl-C, 143 for SIGTERM.
SaidElsewhere is no error: it ends a process of a team in silence. Only `dpsgd_cli.main` turns these into messages and
exit codes; whatever else is raised is a bug of ours, which it says in a line, with the file that holds the traceback.
"""

from __future__ import annotations


class DpsgdError(Exception):
    """Base of every expected error; `str(error)` is the message the user sees."""

    exit_code = 1


class SaidElsewhere(SystemExit):
    """Ends a process quietly, since another one of its team has said why."""


class UsageError(DpsgdError):
    exit_code = 2


class RecipeError(DpsgdError):
    """One or more problems of one recipe, reported together.

    `problems` holds one line of text each, already carrying `file:line` where known.
    """

    exit_code = 2

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(DpsgdError):
    exit_code = 1


class PrivacyError(DpsgdError):
    exit_code = 2


class UnsupportedMechanism(PrivacyError):
    """An accountant was asked about a mechanism, batching or adjacency that it does not cover."""


class FailedAccountant(UnsupportedMechanism):
    """An accountant's own numbers failed (overflow, not a number), so that it states nothing."""


class InfeasibleBudget(PrivacyError):
    """No setting of the free parameter satisfies the budget."""


class BudgetExceeded(DpsgdError):
    """Raised BEFORE a release that would pass the budget; nothing was released."""

    exit_code = 1


class ModelError(DpsgdError):
    exit_code = 2


class RunError(DpsgdError):
    exit_code = 1
