"""Reference pages from what the package itself says: the schema of recipes, Click's commands, the shipped recipes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from markdown.extensions.toc import slugify, unique

from dpsgd_cli.main import COMMANDS, main
from dpsgd_cli.recipe.check import Schema, alternatives, kinds, placeholder, schema_of, words
from dpsgd_cli.recipe.loading import question, shipped_recipes
from dpsgd_cli.recipe.schema import Recipe

SECTIONS = ("data", "model", "method", "privacy", "runtime")
ROOT = Path(__file__).resolve().parents[2]
NAMED = ("data.columns", "data.missing", "data.categorical", "data.bounds")
"""Mappings from columns to sections: their entries have the key NAME."""
LONGEST = 80
"""Characters of an example that is taken from a recipe."""
FIRST = (
    *("data.path", "data.target", "data.bounds", "data.split", "data.evaluation", "model.kind", "method.kind"),
    *("method.batch_size", "privacy.budget", "privacy.unit", "epochs", "seed"),
)
"""Keys that most people set."""
HEADER = ("key", "meaning", "type and range", "default", "guarantee", "example")
NO_GUARANTEE = ("runtime", "name", "description", "save_model")
"""Keys that cannot change what is guaranteed; everything that begins with them, too."""


def pages() -> dict[str, str]:
    """Return the Markdown of every reference page by its path in the site."""
    return {
        "reference/commands.md": commands(),
        "reference/recipe.md": whole_recipe(),
        **{f"reference/recipe-{name}.md": section_page(name) for name in SECTIONS},
        "reference/recipes.md": recipes(),
        "reference/python.md": PYTHON,
    }


PYTHON = """# Python API

`import dpsgd_cli as dpsgd` loads nothing else; torch is loaded by `train` and `load`. [From Python](../python.md) has
examples.

::: dpsgd_cli.library.train
::: dpsgd_cli.library.load
::: dpsgd_cli.library.Result
::: dpsgd_cli.account
    options:
      members: false
