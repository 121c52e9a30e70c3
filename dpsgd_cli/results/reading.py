"""Reader of results: checks that `result.json` has the right types, and that it and all its files are unchanged.

`result.json` holds the SHA-256 (and the number of lines) of every file that was written with it. Under
`nonprivate_sha256` it holds the hash of its own content without that field. A hash reveals as much as its input:
somebody who knows all records but one could try candidates for the last. So hashes of tables with `nonprivate_`
columns, and of the whole document, have that mark, too.

A truncated ledger, an edited number or a deleted file is found wherever a result is read, and no guarantee is given.
This finds accidents and careless edits. It does not authenticate a result: somebody who changes a file on purpose can
write new hashes, too. You must trust the person from whom you have the result.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.common.package_files import MODEL
from dpsgd_cli.common.yaml_tree import CoreLoader
from dpsgd_cli.errors import DataError
from dpsgd_cli.results.files import to_csv
from dpsgd_cli.results.result import NONPRIVATE, ResultContent, Row, mark_nonprivate
from dpsgd_cli.users.settings import Unit

RESULT = "result.json"
OWN_HASH = f"{NONPRIVATE}sha256"
_MOST_PROBLEMS = 3
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class ResultFile:
    """Properties of a file (or a folder of files) beside `result.json`. No field has a default.

    - `content`: a function that makes the file from a `ResultContent` (None: this result has no such file).
      `result.json` holds its hash. `content` is None for files that are made from a finished result.
    - `unreleased`: whether it holds values computed from training rows without noise, so that its hash is marked and it
      must not be published; `of-uncovered-steps`: only if a preprocessing step computed such values.
    - `always`: every result has it.
    - `lines`: it is text, whose lines are counted.
    """

    content: Callable[[ResultContent], bytes | None] | None
    unreleased: Literal["never", "always", "of-uncovered-steps"]
    always: bool
    lines: bool


def _lines_of(result: ResultContent) -> bytes:
    return "".join(f"{line}\n" for line in result.ledger).encode()


def _csv(rows: list[Row]) -> bytes:
    return to_csv(rows).encode()


FILES: dict[str, ResultFile] = {
    "recipe.yaml": ResultFile(unreleased="never", always=True, lines=True, content=lambda found: found.recipe.encode()),
    "trials.csv": ResultFile(unreleased="always", always=True, lines=True, content=lambda found: _csv(found.trials)),
    "history.csv": ResultFile(unreleased="always", always=True, lines=True, content=lambda found: _csv(found.history)),
    "ledger.jsonl": ResultFile(unreleased="never", always=True, lines=True, content=_lines_of),
    # beside the weights, it holds what steps without noise learned from training rows
    MODEL: ResultFile(unreleased="of-uncovered-steps", always=False, lines=False, content=lambda found: found.model),
    "report.md": ResultFile(unreleased="never", always=False, lines=True, content=None),
    "report.html": ResultFile(unreleased="never", always=False, lines=True, content=None),
    "deployment.yaml": ResultFile(unreleased="never", always=False, lines=True, content=None),
    "explained.json": ResultFile(unreleased="never", always=False, lines=True, content=None),
}
"""Every file of a result, by name. `place` and `sealed` refuse any other name."""
HASHED = tuple(name for name, file in FILES.items() if file.content is not None)
WITH_EVERY_RESULT = tuple(name for name, file in FILES.items() if file.always)


def claim_of(result: ResultContent) -> Row:
    """Return what `model.safetensors` says of its privacy: epsilon, delta, who is protected, the ledger's SHA-256.

    With an earlier result that the training started from (`results/earlier.py`), epsilon and delta are of both.
    """
    names = ("epsilon", "delta", "adjacency", "unit", "accountant", "bound", "start")
    ledger = hashlib.sha256(_lines_of(result)).hexdigest()
    return {name: result.privacy.get(name) for name in names} | {"ledger_sha256": ledger}


def place(directory: Path, name: str) -> Path:
    """Return the path of a file of a result. Raises ValueError if `FILES` does not list it."""
    if name not in FILES:
        raise ValueError(f"{name} is no file of a result: list it in FILES, and whether it may be public")
    return directory / name


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Cell = float | int | str | None


class _Part(BaseModel):
    rho: float | None


class _Spent(BaseModel):
    epsilon: float | None
    rho: float | None
    parts: dict[str, _Part] = {}


class _Attacker(BaseModel):
    mu: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    regret: Annotated[float, Field(ge=0, le=1)]
    true_positives: dict[str, Annotated[float, Field(ge=0, le=1)]]
    proved_by: str


class _Price(BaseModel):
    epsilon: Annotated[float, Field(ge=0)] | None
    delta: Annotated[float, Field(ge=0, le=1)]


class _Start(BaseModel):
    """The statement of the result that a training started from, and the price of the training by itself."""

    epsilon: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(ge=0, le=1)]
    ledger_sha256: Sha256
    own: _Price


class _Privacy(BaseModel):
    """The privacy statement; all fields are null without privacy."""

    epsilon: float | None
    delta: float | None
    rho: float | None
    adjacency: Adjacency | None
    unit: Unit | None = None
    accountant: str | None
    bound: Literal["upper", "estimate"] | None
    noise_source: str | None
    declarations: list[str]
    batching: str | None = None
    parts: dict[str, _Part] = {}
    spent: _Spent | None = None
    attacker: _Attacker | None = None
    start: _Start | None = None
    budget: dict[str, float] | None = None
    budget_covers: Literal["total", "training"] | None = None
    uncovered_steps: list[str] | None = None
    discovered: list[list[str]] = []

    @model_validator(mode="after")
    def _says_everything_or_nothing(self) -> Self:
        said = (self.delta, self.adjacency, self.bound, self.noise_source, self.batching, self.budget_covers)
        if self.accountant is not None and (None in said or self.uncovered_steps is None):
            raise ValueError("it names an accountant, but not all that the statement is about")
        return self


class _Metric(BaseModel):
    mean: float | None
    std: float | None
    ci95: float | None
    n: Count


class _Trial(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Cell]
    trial: Count
    seed: int | None
    epochs: Count


class _Chosen(BaseModel):
    value: Any
    why: str


class _Provenance(BaseModel):
    data_sha256: dict[str, str] = {}
    nonprivate_data_sha256: dict[str, str] = {}
    code_sha256: dict[str, str] = {}
    chosen: dict[str, _Chosen] = {}
    weights_sha256: dict[str, str] = {}


class _File(BaseModel):
    sha256: Sha256
    lines: Count | None


class _Document(BaseModel):
    """The fields of `result.json` that programs read. Its hash covers all others, too."""

    name: str
    privacy: _Privacy
    metrics: dict[str, _Metric]
    timing: dict[str, float]
    warnings: list[str]
    nonprivate_warnings: list[str]
    provenance: _Provenance
    trials: Annotated[list[_Trial], Field(min_length=1)]
    files: dict[str, _File]
    nonprivate_files: dict[str, _File]
    nonprivate_sha256: Sha256


def sealed(document: Row, files: Mapping[str, bytes] | None = None, published: bool = False) -> Row:
    """Return `document` with the hashes of its `files` and of its own content.

    Without `files`, the hashes of files stay as they are. `published`: no file holds marked values, so all hashes are
    public. Numbers that are not finite must already be None. Raises ValueError if `FILES` does not list a file, or if a
    file is missing.
    """
    content = {name: value for name, value in document.items() if name != OWN_HASH}
    if files is not None:
        unlisted, missing = sorted(files.keys() - set(HASHED)), sorted(set(WITH_EVERY_RESULT) - files.keys())
        if unlisted or missing:
            raise ValueError(f"files of a result: not listed in FILES {unlisted}, missing {missing}")
        told = {
            name: {
                "sha256": hashlib.sha256(held).hexdigest(),
                "lines": held.count(b"\n") if FILES[name].lines else None,
            }
            for name, held in files.items()
        }
        privacy = document["privacy"]
        covered = privacy["accountant"] is None or not privacy["uncovered_steps"]
        kinds = {"always"} if covered else {"always", "of-uncovered-steps"}
        secret = set() if published else {name for name in files if FILES[name].unreleased in kinds}
        content["files"] = {name: one for name, one in told.items() if name not in secret}
        content |= mark_nonprivate({"files": {name: one for name, one in told.items() if name in secret}})
    return {**content, OWN_HASH: _content_hash(content)}


def _content_hash(content: Row) -> str:
    """Return a hash of content that does not depend on the layout of the JSON.

    Keys are sorted, and Python's numbers survive writing and reading.
    """
    return hashlib.sha256(_CANONICAL.encode(content).encode("utf-8", "surrogatepass")).hexdigest()


def read(path: Path) -> Row:
    """Return the content of a `result.json`. Raises DataError if it was changed or is no result."""
    try:
        held = path.read_bytes()
        document = json.loads(held, parse_constant=_refused)
        if b"\\u" in held:
            json.dumps(document, ensure_ascii=False).encode()  # a ValueError for half of a surrogate pair
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    try:
        _Document.model_validate(document, strict=True)
    except ValidationError as error:
        found = [_problem(detail) for detail in error.errors(include_url=False, include_input=False)]
        more = f"; and {len(found) - _MOST_PROBLEMS} more" if len(found) > _MOST_PROBLEMS else ""
        raise DataError(f"{path}: not a result: {'; '.join(found[:_MOST_PROBLEMS])}{more}") from None
    found_hash = _content_hash({name: value for name, value in document.items() if name != OWN_HASH})
    if found_hash != document[OWN_HASH]:
        raise DataError(
            f"{path}: was changed after it was written: its content has the SHA-256 {found_hash[:12]}..., and it says"
            f" {document[OWN_HASH][:12]}...; restore it, or remove {path.parent} and train again"
        )
    checked: Row = document
    return checked


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _problem(detail: Any) -> str:
    place = ".".join(map(str, detail["loc"]))
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{place}: {'missing' if detail['type'] == 'missing' else message}" if place else message


def _files(document: Row) -> Row:
    """Return the entries of all files that were written with the document."""
    return {**document["files"], **document[f"{NONPRIVATE}files"]}


def checked(directory: Path, document: Row, name: str) -> Path:
    """Return the path of the file `name` beside `document`.

    Raises DataError if the document does not list the file, or if it is missing or was changed.
    """
    path, written = directory / name, _files(document).get(name)
    if written is None:
        raise DataError(f"{path}: does not belong to this result: {RESULT} has no such file")
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise DataError(f"{path}: is missing, and {RESULT} says that it was written; {_ADVICE}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if found != written["sha256"]:
        told = _lines(path, written["lines"])
        raise DataError(f"{path}: was changed after the result was written{told}; {_ADVICE}")
    return path


_ADVICE = "restore it, or remove the result and train again"


def _lines(path: Path, written: int | None) -> str:
    """Return a remark on the file's number of lines; empty if its lines are not counted."""
    if written is None:
        return ""
    held = path.read_bytes().count(b"\n")
    return f": it has {held} lines, and {RESULT} says {written}" if held != written else " (its lines are as many)"


