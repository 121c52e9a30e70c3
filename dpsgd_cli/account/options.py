"""Options of `dpsgd account`: one list, from which the command, its checks and its Python function are made."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from dpsgd_cli.account.cases import Target
from dpsgd_cli.accounting.adjacency import BATCHINGS, NEIGHBOURS
from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.errors import UsageError

MOST_USES = 1_000_000_000_000
"""Largest number of steps, epochs or trials."""
MOST_IN_A_GROUP = 1_000_000

_SMALLEST, _LARGEST = math.ulp(0.0), sys.float_info.max
RANGES: dict[str, tuple[float, float, str]] = {
    "count": (1, MOST_USES, f"a whole number of at least 1 and at most {MOST_USES}"),
    "group": (1, MOST_IN_A_GROUP, f"a whole number of at least 1 and at most {MOST_IN_A_GROUP}"),
    "positive": (_SMALLEST, _LARGEST, "positive and finite"),
    "limit": (0.0, _LARGEST, "at least 0 and finite"),
    "mean": (1.0, _LARGEST, "at least 1 and finite"),
    "rate": (_SMALLEST, 1.0, "above 0 and at most 1"),
    "delta": (_SMALLEST, math.nextafter(1.0, 0.0), "above 0 and below 1"),
}
"""Kinds of numbers: smallest value, largest value, and the range in words."""

QUESTIONS = {
    "P": "a price",
    "D": "--at-epsilon",
    "B": "a budget",
    "C": "--curve",
    "O": "--over",
    "R": "--over order",
    "F": "--over false-positives",
    "X": "--excess-risk",
    "E": "--export",
}
_PRICED, _NUMBERS = "PDBCO", "PDBCOFE"


class Option(NamedTuple):
    """An option of the command.

    `kind`: a key of `RANGES`, `text`, `flag`, `file`, or names to choose from. `asked`: keys of `QUESTIONS`. `value`:
    what stands for an option that is not given; () for an option that may be repeated.
    """

    kind: str | tuple[str, ...]
    asked: str
    metavar: str | None
    help: str
    value: Any = None


OPTIONS: dict[str, Option] = {
    "noise_multiplier": Option("positive", _NUMBERS + "R", "Z", "Noise over sensitivity, equal in all steps."),
    "noise_over_clip": Option(
        "positive", _NUMBERS, "S", "Noise over the clip norm, as most libraries state it."
    ),
    "sampling_rate": Option("rate", _NUMBERS + "R", "Q", "Expected batch size over records."),
    "batch_size": Option("count", _NUMBERS + "R", "B", "Expected batch size; with N, instead of Q."),
    "records": Option("count", _NUMBERS + "R", "N", "Number of training records."),
    "steps": Option("count", _NUMBERS, "T", "Number of steps."),
    "epochs": Option("count", _NUMBERS, "E", "Number of epochs of 1/Q steps, instead of T."),
    "batching": Option(
        tuple(BATCHINGS), _NUMBERS, None,
        "How batches are drawn; repeatable. Default with Q: poisson.", (),
    ),
    "adjacency": Option(
        tuple(NEIGHBOURS), _NUMBERS, None, "Neighbouring data sets. Default: the batching's."
    ),
    "delta": Option(
        "delta", "PBCO", "D", "Default: that of the recipe or result, else 1e-5."
    ),
    "accountant": Option(
        "text", _PRICED, "NAME[@BATCHING]",
        "Repeatable. `all`: every one. @BATCHING: for that batching only.", (),
    ),
    "at_epsilon": Option("limit", "D", "E", "State delta at this epsilon."),
    "attacker": Option("flag", "PD", None, "Also state the TPR of attacks at FPR 1% and 0.1%.", False),
    "group": Option("group", "PDF", "K", "Protection of K records (or users) together.", 1),
    "trials": Option("text", _PRICED + "FE", "N|all", "Price N trials together (all: those of the source).", "1"),
    "best_of": Option(
        "mean", _PRICED, "K", "Publish only the best of a random number of trials, mean K."
    ),
    "law": Option(
        ("geometric", "logarithmic", "poisson"), _PRICED, None, "Law of the number of trials. Default: geometric."
    ),
    "target_epsilon": Option("positive", "B", "E", "Budget: solve for what this epsilon affords."),
    "target_rho": Option("positive", "B", "R", "Budget in zCDP: solve for what this rho affords."),
    "solve": Option(
        "text", "B", "NAME",
        "Parameter to solve for: noise-multiplier, epochs, steps, batch-size; in a recipe: initial, decay, final,"
        " epochs, batch-size.",
    ),
    "excess_risk": Option("positive", "X", "A", "Steps and records that Lecture 9 needs for excess risk A."),
    "max_epsilon": Option("limit", "PB", "E", "Exit with code 1 unless an upper bound is at most this."),
    "opacus_history": Option(
        "text", _PRICED + "FE", "FILE", "Price an Opacus accountant's history, as JSON; with its --batching."
    ),
    "export": Option(("dp-accounting",), "E", None, "Print the releases as an event of dp_accounting (or several)."),
    "curve": Option("flag", "C", None, "Print epsilon by epoch, as CSV.", False),
    "over": Option(
        "text", "ORF", "NAME=FROM:TO:STEP",
        "Print epsilon over a parameter, as CSV. `order`: Renyi divergences; `false-positives`: the trade-off curve.",
    ),
    "plot": Option("file", "CORF", None, "Also draw the curves."),
    "format": Option(("table", "json", "csv"), "PDBCORFX", None, "Format of the output."),
}  # fmt: skip
HEADINGS = {
    "noise_multiplier": "What was released (instead of a recipe, a result or a ledger)",
    "delta": "What it cost",
    "target_epsilon": "What a budget affords",
    "max_epsilon": "Checking a claim",
    "curve": "Curves",
    "format": "Output",
}
"""Headings of the help, each by the option that it stands above."""
OF_NUMBERS = tuple(OPTIONS)[: tuple(OPTIONS).index("delta")]
"""Options that say what was released; a recipe, a result or a ledger says that itself."""
OF_THE_COMMAND = ("max_epsilon", "excess_risk", "curve", "over", "plot", "export", "format")
"""Options that the Python function does not have."""
_HINTS = {
    "max_epsilon": "--max-epsilon judges prices, ask for one",
    "plot": "a picture is of a curve, give --curve or --over",
    "group": "--group states prices, leave it out or ask for one",
}


def flag(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"


class Asked:
    """The options that were given: the value of each as an attribute, the `sources` and the `overrides` of recipes."""

    def __init__(self, arguments: tuple[str, ...] = (), **given: Any) -> None:
        """Check the options. Raises UsageError for numbers out of range and for options that exclude each other."""
        self._values = {name: option.value for name, option in OPTIONS.items()} | given
        self.overrides = [text for text in arguments if "=" in text and not os.path.exists(text)]
        self.sources = [text for text in arguments if text not in self.overrides]
        for name, value in self._values.items():
            check_number(name, value)
        self._check_use()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def given(self, *names: str) -> Iterator[str]:
        """Yield those of the options `names` that were given."""
        return (name for name in names if self._values[name] != OPTIONS[name].value)

    @property
    def target(self) -> Target | None:
        """The budget of the options; None without one."""
        if self.target_epsilon is None and self.target_rho is None:
            return None
        return Target(self.target_epsilon, self.target_rho)

    @property
    def question(self) -> str:
        """Key of the question in `QUESTIONS`."""
        if self.excess_risk is not None:
            return "X"
        if self.export is not None:
            return "E"
        if self.over is not None:
            name, is_axis, _ = self.over.partition("=")
            return {"order": "R", "false-positives": "F"}.get(name if is_axis else "", "O")
        if self.curve:
            return "C"
        if self.at_epsilon is not None:
            return "D"
        return "B" if any(self.given("solve", "target_epsilon", "target_rho")) else "P"

    def _check_use(self) -> None:
        unused = [name for name in self.given(*OPTIONS) if self.question not in OPTIONS[name].asked]
        if unused:
            hint = next((_HINTS[name] for name in unused if name in _HINTS), "leave it out, or ask another question")
            raise UsageError(f"{QUESTIONS[self.question]} does not use {', '.join(map(flag, unused))}: {hint}")
        if self.law is not None and self.best_of is None:
            raise UsageError("--law is that of the number of trials of --best-of: give that, too, or leave --law out")
        if self.best_of is not None and self.trials != "1":
            raise UsageError(
                f"--trials {quoted(self.trials)} with --best-of {self.best_of:g} has two readings: several published"
                " bests, or one best of candidates of several trainings. Leave --trials out for one published best;"
                " for candidates of N trainings each, give --steps or --epochs N times as large"
            )
        if self.noise_multiplier is not None and self.noise_over_clip is not None:
            raise UsageError("give --noise-multiplier (over the sensitivity) or --noise-over-clip, not both")
        if self.target_epsilon is not None and self.target_rho is not None:
            raise UsageError("--target-epsilon and --target-rho: give one budget")


def check_number(name: str, value: Any) -> None:
    """Raise UsageError for a `value` of option `name` that is no number or outside its range; None passes."""
    option = OPTIONS.get(name)
    if value is None or option is None or option.kind not in RANGES:
        return
    least, most, words = RANGES[str(option.kind)]
    whole = isinstance(least, float) or (not isinstance(value, bool) and value == value // 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (least <= value <= most and whole):
        shown = f"{value:g}" if isinstance(value, float) else quoted(value)
        raise UsageError(f"{flag(name)} is {shown}, but must be {words}")
