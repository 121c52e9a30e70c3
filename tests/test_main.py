"""The command line as a whole: help without heavy imports, and every error as one message and an exit code."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dpsgd_cli import __version__, errors
from dpsgd_cli.common.interrupts import Killed
from dpsgd_cli.main import COMMANDS, FILE_ADVICE, main

HEAVY = {"torch", "pandas", "scipy", "sklearn", "numpy", "pydantic", "yaml", "matplotlib", "dp_accounting"}
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DpsgdError)]
Failing = Callable[[BaseException], Result]


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def imported_by(code: str) -> set[str]:
    """The top-level modules that are loaded after `code` ran in a fresh interpreter."""
    script = (
        f"import sys\n{code}\nprint('\\n'.join({{name.partition('.')[0] for name in sys.modules}}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Runs a command that raises the given error."""
    module = types.ModuleType("failing_command")
    monkeypatch.setitem(sys.modules, "failing_command", module)
    monkeypatch.setitem(COMMANDS, "boom", ("failing_command", "Fails."))

    def run_failing(error: BaseException) -> Result:
        @click.command()
        def command() -> None:
            raise error

        module.command = command  # type: ignore[attr-defined]
        return run("boom")

    return run_failing


def test_help_imports_nothing_heavy() -> None:
    code = "from dpsgd_cli.main import main\nmain(['--help'], standalone_mode=False)"
    assert imported_by(code) & HEAVY == set()


def test_the_import_check_sees_what_is_imported() -> None:
    assert "yaml" in imported_by("import yaml") & HEAVY


def test_the_recipe_commands_do_not_import_torch() -> None:
    heavy = {"torch", "pandas", "scipy", "sklearn"}
    for arguments, unused in ((["list"], {"numpy", *heavy}), (["show", "quickstart"], heavy)):
        code = f"from dpsgd_cli.main import main\nmain(['recipe', *{arguments}], standalone_mode=False)"
        assert imported_by(code) & unused == set()


def test_without_arguments_it_greets_with_three_commands_that_exist() -> None:
    result = run()
    commands = [line.split() for line in result.stdout.splitlines() if line.startswith("  dpsgd ")]
    assert result.exit_code == 0 and [words[1] for words in commands] == ["train", "recipe", "account"]
    assert {words[1] for words in commands} <= set(COMMANDS)
    costs = run(*" ".join(commands[2]).partition("  ")[0].split()[1:8])
    assert costs.exit_code == 0, costs.output


def test_help_lists_every_command_with_its_line() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name, (_, line) in COMMANDS.items():
        assert f"{name} " in result.stdout
        assert line in result.stdout


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield (*path, name), found
        yield from commands(found, (*path, name))


def test_every_command_has_help_with_an_example_and_describes_its_options() -> None:
    lacking = []
    for path, command in commands(main):
        name = " ".join(path)
        assert run(*path, "--help").exit_code == 0
        if f"dpsgd {path[0]}" not in (command.help or ""):
            lacking.append(f"{name}: no example in its help")
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        lacking += [f"{name} {option.opts[0]}: no help" for option in options if not option.help]
    assert lacking == []


def test_version() -> None:
    assert run("--version").stdout == f"dpsgd, version {__version__}\n"


def test_an_unknown_command_suggests_the_nearest() -> None:
    result = run("trian")
    assert result.exit_code == 2
    assert "No such command 'trian'; did you mean train?" in result.stderr
    assert "did you mean" not in run("xyzzy").stderr


@pytest.mark.parametrize("kind", ERRORS)
def test_every_expected_error_is_a_message_and_its_exit_code(fail: Failing, kind: type[errors.DpsgdError]) -> None:
    result = fail(kind("what is wrong"))
    assert result.exit_code == kind.exit_code
    assert (result.stdout, result.stderr) == ("", "error: what is wrong\n")


def test_the_exit_codes_are_the_documented_ones() -> None:
    codes = {kind.__name__: kind.exit_code for kind in ERRORS}
    assert {name for name, code in codes.items() if code == 2} == {
        "DataError",
        "UsageError",
        "RecipeError",
        "PrivacyError",
        "UnsupportedMechanism",
        "FailedAccountant",
        "InfeasibleBudget",
        "ModelError",
    }
    assert set(codes.values()) == {1, 2}


def test_several_problems_are_lines_of_one_message(fail: Failing) -> None:
    assert fail(errors.RecipeError(["first", "second"])).stderr == "error: first\n       second\n"


def test_a_full_disk_is_named_with_the_file(fail: Failing) -> None:
    result = fail(OSError(errno.ENOSPC, "No space left on device", "results/x/trials.csv"))
    assert result.exit_code == 1
    assert result.stderr == f"error: results/x/trials.csv: {FILE_ADVICE[errno.ENOSPC]}\n"


def test_a_file_that_may_not_be_read_is_named(fail: Failing) -> None:
    result = fail(PermissionError(errno.EACCES, "Permission denied", "secret.yaml"))
    assert (result.exit_code, result.stderr) == (1, f"error: secret.yaml: {FILE_ADVICE[errno.EACCES]}\n")


@pytest.mark.parametrize(("kind", "code"), [(KeyboardInterrupt, 130), (Killed, 143)])
def test_an_interrupt_is_a_message_and_its_signal_is_the_exit_code(
    fail: Failing, kind: type[KeyboardInterrupt], code: int
) -> None:
    result = fail(kind())
    assert (result.exit_code, result.stderr) == (code, "error: interrupted; nothing more was written\n")


def test_too_little_memory_is_a_message(fail: Failing) -> None:
    result = fail(MemoryError("Unable to allocate 9 TiB"))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: out of memory (Unable to allocate 9 TiB); ")


def test_a_closed_pipe_is_quiet(fail: Failing) -> None:
    result = fail(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert (result.exit_code, result.output) == (1, "")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ZeroDivisionError("ours"), "ZeroDivisionError: ours"),
        (FileNotFoundError(errno.ENOENT, "gone", "x"), "FileNotFoundError: [Errno 2] gone: 'x'"),
        (SystemExit(0), "SystemExit: 0"),
        (RecursionError("a\nb" * 9999), "RecursionError: a"),
    ],
)
def test_a_bug_of_ours_is_one_line_that_names_the_file_of_its_traceback(
    fail: Failing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, named: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = fail(error)
    [details] = tmp_path.iterdir()
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: dpsgd failed where it should not ({named}): this is a bug of ours, not a mistake of yours; the details"
        f" are in {details}, please report them\n"
    )
    written = details.read_text()
    assert written.startswith(f"dpsgd {__version__}, Python ")
    assert "Traceback (most recent call last)" in written
    assert f"{type(error).__name__}: " in written


def test_a_bug_of_ours_is_one_line_where_nothing_can_be_written(
    fail: Failing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    assert fail(KeyError("x")).stderr.endswith("this is a bug of ours, not a mistake of yours\n")


def test_a_process_that_another_one_speaks_for_is_silent(fail: Failing) -> None:
    result = fail(errors.SaidElsewhere(2))
    assert (result.exit_code, result.output) == (2, "")


def test_messages_of_any_size_are_shortened(fail: Failing) -> None:
    result = fail(errors.DataError("\n".join(["x" * 10_000] * 10_000)))
    assert len(result.stderr) < 300_000
    assert result.stderr.endswith("... and 9949 more\n")