::: dpsgd_cli.sklearn.DPClassifier
::: dpsgd_cli.sklearn.DPRegressor
::: dpsgd_cli.methods.base.Method
::: dpsgd_cli.accounting.accountants.get
::: dpsgd_cli.accounting.mechanism.GaussianSum
::: dpsgd_cli.accounting.mechanism.Release
"""


def commands() -> str:
    """Return a page with the help of every command, as the command prints it."""
    told = ["# Commands", "Every command explains itself with `--help`. This page is that text."]
    for path, command in _commands(main, ("dpsgd",)):
        context = click.Context(command, info_name=" ".join(path), max_content_width=100, terminal_width=100)
        told += [f"## {' '.join(path)}", f"```text\n{command.get_help(context)}\n```"]
    return "\n\n".join(told) + "\n"


def _commands(group: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in COMMANDS if group is main else group.list_commands(context):
            inner = group.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, (*path, name))


def recipes() -> str:
    """Return a page with every shipped recipe and its question."""
    told = [
        "# Shipped recipes",
        "`dpsgd train NAME` trains one, `dpsgd recipe show NAME` prints it with its defaults, and"
        " `dpsgd recipe copy NAME` writes one to own, each key explained. Those below `sweeps/` are for `dpsgd sweep`.",
    ]
    rows = [(f"`{name}`", question(file)) for sweeps in (False, True) for name, file in shipped_recipes(sweeps).items()]
    return "\n\n".join([*told, _table(("recipe", "question"), rows)]) + "\n"


def whole_recipe() -> str:
    """Return the page of the keys outside of the sections, with an example of a whole recipe."""
    schema = schema_of(Recipe)
    told = [
        "# Recipe keys",
        "A recipe is one YAML file. Each section has its page: "
        + ", ".join(f"[{name}](recipe-{name}.md)" for name in SECTIONS)
        + ". Unknown keys are errors, with a suggestion. `dpsgd recipe schema` prints the same for editors.",
        LEGEND,
        "## The keys that most people set",
        _table(HEADER, [_first(schema, key) for key in FIRST]),
        "## Keys outside of the sections",
        _keys("", schema),
        "A whole recipe, with every default written out (`dpsgd recipe show quickstart`):",
        f"```yaml\n{yaml.safe_dump(_shown('quickstart'), sort_keys=False)}```",
    ]
    return "\n\n".join(told) + "\n"


LEGEND = (
    "The column *guarantee* says whether a key can change what is guaranteed. **stated**: the key is a part of the"
    " statement or its price. *possibly*: the key may change the price or what is declared public, as sampling, length"
    " and bounds do; `dpsgd account RECIPE KEY=VALUE` shows the price with another value. *no*: it cannot. Examples are"
    " from shipped recipes where one has the key."
)


def section_page(name: str) -> str:
    """Return the page of one section, with a table of keys for each kind and for each section inside it."""
    schema = schema_of(Recipe)["properties"][name]
    told: list[str] = []
    places: dict[str, str] = {}
    also: list[str] = []
    for title, section in _sections(name, schema):
        page, first = _home()[section["title"]]
        if title in places.values():
            continue
        if (page, first) != (name, title):
            key, home = title.partition(",")[0], first.partition(",")[0]
            also.append(f"- `{key}`: as [{home}](recipe-{page}.md#{slugify(first, '-')})")
            continue
        places[unique(slugify(title, "-"), set(places))] = title
        told += [f"## {title}", section.get("description", "") if title != name else "", _keys(title, section)]
    # the tables need the width of the page: its sections are listed above them, not beside
    links = "Sections: " + " · ".join(f"[{title}](#{place})" for place, title in places.items())
    head = ["---\nhide: [toc]\n---", f"# Recipe keys: {name}", schema.get("description", ""), LEGEND, links]
    lines = {line.partition(":")[0]: line for line in reversed(also)}
    again = ["## Sections that stand elsewhere", "\n".join(reversed(lines.values()))] if also else []
    return "\n\n".join(filter(None, [*head, *told, *again])) + "\n"


@functools.cache
def _home() -> dict[str, tuple[str, str]]:
    """Return the page and the title of every section where it is shown, by its title in the schema."""
    found: dict[str, tuple[str, str]] = {}
    for name in sorted(SECTIONS, key="method".__eq__):  # which has a schedule and a model among its keys
        for title, section in _sections(name, schema_of(Recipe)["properties"][name]):
            found.setdefault(section["title"], (name, title))
    return found


def _sections(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield (title, section) of a schema and, depth first, of what its keys hold. `path` is its dotted key."""
    options = alternatives(schema)
    plain = [option for option in options if "properties" in option]
    for option in options:
        used = _used().get(f"{path}.kind", [])
        choices = dict(sorted(kinds(option).items(), key=lambda item: -used.count(item[0])))  # what most recipes use
        for kind, section in choices.items():
            yield f"{path}, kind: {kind}", section
            yield from _inside(path, section)
        if not choices and "properties" in option:
            yield (
                path if len(plain) == 1 else f"{path}, with {[*option.get('required', []), *option['properties']][0]}",
                option,
            )
            yield from _inside(path, option)
        for key in ("items", "additionalProperties"):
            if isinstance(option.get(key), dict):
                yield from _sections(f"{path}.{'0' if key == 'items' else 'NAME'}", option[key])


def _inside(path: str, section: Schema) -> Iterator[tuple[str, Schema]]:
    for key, inner in section["properties"].items():
        yield from _sections(f"{path}.{key}", inner)


def _keys(title: str, section: Schema) -> str:
    """Return the table of the keys of one section; `title` is its dotted key and its kind."""
    rows = [_row(title.partition(",")[0], key, section) for key in section["properties"]]
    return _table(HEADER, rows)


