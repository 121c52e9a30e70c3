"""Identity of the records that a recipe is tested on, from its `data:` section, its folds and the files' hashes.

Metrics on different test records are different quantities, so their differences are not reported
(`results/comparison.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from hashlib import sha256
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from dpsgd_cli.accounting.adjacency import BATCHINGS, NEIGHBOURS, adjacency_label
from dpsgd_cli.accounting.joint_composition import Records, Run
from dpsgd_cli.data import cards
from dpsgd_cli.data.settings import Data, PublicSet, Split, ValidationSet
from dpsgd_cli.errors import DataError, UsageError
from dpsgd_cli.recipe.loading import LoadedRecipe, resolved

OWN_FILES = ("path", "test_path", "target", "test_target")
OWNER = "unit"
COINS = "coins"
"""Keys of `tested_section` for the column that names users, and for coins by place (`splits.py`)."""
_NOT_READING = (
    "name",
    "cards",
    "path",
    "test_path",
    "preprocess",
    "features",
    "split",
    "validation",
    "public",
    "augment",
    "evaluation",
)
"""Keys of `tested_section` that do not change the content of a record as read; files are compared by their hashes."""


@dataclass(frozen=True)
class Evaluated:
    """The records that a recipe is tested on. `name` names the data for people.

    Two recipes use the same data if `source` is equal, and the same test records if `records`, their description in
    words, is equal too.
    """

    name: str
    source: tuple[Any, ...]
    records: str


def evaluated_on(data: Mapping[str, Any], folds: int | None, identities: Mapping[str, str]) -> Evaluated:
    """Return the records that the resolved `data` section (`tested_section`) is tested on.

    `identities` maps each file that was read to an identity of its content (a SHA-256). Preprocessing, computed
    features and validation records do not change the test records. Raises DataError if `data` is not a valid section.
    """
    files_of(data)  # raises DataError if the section is invalid
    judges, made = _records(data, folds), _made(data, folds, identities)
    card = data.get("name")
    if card is not None:
        computed = {"features", *_made_from(data)}
        found = sorted(content for file, content in identities.items() if file not in computed)
        return Evaluated(str(card), ("card", card, *found, *made), judges)
    # a column has no hash, so its name is compared
    own = (identities.get(str(data.get(key)), str(data.get(key))) for key in OWN_FILES)
    name = PurePath(str(data.get("path"))).name
    return Evaluated(name, ("own", data.get("task", "classification"), *own, *made), judges)


def identities_in(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each file that a result lists as read."""
    kinds = ("data_sha256", "nonprivate_data_sha256")
    return {file: found for kind in kinds for file, found in provenance.get(kind, {}).items()}


def files_of(data: Mapping[str, Any]) -> list[str]:
    """Return the user's own files that the resolved `data` section names, including a card of their own."""
    try:
        section = Data.model_validate({key: value for key, value in data.items() if key not in (OWNER, COINS)})
    except ValidationError as error:
        told = error.errors(include_url=False, include_input=False)[0]
        raise DataError(f"{'.'.join(('data', *map(str, told['loc'])))}: {told['msg']}") from None
    beside = [data[OWNER]] if str(data.get(OWNER, "")).endswith(".npy") else []
    return [*(section.files if section.card_file is None else [section.card_file]), *beside]


def read_from(data: Mapping[str, Any]) -> list[str]:
    """Return the files, and the tokenizer's folder, that the resolved `data` section reads records from."""
    return list(dict.fromkeys([*files_of(data), *_made_from(data)]))


def _made_from(data: Mapping[str, Any]) -> list[str]:
    """Return the folder of the tokenizer that the `data` section names, if any."""
    told = data.get("text")
    return [told["folder"]] if isinstance(told, Mapping) and told.get("folder") is not None else []


def _made(data: Mapping[str, Any], folds: int | None, identities: Mapping[str, str]) -> tuple[str, ...]:
    """Return identities of the files that a record's numbers are read from, if coins of these numbers cut records.

    With other features, or another tokenizer, other records are held out (`data/splits.py`). They are a function of all
    records, so they are part of `Evaluated.source`, which is compared and never printed.
    """
    return tuple(identities.get(file, file) for file in _made_from(data)) if _cut_by_content(data, folds) else ()


def _cut_by_content(data: Mapping[str, Any], folds: int | None) -> bool:
    """Return True if coins of a record's content decide whether it is held out."""
    cut = folds or data.get("split") or data.get("validation") or data.get("public") or _usual_cut(data)
    return cut is not None and COINS not in data and OWNER not in data


