"""Parser from YAML text to a tree in which every value has its line number; all syntax problems are reported together.

Plain values follow the YAML 1.2 core schema, which surprises users less than 1.1: `1e-5` is a number, and `no`, `on`,
`1:30` and `2020-01-01` stay text (they are class labels and column names). `check.py` validates keys and values.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

Key = str | int
Path = tuple[Key, ...]
MOST_NODES = 20_000
MOST_LEVELS = 50
LONGEST_NUMBER = 300

NULL = re.compile(r"(~|null|Null|NULL|)$")
BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)$")
INT = re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
FLOAT = re.compile(r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
CORE = {"null": NULL, "bool": BOOL, "int": INT, "float": FLOAT}
TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class SourceLocation:
    """The place where a value was written: a line of a file, or an override (no line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One problem, at a key."""

    place: SourceLocation
    path: Path
    text: str

    def __str__(self) -> str:
        where = f"{dotted(self.path)}: " if self.path else ""
        return f"{self.place}: {where}{self.text}"


@dataclass
class Node:
    """A value and its place. Mappings hold nodes by key, lists hold nodes, everything else is plain."""

    value: Any
    place: SourceLocation

    def plain(self) -> Any:
        """Return the value without the places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def copy(self) -> Node:
        """Return a copy of the tree that can be edited independently."""
        return copy.deepcopy(self)

    def child(self, key: Key) -> Node | None:
        """Return the node under `key`; None if there is none."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            found: Node = self.value[key]
            return found
        return None

    def nearest(self, path: Path) -> Node:
        """Return the deepest existing node on the way to `path`."""
        here = self
        for key in path:
            child = here.child(key)
            if child is None:
                break
            here = child
        return here


def from_plain(value: Any, place: SourceLocation) -> Node:
    """Return plain data as a tree, all of it at one place."""
    if isinstance(value, dict):
        return Node({key: from_plain(inner, place) for key, inner in value.items()}, place)
    if isinstance(value, list):
        return Node([from_plain(inner, place) for inner in value], place)
    return Node(value, place)


_NAME = r"[A-Za-z0-9_-]+"
_QUOTED = r"""\["(?:[^"\\]|\\.)*"\]|\['(?:[^'\\]|\\.)*'\]"""
_KEY = re.compile(rf"{_NAME}(?:\.{_NAME}|{_QUOTED})*")
_PART = re.compile(rf"{_NAME}|{_QUOTED}")


def dotted(path: Path) -> str:
    """Return a path as an override writes it; a key of other characters stands in brackets and quotes.

    >>> dotted(("data", "bounds", "mean radius", 0))
    'data.bounds["mean radius"].0'
    """
    parts = [
        f".{key}" if re.fullmatch(_NAME, key) else f"[{json.dumps(key, ensure_ascii=False)}]" for key in map(str, path)
    ]
    return "".join(parts).removeprefix(".")


def undotted(text: str) -> tuple[tuple[str, ...], str]:
    """Return the path that `text` begins with, and what follows it; an empty path if it begins with none.

    >>> undotted('data.bounds["mean = 1"]=[5,25]'), undotted(".a=1")
    ((('data', 'bounds', 'mean = 1'), '=[5,25]'), ((), '.a=1'))
    """
    found = _KEY.match(text)
    if found is None:
        return (), text
    parts = _PART.findall(found[0])
    keys = (re.sub(r"\\(.)", r"\1", part[2:-2]) if part[0] == "[" else part for part in parts)
    return tuple(keys), text[found.end() :]


class CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the plain values of YAML 1.2."""

    yaml_implicit_resolvers: ClassVar[dict[str | None, list[tuple[str, re.Pattern[str]]]]] = {}


class CoreDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes every string that YAML 1.1 or 1.2 would read as something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML would write these line breaks unescaped, and read them back as spaces.
    style = '"' if set(text) & {"\x85", "\u2028", "\u2029"} else None
    return dumper.represent_scalar(TAG + "str", text, style=style)


CoreDumper.add_representer(str, _represent_text)
for _name, _pattern in CORE.items():
    CoreLoader.add_implicit_resolver(TAG + _name, _pattern, None)
    CoreDumper.add_implicit_resolver(TAG + _name, _pattern, None)


def read_tree(text: str, place: SourceLocation) -> tuple[Node | None, list[Problem]]:
    """Parse `text`, which begins at `place`; if `place` has no line, all nodes get `place` itself.

    Returns the tree without the parts that could not be read, and the problems; no tree if the text is not YAML.
    """
    reader = _Reader(place)
    try:
        loader = CoreLoader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
        tree = Node(None, place) if root is None else reader.convert(root, (), reader.place(root))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return None, [Problem(reader.at(line), (), f"character {error.character!r} is not allowed; remove it")]
    except yaml.MarkedYAMLError as error:
        return None, [_syntax_problem(reader, error)]
    except RecursionError:
        return None, [Problem(place, (), "nested too deeply to be a recipe")]
    return tree, reader.problems


class _Reader:
    """Converter of composed YAML nodes to `Node`s that collects problems on the way."""

    def __init__(self, start: SourceLocation) -> None:
        self.start = start
        self.problems: list[Problem] = []
        self.seen = 0
        self.inside: set[int] = set()

    def at(self, line: int) -> SourceLocation:
        return self.start if self.start.line is None else SourceLocation(self.start.source, line)

    def place(self, node: yaml.Node) -> SourceLocation:
        return self.at(node.start_mark.line + 1)

    def convert(self, node: yaml.Node, path: Path, place: SourceLocation) -> Node:
        self.seen += 1
        if id(node) in self.inside or self.seen > MOST_NODES:
            self._report(place, path, "too many values for a recipe" if self.seen > MOST_NODES else "contains itself")
            return Node(None, place)
        if len(path) > MOST_LEVELS:
            self._report(place, path[:1], "nested too deeply to be a recipe")
            return Node(None, place)
        self.inside.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
                return Node(self._mapping(node, path), place)
            if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
                items = enumerate(node.value)
                return Node([self.convert(item, (*path, i), self.place(item)) for i, item in items], place)
            return Node(self._scalar(node, path, place), place)
        finally:
            self.inside.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Node]:
        result: dict[str, Node] = {}
        for key, value in node.value:
            place = self.place(key)
            if not isinstance(key, yaml.ScalarNode):
                self._report(place, path, "a key must be a single word, not a list or a mapping")
                continue
            if key.value in result:
                first = result[key.value].place
                again = "" if first.line is None else f" (first on line {first.line})"
                self._report(place, (*path, key.value), f"given twice{again}; keep one")
                continue
            result[key.value] = self.convert(value, (*path, key.value), place)
        return result

    def _scalar(self, node: yaml.Node, path: Path, place: SourceLocation) -> Any:
        kind = node.tag.removeprefix(TAG)
        text = node.value
        if kind == "str":
            if any("\ud800" <= character <= "\udfff" for character in text):
                self._report(place, path, f"{text!r} is not valid text")
            return text
        if kind not in CORE or not isinstance(text, str) or not CORE[kind].match(text):
            self._report(place, path, f"tag {node.tag.replace(TAG, '!!')} is not allowed here; write the plain value")
            return None
        if len(text) > LONGEST_NUMBER:
            self._report(place, path, f"a number of {len(text)} digits; write a shorter one")
            return None
        return parse_scalar(kind, text)

    def _report(self, place: SourceLocation, path: Path, text: str) -> None:
        if self.seen <= MOST_NODES + 1:
            self.problems.append(Problem(place, path, text))


def parse_scalar(kind: str, text: str) -> Any:
    """Return the value of a plain scalar that matches `CORE[kind]`."""
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _syntax_problem(reader: _Reader, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    place = reader.start if mark is None else reader.at(mark.line + 1)
    what = error.problem or "not YAML"
    advice = "indent with spaces, not tabs" if "'\\t'" in what else "check indentation, colons, brackets and quotes"
    context = f" {error.context}" if error.context else ""
    column = "" if mark is None else f" (column {mark.column + 1})"
    return Problem(place, (), f"not YAML: {what}{context}{column}; {advice}")
