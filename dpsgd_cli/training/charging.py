"""Charges of the book that a recipe names (`privacy.book`): what is reserved before a run, and noted before its result.

`results/book.py` has the file, `accounting/book_filter.py` the proof. What a run may release is what its plan bounds
(`Plan.priced_releases`), for each trial. A run is refused if the book's guarantee would not cover it: the table has
another hash, unit or adjacency, a preprocessing step has no noise, or with folds, where trials measure what others
train on. The recipe itself refuses a seed, because noise that can be computed again is no release under differential
privacy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpsgd_cli.accounting.book_filter import Spending
from dpsgd_cli.accounting.joint_composition import why_records_apart
from dpsgd_cli.accounting.mechanism import Release, merge, to_record
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.data import card_files, cards, preparation
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.errors import DataError, PrivacyError, RunError, UsageError
from dpsgd_cli.recipe.loading import LoadedRecipe, SettledRecipe, resolved
from dpsgd_cli.results import book as books
from dpsgd_cli.results import prices, store
from dpsgd_cli.results.book import Book, BookedRun
from dpsgd_cli.results.earlier import earlier_of
from dpsgd_cli.results.evaluated import run_of, tested_section
from dpsgd_cli.training.start import Member


def book_of(loaded: LoadedRecipe) -> Path | None:
    """Return the path of the book that the recipe names; None without one."""
    privacy = loaded.recipe.privacy
    return None if privacy is None or privacy.book is None else loaded.base / privacy.book


def common_book(recipes: Sequence[LoadedRecipe]) -> Path | None:
    """Return the book that all recipes name; None if none does. Raises UsageError if they name different ones."""
    found = {None if path is None else path.resolve() for path in map(book_of, recipes)}
    if len(found) > 1:
        raise UsageError("some recipes name another book than others, or none; give all one, with --book")
    return found.pop() if found else None


def reserve(path: Path, out: Path, runs: Sequence[tuple[SettledRecipe, BookedRun]], use_open: bool, what: str) -> None:
    """Charge the book for runs whose results will be in `out`, all or none; see `book.reserve`.

    Raises PrivacyError for a run that the book cannot cover.
    """
    found = books.read(path)
    for loaded, _ in runs:
        with loaded.locating_errors():
            check_covered(found, loaded)
    books.reserve(path, out, [run for _, run in runs], use_open, what)


def run_for(loaded: SettledRecipe, plan: Plan, directory: str) -> BookedRun:
    """Return the run of a recipe as the book charges it: what one trial may release, times its trials.

    Its name is that of its result with a hash of what may be released. So a run that goes on with another plan, as
    another version of dpsgd may make it, is another run.
    """
    recipe = loaded.recipe
    releases, held_out = (
        tuple(merge([Release(own.mechanism, own.count * recipe.trials) for own in map(prices.unscaled, made)]))
        for made in (plan.priced_releases, plan.held_out)
    )
    records = run_of(loaded).records
    assert records is not None, "the recipe's own files are known"
    public = tested_section(resolved(recipe)).get("public")
    told = "" if public is None else f", public {json.dumps(public, sort_keys=True)}"
    spending = Spending(releases, held_out=held_out)
    content = json.dumps([to_record(release) for release in (*releases, *held_out)])
    name = f"{directory}:{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    return BookedRun(name, spending, recipe.trials, f"{records.left_out}{told}")


def _runs(members: Sequence[Member], directories: Sequence[Path]) -> list[tuple[SettledRecipe, BookedRun]]:
    found = []
    for member, directory in zip(members, directories, strict=True):
        assert member.plan is not None, "a recipe with a book has a plan"
        found.append((member.loaded, run_for(member.loaded, member.plan, directory.name)))
    return found


def begin(members: Sequence[Member], directories: Sequence[Path], use_open: bool) -> None:
    """Charge the book for a pack that is about to start, before any record is used for it.

    With `use_open`, members that a book still allows to publish are not charged: a training that continues, or one that
    a sweep has reserved.
    """
    path = common_book([member.loaded for member in members])
    if path is not None:
        reserve(path, directories[0].parent, _runs(members, directories), use_open, "train")


def check_read(members: Sequence[Member], read: Mapping[str, str]) -> None:
    """Raise RunError if a file of the table was changed between its charge and its reading, by the hashes of `read`."""
    loaded = members[0].loaded
    path = common_book([loaded])
    known = [] if path is None else books.read(path).terms.data.values()
    changed = [name for name in loaded.recipe.data.files if path is not None and read.get(name) not in known]
    if changed:
        raise RunError(f"{changed[0]}: was changed after {path} was charged for it, so nothing is trained")


def named(member: Member, directory: Path) -> dict[str, Any]:
    """Return the entry `book` of a result's `privacy`: ids of the book and of the charge; empty without a book."""
    path = book_of(member.loaded)
    if path is None:
        return {}
    ((_, run),) = _runs([member], [directory])
    return {"book": books.named(path, directory.parent, run.name)}


