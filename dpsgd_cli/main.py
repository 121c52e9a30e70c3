"""The command line: the Click group, and the only place where an error becomes a message and an exit code.

Each command is a file in `cli/`, imported only when it is called, so that `dpsgd --help` needs nothing but Click.

Exit codes: 0 done; 1 the run failed; 2 a mistake in usage, recipe or data; 130 (Ctrl-C), 143 (SIGTERM) interrupted.
"""

from __future__ import annotations

import difflib
import errno
import importlib
from typing import Any

import click

from dpsgd_cli import __version__
from dpsgd_cli.common.interrupts import exit_code
from dpsgd_cli.common.terminal import only_visible
from dpsgd_cli.common.text_format import shortened
from dpsgd_cli.errors import DpsgdError, SaidElsewhere

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("dpsgd_cli.cli.train", "Train the model of a recipe and state its privacy guarantee."),
    "account": ("dpsgd_cli.cli.account", "State the privacy cost of a recipe, a result or a ledger."),
    "check": ("dpsgd_cli.cli.check", "Check a result: files, claim, ledger, page and code."),
    "report": ("dpsgd_cli.cli.report", "Write the report of a result: its guarantee and metrics."),
    "compare": ("dpsgd_cli.cli.compare", "Compare recipes and results on equal budgets."),
    "sweep": ("dpsgd_cli.cli.sweep", "Train every cell of a sweep over recipes and their settings."),
    "predict": ("dpsgd_cli.cli.predict", "Predict new records with a trained model."),
    "explain": ("dpsgd_cli.cli.explain", "Show what a trained model learnt of each column of its table."),
    "evaluate": ("dpsgd_cli.cli.evaluate", "Measure trained models on labelled records."),
    "audit": ("dpsgd_cli.cli.audit", "Attack the privacy claim of a recipe or a result."),
    "budget": ("dpsgd_cli.cli.budget", "Count the privacy cost of all runs on a table; show what is left."),
    "recipe": ("dpsgd_cli.cli.recipe", "List, show, copy and validate recipes; print their schema."),
    "data": ("dpsgd_cli.cli.data", "List, fetch and verify data sets."),
}

FILE_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "your disk quota is used up; free some space and run the same command again",
    errno.EACCES: "permission denied; choose a place that you may read and write",
    errno.EPERM: "not permitted; choose a place that you may read and write",
    errno.EROFS: "the file system is read-only; choose another place to write to",
    errno.EIO: "the device failed to read or write; check the disk",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.ELOOP: "a link that leads nowhere; name the file itself",
    errno.EISDIR: "is a directory; name a file",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n`",
}


MOST_LINES, MOST_CHARACTERS = 50, 4000
"""Limits on a message. A file may have errors in twenty thousand columns; fix the first fifty to see the next."""


class Failure(click.ClickException):
    """An expected error on its way to the user: `error: ...` on stderr and its exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        # click declares it for the class, and reads it from the instance
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        first, *rest = [shortened(line, MOST_CHARACTERS) for line in self.message.splitlines()] or [""]
        if len(rest) > MOST_LINES:
            rest = [*rest[:MOST_LINES], f"... and {len(rest) - MOST_LINES} more"]
        click.echo("\n".join([f"error: {first}", *(f"       {line}" for line in rest)]), file=file, err=file is None)


class LazyGroup(click.Group):
    """A group that lists its commands' names and one-line help without importing them."""

    def main(self, *args: Any, **extra: Any) -> Any:
        with only_visible():
            return super().main(*args, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        meant = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if args[0] not in COMMANDS and not args[0].startswith("-") and meant:
            ctx.fail(f"No such command {args[0]!r}; did you mean {meant[0]}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, SaidElsewhere):
            raise
        except DpsgdError as error:
            raise Failure(str(error), error.exit_code) from error
        except KeyboardInterrupt as error:
            raise Failure("interrupted; nothing more was written", exit_code(error)) from None
        except MemoryError as error:
            detail = f" ({error})" if str(error) else ""
            raise Failure(f"out of memory{detail}; use a smaller problem or a larger machine") from error
        except (Exception, SystemExit) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of the output has gone; click ends silently
            if isinstance(error, OSError) and error.errno in FILE_ADVICE:
                named = f"{error.filename}: " if error.filename else ""
                raise Failure(f"{named}{FILE_ADVICE[error.errno]}") from error
            raise Failure(_our_fault(error)) from error


def _our_fault(error: BaseException) -> str:
    """Return a line about an unexpected exception, with the name of the file that its traceback was written to."""
    import platform
    import sys
    import tempfile
    import traceback

    what = f"{type(error).__name__}: {error}".splitlines()[0] if str(error) else type(error).__name__
    said = f"dpsgd failed where it should not ({shortened(what, 300)}): this is a bug of ours, not a mistake of yours"
    told = [f"dpsgd {__version__}, Python {platform.python_version()}, {platform.platform()}", " ".join(sys.argv), ""]
    try:
        with tempfile.NamedTemporaryFile("w", prefix="dpsgd-error-", suffix=".txt", delete=False) as file:
            file.write("\n".join(told) + "".join(traceback.format_exception(error)))
    except (OSError, UnicodeError):
        return said
    return f"{said}; the details are in {file.name}, please report them"


GREETING = """\
dpsgd trains models under differential privacy, and states exactly what was guaranteed.

  dpsgd train quickstart                           a private classifier of handwritten digits, in seconds
  dpsgd recipe new table.csv --target COLUMN       a recipe for a table of your own
  dpsgd account --noise-multiplier 4 --sampling-rate 0.01 --steps 10000     what a training costs

`dpsgd --help` lists all commands, `dpsgd recipe list` the shipped recipes.
"""


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="dpsgd")
@click.pass_context
def main(context: click.Context) -> None:
    """Train models under differential privacy, and state exactly what was guaranteed.

    One YAML recipe in; a model, a result table and a privacy statement that can be checked, out.

    \b
    Examples:
      dpsgd train quickstart
      dpsgd recipe list
      dpsgd train yu2019/mnist-time repeats=3
    """
    if context.invoked_subcommand is None:
        click.echo(GREETING, nl=False)