def check_files(directory: Path, document: Row) -> None:
    """Check that every file of `document` is present and unchanged, and that there is no unlisted model.

    Raises DataError.
    """
    if unlisted := sorted(_files(document).keys() - set(HASHED)):
        raise DataError(f"{directory / RESULT}: lists {', '.join(unlisted)}, which is no file of a result; train again")
    for name in dict.fromkeys((*WITH_EVERY_RESULT, *_files(document))):
        checked(directory, document, name)
    if MODEL not in _files(document) and (directory / MODEL).exists():
        checked(directory, document, MODEL)


def recipe_text_of(path: Path) -> str:
    """Return the text of a resolved recipe. Raises DataError if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader of resolved recipes, of which thousands are read at once; it reads plain values as `CoreLoader` does."""

    yaml_implicit_resolvers = CoreLoader.yaml_implicit_resolvers


@contextlib.contextmanager
def _of_this_version() -> Iterator[None]:
    """Turn what goes wrong with a recipe that is no resolved one into DataError."""
    try:
        yield
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        told = f"recipe.yaml: is no resolved recipe of this version ({type(error).__name__})"
        raise DataError(f"{told}; restore the result, or remove it and train again") from None


@functools.lru_cache(maxsize=256)
def _recipe(recipe_text: str) -> Any:
    return yaml.load(recipe_text, Loader=_Loader)


@functools.lru_cache(maxsize=256)
def data_and_folds(recipe_text: str) -> tuple[Mapping[str, Any], int | None]:
    """Return the `data:` section of a resolved recipe, in the form of `tested_section`, and its number of folds.

    Raises DataError if it cannot be read.
    """
    from dpsgd_cli.results.evaluated import tested_section  # recipes, which most readers do without

    with _of_this_version():
        recipe = _recipe(recipe_text)
        folds = recipe.get("folds")
        if not isinstance(folds, int | None):
            raise TypeError("folds")
        return tested_section(recipe), folds


def hides_start(directory: Path, document: Row) -> bool:
    """Return whether a result and its recipe differ in whether it started from an earlier one. Raises DataError."""
    with _of_this_version():
        named = (_recipe(recipe_text_of(directory / "recipe.yaml")).get("privacy") or {}).get("start")
    return (named is None) != (document["privacy"].get("start") is None)