def tested_section(resolved_recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `data` section of a resolved recipe with OWNER and COINS, which decide how rows are cut."""
    data, privacy = resolved_recipe["data"], resolved_recipe.get("privacy") or {}
    adjacency = privacy.get("adjacency") or BATCHINGS[resolved_recipe["method"]["batching"]].adjacency
    coins = data.get(COINS, "content" if NEIGHBOURS[adjacency].counted else "place")
    found = {key: value for key, value in data.items() if key != COINS}
    if privacy.get("unit"):
        found[OWNER] = privacy["unit"]["column"]
    return found | ({COINS: "place"} if coins == "place" else {})


def public_validation(data: Mapping[str, Any]) -> str:
    """Return words for validation records that are declared public, and measured like test records; "" if none are."""
    given = data.get("validation")
    cut = None if given is None else ValidationSet.model_validate(given)
    if cut is None or not cut.public:
        return ""
    size = cut.records if cut.records is not None else _percentage(cut.fraction or 0.0)
    return f", validated on {size} of the others (seed {cut.seed})"


def _records(data: Mapping[str, Any], folds: int | None) -> str:
    """Return words for the records of the resolved `data` section that are tested."""
    words = _cut(data, folds)
    if OWNER in data:
        words += f", all rows of a user ({data[OWNER]}) together"
    public = None if data.get("public") is None else PublicSet.model_validate(data["public"])
    if public is None or public.cut_from != "test":
        return words
    return f"{words}, but for {public.records} that are public (seed {public.seed})"


def _cut(data: Mapping[str, Any], folds: int | None) -> str:
    if folds is not None:
        return f"{folds} folds{' by place' if COINS in data else ''}"
    split = data.get("split")
    if split is None and data.get("name") is not None and files_of(data):
        return "the test records of its card"
    cut = _usual_cut(data) if split is None else Split.model_validate(split)
    if cut is None:
        return "its own test records"
    size = str(cut.test) if isinstance(cut.test, int) else _percentage(cut.test)
    return f"{size} of its records (split seed {cut.seed}{', by place' if COINS in data else ''})"


def _percentage(share: float) -> str:
    """Return a share in percent with all of its digits.

    Of two cuts that differ only in the last digit, either may test on records that the other trains on.

    >>> _percentage(0.2), _percentage(0.20004)
    ('20%', '20.004%')
    """
    return f"{(Decimal(repr(share)) * 100).normalize():f}%"


def _usual_cut(data: Mapping[str, Any]) -> Split | None:
    """Return the default cut of a recipe without one; None if the files have test records of their own."""
    if data.get("name") is None:
        # an npz file may hold test records, so an explicit split never compares equal to a missing one
        return None if data.get("test_path") or str(data["path"]).endswith(".npz") else Split()
    try:
        own = cards.load_card(str(data["name"])).split
        return Split() if own is not None and OWNER in data else own
    except UsageError:
        # the result comes from a version that had such a card
        return None


def records_of(data: Mapping[str, Any], folds: int | None, identities: Mapping[str, str]) -> Records | None:
    """Return the records of a resolved recipe's `data:` and `folds:`; None if `identities` lacks one of its files."""
    if any(file not in identities for file in read_from(data)):
        return None
    tested = evaluated_on(data, folds, identities)
    read = _read_as(data) if folds is None else ""
    how = "measured with noise" if data.get("evaluation") not in (None, "public") else "tested"
    return Records(tested.source, f"{how} on {tested.records}{public_validation(data)}{read}", folds)


def protects_all(data: Mapping[str, Any]) -> bool:
    """Return whether a private recipe's statement is of every record of its `data:` section, held out or not."""
    return data.get("evaluation") == "private" and data.get("public") is None and not public_validation(data)


def _read_as(data: Mapping[str, Any]) -> str:
    """Return words for the settings by which records are read, if coins of their content as read cut them; else "".

    With other settings (a column less, another list of classes) other records are held out (`data/splits.py`). The
    content of a user's own table does not depend on bounds, unless they fill missing values.
    """
    if not _cut_by_content(data, None):
        return ""
    fixed = {key: value for key, value in data.items() if key not in _NOT_READING}
    if "path" in data and not data.get("missing"):
        fixed.pop("bounds", None)
    return f", read as {sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:8]}"


def run_of(loaded: LoadedRecipe, trials: int | None = None) -> Run:
    """Return the trials of a recipe before it runs, or `trials` trials like them. Files are identified by path."""
    recipe = loaded.recipe
    alike = recipe if trials is None else recipe.changed(repeats=trials, folds=None)
    data = tested_section(resolved(recipe))
    places = {file: str((loaded.base / file).resolve()) for file in read_from(data)}
    adjacency = None if recipe.privacy is None else adjacency_label(recipe.adjacency, recipe.privacy.unit)
    started = recipe.privacy is not None and recipe.privacy.start is not None
    return Run(recipe.name, alike.seeds, adjacency, records_of(data, recipe.folds, places), started)