def end(members: Sequence[Member], directories: Sequence[Path]) -> None:
    """Note in the book that the results of a pack are published next. Raises RunError if no charge allows it."""
    path = common_book([member.loaded for member in members])
    if path is not None:
        books.release(path, directories[0].parent, [run.name for _, run in _runs(members, directories)])


def check_charged(loaded: LoadedRecipe, directory: Path) -> None:
    """Raise RunError if the finished result in `directory` was not charged to the book that the recipe names."""
    path = book_of(loaded)
    if path is None:
        return
    found, charged = books.read(path), store.read_document(directory)["privacy"].get("book") or {}
    if charged.get("book") != found.identity:
        raise RunError(
            f"{directory}: this result was not charged to {path}; to train it again, choose another place with --out or"
            " remove the directory; to start from a result (privacy.start), give one that was charged"
        )
    if charged.get("charge") not in [line["id"] for line in found.charges]:
        raise RunError(
            f"{path}: does not hold the charge of {directory}, so this is an old copy of the book, which has forgotten"
            " what was spent since; use the newest"
        )


def check_covered(book: Book, loaded: LoadedRecipe) -> None:
    """Raise PrivacyError unless the book's terms cover what the recipe's statement is about."""
    recipe, terms = loaded.recipe, book.terms
    unit = None if recipe.data.unit is None else recipe.data.unit.column
    if (recipe.adjacency, unit) != (terms.adjacency, terms.unit):
        stated = replace(terms, adjacency=recipe.adjacency, unit=unit).protects
        raise PrivacyError(f"privacy.book: {book.path} is for {terms.protects}, but the recipe has {stated}")
    if sorted(_hashes(loaded)) != sorted(terms.data.values()):
        raise PrivacyError(
            f"privacy.book: {book.path} is of another table ({', '.join(terms.data)}): the recipe's files must have the"
            " hashes that the book was created with, all of them and no others"
        )
    if (earlier := earlier_of(loaded)) is not None:
        check_charged(loaded, earlier.folder)
    apart = why_records_apart([run_of(loaded)])
    steps = preparation.uncovered_steps(recipe.data, recipe.adjacency, loaded.base)
    if apart is not None or steps:
        raise PrivacyError(f"privacy.book: no book covers this recipe: {apart or '; '.join(steps)}")


def _hashes(loaded: LoadedRecipe) -> list[str]:
    """Return the SHA-256 of every file of records, labels and users that the recipe reads."""
    data = loaded.recipe.data
    if data.name is None:
        places = [loaded.base / name for name in data.files]
    else:
        card = cards.card_of(data, loaded.base)
        found = [card_files.locate(card, file) for file in card.files]
        places = [*dict.fromkeys(path for path in found if path is not None), *(loaded.base / n for n in data.files)]
    if not places:
        raise PrivacyError("privacy.book: the recipe's data are not in files, so no hash identifies them")
    try:
        return [sha256(path) for path in places]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
