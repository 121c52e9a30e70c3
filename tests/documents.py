"""Runs a Markdown page as its reader would, from top to bottom, in an empty folder: `python -m tests.documents PAGE`.

sh       every command is run; `dpsgd` in this process, so that torch is loaded once a page
python   is run, all blocks of a page one after the other
yaml, python or csv whose first line names a file (`# name.yaml: ...`) is written under that name instead
text     every line of it was said by the block before it, whatever the spaces

A command that ends in `|| echo refused` must fail. A text block must follow with a line of what it said: a command that
fails for another reason than the page means would pass otherwise.

Not here: which pages there are, and what is skipped (`test_docs.py`).
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

INSTALLERS = ("make ", "pip install ", "git clone ", "cd dpsgd")
"""They make environments or install packages: `make check` itself, and tests/test_packaging.py, are their tests."""
REFUSED = " || echo refused"
ELSEWHERE = ("torchrun ", "sbatch ", "--launcher slurm", "--launcher ray")
"""They need more than one machine or process: tests/engine/test_processes.py and tests/sweep/ are their tests."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that a block is, by its first line."""
        named = re.match(r"# ([\w./-]+\.\w+):", self.text)
        return named[1] if named and self.language != "sh" else None

    @property
    def commands(self) -> list[str]:
        """Those of a sh block; one that spans lines inside quotes, or ends in a backslash, is one."""
        found, pending = [], ""
        for line in self.text.splitlines():
            pending = f"{pending}\n{line}" if pending else line
            if pending.count('"') % 2 == 0 and not pending.endswith("\\"):
                found.append(re.sub(r"\s{2,}#.*$", "", pending))
                pending = ""
        return [command for command in found if command.strip() and not command.startswith("#")]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)]


@dataclass
class Reader:
    """Who types a page.

    `said` is what the last block said, `refusals` what each command of it said that had to fail; `ran` are the commands
    that were run.
    """

    said: str = ""
    refusals: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})

    def read(self, block: Block) -> None:
        assert block.language == "text" or not self.refusals, f"no text says why this is refused: {self.refusals[0]}"
        if block.language == "text":
            lines = [" ".join(line.split()) for line in block.text.splitlines()]
            missing = [line for line in lines if line not in " ".join(self.said.split())]
            assert not missing, f"not said: {missing}\nbut: {self.said}"
            told = [line for line in lines if line and line != "refused"]
            for refusal in self.refusals:
                assert any(line in " ".join(refusal.split()) for line in told), f"the text is not of: {refusal}"
            self.refusals = []
        elif block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block.text, "page", "exec"), self.names)
            self.said = out.getvalue()
        elif block.language == "sh":
            self.said = "".join(map(self.type, block.commands))
        else:
            assert block.language in ("json", "markdown"), f"nobody knows how to read a {block.language} block"

    def close(self) -> None:
        """The page is over."""
        assert not self.refusals, f"no text says why this is refused: {self.refusals[0]}"

    def type(self, command: str) -> str:
        """Run one command; what it said on both streams."""
        if command.startswith(INSTALLERS) or any(word in command for word in ELSEWHERE):
            return ""
        self.ran.append(command)
        wanted = not command.endswith(REFUSED)
        command = command.removesuffix(REFUSED)
        if command.startswith("dpsgd ") and not re.search(r"[|>;&]", command):
            code, said = _dpsgd(_words(command)[1:])
        else:
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
            code, said = done.returncode, done.stdout + done.stderr
        assert (code == 0) == wanted, f"{command}\nended with {code}:\n{said}"
        if not wanted:
            self.refusals.append(said)
        return said if wanted else f"{said}\nrefused\n"


def _words(command: str) -> list[str]:
    """The words of a command, as the shell has them: names with a star stand for files."""
    found: list[str] = []
    for word in shlex.split(command.replace("\\\n", " ")):
        files = sorted(glob.glob(word)) if "*" in word else []
        found += files or [word]
    return found


def _dpsgd(arguments: Sequence[str]) -> tuple[Any, str]:
    from dpsgd_cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(list(arguments), prog_name="dpsgd")
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
    return code, said.getvalue()


def read_page(page: str | Path) -> int:
    """Read a page in the current folder; return how many commands were run."""
    reader = Reader()
    for one in blocks(Path(page).read_text(encoding="utf-8")):
        reader.read(one)
    reader.close()
    return len(reader.ran)


def serve() -> None:
    """Read one page for each line of standard input: page, folder, PATH and a file for what it says, as JSON.

    Answers each with a line: the number of commands, or -1. Every page has a process of its own, which begins with all
    of the package loaded: loading takes longer than most pages.
    """
    from dpsgd_cli.main import COMMANDS

    for module in ("pandas", "sklearn.datasets", "dpsgd_cli.training.loop", *(name for name, _ in COMMANDS.values())):
        importlib.import_module(module)
    for line in sys.stdin:
        page, folder, path, said = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(page, folder, path, said)
        _, status = os.waitpid(child, 0)
        commands = int(Path(said).read_text("utf-8").splitlines()[-1]) if status == 0 else -1
        print(commands, flush=True)


def _child(page: str, folder: str, path: str, said: str) -> NoReturn:
    """Read a page, and end this process: with 0, or with 1 and the traceback at the end of what was said."""
    os.chdir(folder)
    os.environ["PATH"] = path
    code = 1
    try:
        with open(said, "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        print(read_page(page))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the parent is cleaned up twice


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        print(read_page(sys.argv[1]))
