"""Code lines that each room may have, by `[tool.dpsgd.ceilings]` in pyproject.toml: `make lint` refuses more.

A change may lower a ceiling. It raises one only in a commit whose message says what was bought.

    python -m tests.ceilings
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def code_lines(text: str) -> int:
    """Return the lines that are neither blank, a comment nor part of a docstring."""
    prose = set[int]()
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            prose |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if line.strip() and line.lstrip()[0] != "#" and number not in prose)


def main() -> int:
    """Print each room that is above its ceiling, or has none; return how many there are."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["dpsgd"]["ceilings"]
    found = Counter[str]()
    for path in sorted((ROOT / "dpsgd_cli").rglob("*.py")):
        parts = path.relative_to(ROOT / "dpsgd_cli").parts
        found[parts[0] if len(parts) > 1 else "loose"] += code_lines(path.read_text("utf-8"))
        found["files"] += 1
    for folder in ("tests", "benchmarks"):
        found[folder] = sum(code_lines(path.read_text("utf-8")) for path in (ROOT / folder).rglob("*.py"))
    above = [name for name, lines in found.items() if lines > told.get(name, 0)]
    for name in above:
        print(f"{name}: {found[name]} code lines, and its ceiling is {told.get(name, 0)} (pyproject.toml)")
    return len(above)


if __name__ == "__main__":
    sys.exit(main())