def _first(schema: Schema, dotted: str) -> tuple[str, ...]:
    """Return the row of a key of the first section on its way that has it, with its whole name."""
    path, _, key = dotted.rpartition(".")
    inside = [("", schema)] if not path else _sections(path, schema["properties"][path])
    section = next(
        section for title, section in inside if title.partition(",")[0] == path and key in section["properties"]
    )
    row = _row(path, key, section)
    kinds_of = ", ".join(f"`{one}`" for one in dict.fromkeys(_used().get(dotted, []))) if key == "kind" else ""
    return (f"`{dotted}`", f"Chooses the keys of the section, such as {kinds_of}." if kinds_of else row[1], *row[2:])


def _row(path: str, key: str, section: Schema) -> tuple[str, ...]:
    inner, dotted = section["properties"][key], f"{path}.{key}".lstrip(".")
    default = "needed" if key in section.get("required", ()) else _default(inner)
    return f"`{key}`", _meaning(inner), words(inner), default, _guarantee(dotted), _example(dotted, inner)


def told() -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the row of every key of the reference by its section's title in the schema and its name."""
    schema = schema_of(Recipe)
    inside = [found for name in SECTIONS for found in _sections(name, schema["properties"][name])]
    return {
        (section["title"], key): _row(path.partition(",")[0], key, section)
        for path, section in [("", schema), *inside]
        for key in section["properties"]
    }


def _meaning(schema: Schema) -> str:
    return "Chooses the section that this table is about." if "const" in schema else str(schema.get("description", ""))


def _default(schema: Schema) -> str:
    """Return the default of a key that may be left out; a list or mapping of the user's own is empty then."""
    empty: dict[str, Any] = {"array": [], "object": {}}
    value = schema.get("default", empty.get(schema.get("type", "")))
    return "left out" if value is None else f"`{json.dumps(value)}`"


def _guarantee(dotted: str) -> str:
    first = dotted.partition(".")[0]
    return "**stated**" if first == "privacy" else "no" if first in NO_GUARANTEE else "possibly"


def _example(dotted: str, schema: Schema) -> str:
    """Return a value of the key: the schema's example, one of a shipped recipe or a page, else one that is allowed."""
    used = (_plain(found) for found in _used().get(dotted, []) if found not in (None, [], {}))
    told = next(map(_plain, [schema["const"]] if "const" in schema else schema.get("examples", [])), None)
    told = told or next((found for found in used if len(found) <= LONGEST), None) or _plain(placeholder(schema))
    return "" if told == "null" else f"`{dotted.rpartition('.')[2]}: {told}`"


def _plain(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).strip().removesuffix("\n...").strip()


@functools.cache
def _used() -> dict[str, list[Any]]:
    """Return every value that shipped recipes and recipes on pages give to a dotted key.

    Entries of lists and of mappings with names of the user's own have the numbers and names of `_sections`.
    """
    found: dict[str, list[Any]] = {}

    def walk(path: str, value: Any) -> None:
        found.setdefault(path, []).append(value)
        entries = value.items() if isinstance(value, dict) else ((0, one) for one in value) if _is_list(value) else ()
        for key, inner in entries:
            named = path in NAMED and isinstance(value, dict)
            walk(f"{path}.{'NAME' if named else key}".lstrip("."), inner)

    for file in shipped_recipes().values():
        walk("", yaml.safe_load(file.read_text(encoding="utf-8")))
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(
            r"^```yaml\n(# [\w-]+\.yaml: .*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            walk("", yaml.safe_load(block))
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _shown(name: str) -> dict[str, Any]:
    from dpsgd_cli.recipe.loading import load_recipe, resolved

    return resolved(load_recipe(name).recipe)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return f"| {' | '.join(cell.replace('|', '&#124;').replace(chr(10), ' ') for cell in cells)} |"

    return "\n".join(map(line, [header, tuple("---" for _ in header), *rows]))
