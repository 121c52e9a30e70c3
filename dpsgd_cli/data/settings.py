"""The `data:` section: a card or a file of the user's own, how its rows are split, and the features computed from them.

`column_settings.py` says how a table is written and what its columns hold, `step_settings.py` has the extractors,
`step_settings.py` has the preprocessing steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from dpsgd_cli.common.sections import Count, DrawSeed, Interval, Name, Positive, Section, Values
from dpsgd_cli.data.column_settings import ColumnUse, Missing, TableFormat, TextColumn
from dpsgd_cli.data.step_settings import Features, PreprocessStep
from dpsgd_cli.discovery.settings import Discovery, Private
from dpsgd_cli.engine.settings import InputArray
from dpsgd_cli.users.settings import Unit

Task = Literal["classification", "regression", "token-classification", "multi-label", "next-token"]
SEVERAL = ("token-classification", "multi-label", "next-token")
"""Tasks whose label is an array of whole numbers: one for each place, or for each class."""
LOG_FROM, LOG_FROM_0 = 100, 10_000
"""Bounds of a target span widely if high is this many times a low above 0, or at least this for a low of 0."""


_POSITIVE = re.compile("true|yes|ja|oui|si|s\u00ed|sim|da|\u0434\u0430|tak|evet|positive?")
"""Public words by which one of two classes is the positive one, in lower case."""


def positive_last(classes: list[Any], positive: object = None) -> list[Any]:
    """Return two classes with the positive one second: `positive`, else the only one that is a word for yes.

    >>> positive_last(["ja", "nein"]), positive_last(["b", "c"]), positive_last(["a", "b"], "a")
    (['nein', 'ja'], ['b', 'c'], ['b', 'a'])
    """
    texts = [str(one).casefold() for one in classes]
    if positive is not None:
        return classes[::-1] if str(positive) in map(str, classes[:-1]) and len(classes) == 2 else classes
    first, *others = [_POSITIVE.fullmatch(text) is not None or (text == "1" and "0" in texts) for text in texts]
    return classes[::-1] if first and others == [False] else classes


class Costs(Section):
    """Costs of the two mistakes about two classes, one of which is `positive`. Only their ratio counts."""

    miss: Positive = Field(alias="false-negative", description="Of a record of the positive class that is missed.")
    alarm: Positive = Field(alias="false-positive", description="Of another record that is taken for a positive one.")

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    @property
    def of_classes(self) -> tuple[float, float]:
        """Return the costs of missing a record of the first class, and of the second."""
        return self.alarm, self.miss


class TextInput(Section):
    """Texts that become tokens, by a local tokenizer or a public hash of words; they are all of a record's inputs."""

    column: str | None = Field(
        None, description="Column of a table or of a card, or field of JSON lines; none for a folder."
    )
    length: Count = Field(description="Tokens of a record: longer texts are cut, shorter ones padded and masked.")
    words: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="No tokenizer: a token is a word's public hash, one of so many; padding is below 0. For models that"
        " train from nothing.",
        examples=[4096],
    )
    folder: str | None = Field(
        None, description="Folder of the tokenizer, relative to the recipe; else the model's.", examples=["models/bert"]
    )
    public: bool = Field(
        False,
        description="With a folder of its own: true declares that no private record shaped its tokenizer.",
        examples=[True],
    )

    @model_validator(mode="after")
    def _declared(self) -> TextInput:
        if self.folder is not None and self.words is not None:
            raise ValueError("words: are hashed, without a tokenizer; leave folder out, or words")
        if self.folder is not None and not self.public:
            raise ValueError(
                f"public: a tokenizer that private records shaped tells of them; true declares that none shaped the one"
                f" in {self.folder}"
            )
        return self


class Split(Section):
    purpose: ClassVar[str] = "test"
    key: ClassVar[str] = "split.test"
    test: Annotated[float, Field(gt=0, lt=1)] | Count | Literal[0] = Field(
        0.2,
        description="Test rows: a fraction (about that many) or a count. A coin decides for each record. 0: all records"
        " train, and nothing is measured.",
    )
    seed: DrawSeed = Field(0, description="Seed of the split; the same for every trial.")

    @property
    def asked(self) -> float | int:
        """Return the share of the rows that is cut, or their number."""
        return self.test


class ValidationSet(Section):
    """Rows cut from the training part for validation. Either declared public, or every use is charged to the ledger."""

    purpose: ClassVar[str] = "validation"
    key: ClassVar[str] = "validation"
    records: Count | None = Field(None, description="How many rows; or `fraction`.")
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(None, description="Share of the rows; or `records`.")
    public: bool = Field(False, description="Declare these records public: whoever is in them is not protected.")
    noise_multiplier: Positive | None = Field(
        None, description="Gaussian noise on every count of right predictions, charged to the ledger."
    )
    seed: DrawSeed = Field(0, description="Seed of the cut; the same for every trial.")

    @property
    def asked(self) -> float | int:
        """Return the share of the rows that is cut, or their number."""
        return self.records or self.fraction or 0

    @model_validator(mode="after")
    def _one_way(self) -> ValidationSet:
        if (self.records is None) == (self.fraction is None):
            raise ValueError("give either records or fraction")
        if (self.noise_multiplier is None) == (not self.public):
            raise ValueError(
                "validation records are cut from private training data: declare them with public: true, or give"
                " noise_multiplier, which charges every look at them (not both)"
            )
        return self


class PublicSet(Section):
    """Public records without labels. PATE labels them; preprocessing may use them, too."""

    purpose: ClassVar[str] = "public"
    key: ClassVar[str] = "public.records"
    source: Literal["test", "train"] | None = Field(
        None,
        alias="from",
        description="Cut from the test records (the default; the others judge), or from the training records, declared"
        " public.",
    )
    path: str | None = Field(
        None,
        description="All records of a file instead, relative to the recipe, with the training records' columns.",
        examples=["public.csv"],
    )
    records: Count | None = Field(None, description="How many are cut. A coin decides for each record.")
    seed: DrawSeed = Field(0, description="Seed of the cut; the same for every trial.")

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="after")
    def _one_way(self) -> PublicSet:
        if (self.path is None) == (self.records is None):
            raise ValueError("give either records (how many are cut) or path (a file, of which all records are taken)")
        if self.path is not None and self.source is not None:
            raise ValueError(f"from: is where records are cut from, and those of {self.path} are not cut; leave it out")
        return self

    @property
    def asked(self) -> int:
        """Return the number of rows that are cut; 0 for a file of public records."""
        return self.records or 0

    @property
    def cut_from(self) -> Literal["test", "train"] | None:
        """Return the part that the public records are cut from; None if they are a file."""
        return None if self.path is not None else self.source or "test"


Cut = Split | ValidationSet | PublicSet


class ByGroup(Section):
    """Private evaluation, also by group."""

    by: Annotated[list[Name], Field(min_length=1, max_length=5)] = Field(
        description="Columns with public categories: metrics are also those of the records with each value."
    )


class Augment(Section):
    """Copies of every training image, cropped and mirrored at random; their gradients are averaged before clipping."""

    copies: Count = Field(16, description="K: copies of an image in a step, which costs K times the time.")
    crop: Annotated[int, Field(ge=0)] = Field(4, description="Crop after padding by this many pixels a side; 0: none.")
    padding: Literal["reflect", "zero"] = Field("reflect", description="What is around an image.")
    flip: bool = Field(True, description="Mirror half of the copies, left to right.")


@dataclass(frozen=True)
class RecordUse:
    """Decisions of the other sections of a recipe about its records, for code that reads or cuts them.

    `unit` is the unit of privacy, a user with several rows; None for single records. `folds` are those of
    cross-validation, or None. `by_place`: a record's place decides its part (replace-one, zero-out), not its content.
    `private`: the recipe states privacy.
    """

    unit: Unit | None = None
    folds: int | None = None
    by_place: bool = False
    private: bool = False


class Data(Section):
    """A card by `name`, or a file of the user's own by `path`."""

    _use: RecordUse = PrivateAttr(RecordUse())

    name: str | None = Field(
        None, description="A data set card: `dpsgd data list` shows them; or the path of a card of your own (.yaml)."
    )
    path: str | None = Field(
        None,
        description="Your own .csv, .tsv, .jsonl, .parquet or .npz file, relative to the recipe; or a .npy file of"
        " features, which stays on disk and may be larger than memory.",
    )
    test_path: str | None = Field(
        None, description="A second file that holds the test rows; otherwise see `split`.", examples=["later.csv"]
    )
    target: Name | None = Field(
        None, description="Label column (of a table), array (npz: default `y`) or file (npy).", examples=["late"]
    )
    format: TableFormat | None = Field(
        None, description="How your own table is written; `dpsgd recipe new` finds it out, training only reads it here."
    )
    test_target: str | None = Field(
        None, description="The file of test labels, where test_path is a .npy file.", examples=["labels_test.npy"]
    )
    inputs: Annotated[dict[str, InputArray], Field(min_length=1)] | None = Field(
        None,
        description="Named arrays of a npz file that are the inputs, instead of x; a model gets them as keyword"
        " arguments: {input_ids: {shape: [128]}, attention_mask: {shape: [128]}}.",
    )
    text: TextInput | None = Field(
        None, description="Texts as tokens for a model of transformers: {column: review, length: 128}."
    )
    task: Task = Field(
        "classification",
        description="What the label is; token-classification: a class at each place; multi-label: 0 or 1 for each"
        " class; next-token: the token that follows each place. A negative label at a place does not count.",
    )
    classes: Values | None = Field(None, description="Public list of class labels; else read and declared public.")
    positive: str | int | float | bool | None = Field(
        None,
        description="Which of two classes is the positive one, of which sensitivity and costs speak. Left"
        " out, the one that is a word for yes (ja, yes, true, 1, positive), else the second that is listed or sorted.",
        examples=["yes"],
    )
    class_weights: Annotated[list[Positive], Field(min_length=2)] | None = Field(
        None,
        description="Public weights of the classes' losses, in the order of the classes. Gradients are clipped after"
        " them, so the price is the same.",
        examples=[[1, 50]],
    )
    costs: Costs | None = Field(
        None,
        description="Public costs of mistakes about two classes, {false-negative: 10, false-positive: 1}: predictions"
        " are those that cost least. Left out, class weights count as costs, or the likelier class is predicted.",
        examples=[{"false-negative": 10, "false-positive": 1}],
    )
    categorical: dict[Name, Values | Private] | list[Name] | None = Field(
        None,
        description="Categorical columns, with their public values, or `private` (see `discovery`); a bare list reads"
        " and declares the values.",
    )
    bounds: dict[Name, Interval | Private] | Interval | None = Field(
        None,
        description="Public [low, high] of numeric columns by name, or `private` (see `discovery`), or (own files) one"
        " pair for all. With a card they take the place of its own; values outside are clamped.",
    )
    discovery: Discovery | None = Field(
        None, description="How private bounds and categories are released; left out, by automatic settings."
    )
    target_bounds: Interval | None = Field(
        None,
        description="Regression: public [low, high] of the target. Training sees it scaled to [-1, 1] (values outside"
        " are clamped); metrics are in its own unit.",
        examples=[[0, 100_000]],
    )
    target_transform: Literal["log", "auto"] | None = Field(
        None,
        description="Regression with target_bounds: train on log(1 + (target - low) / u), scaled to [-1, 1]; u is low"
        " if low is above 0, else a thousandth of the bounds' width. For targets whose errors are shares of them. auto:"
        f" log if the bounds alone say so, low above 0 and high {LOG_FROM} times it, or 0 and {LOG_FROM_0:,} or more.",
    )
    missing: dict[Name, float | str | Missing] | None = Field(
        None, description="By column, what a missing value means: a number or category, or {value, indicator}."
    )
    columns: dict[Name, ColumnUse] | None = Field(
        None,
        description="Columns of dates, of many categories (hash) and of text, which become numbers by public rules.",
    )
    drop: list[Name] = Field(default_factory=list, description="Columns to leave out.")
    rows: Literal["labelled"] | None = Field(
        None, description="labelled: rows without a label are left out, each by itself; for add-remove."
    )
    fitted_before: list[str] | None = Field(
        None,
        description="What was fitted to these records without privacy before they were written (a scaler, a choice of"
        " columns): the statement says that it does not cover it.",
        examples=[["scaler"]],
    )
    on_disk: bool | None = Field(
        None,
        description="true reads a csv or parquet table in parts and keeps its numbers in a file in your cache folder,"
        " so that memory does not grow with rows.",
    )
    split: Split | None = Field(None, description="Cut a test set from the file; the card's own split otherwise.")
    evaluation: Literal["private", "public"] | ByGroup | None = Field(
        None,
        description="How held-out records are measured: private (one noisy release at the end, which costs nothing"
        " more: metrics with intervals; with {by: [sex]} also by group), or public (without noise, so they are declared"
        " public). Left out: private for a file of your own that has no test records, public for cards and files with"
        " test records.",
    )
    features: Features | None = Field(None, description="A frozen extractor, before any preprocessing.")
    coins: Literal["content", "place"] | None = Field(
        None,
        description="Without privacy only: what decides a record's part, to be tested on the records of a recipe for"
        " add-remove (content) or for replace-one and zero-out (place). With privacy the adjacency decides.",
    )
    validation: ValidationSet | None = Field(None, description="Rows of the training part to validate on.")
    public: PublicSet | None = Field(None, description="Public records without labels, which PATE labels.")
    augment: Augment | None = Field(None, description="Random crops and flips of training images, in every step.")
    preprocess: list[PreprocessStep] | None = Field(
        None, description="Steps in order; left out, the card's own default (a file: scale by bounds, then one-hot)."
    )

    @model_validator(mode="after")
    def _positive_last(self) -> Data:
        """Put the positive one of two listed classes, and its weight, second, as everything that reads them expects."""
        if (
            self.task == "classification"
            and self.classes
            and positive_last(self.classes, self.positive) != self.classes
        ):
            for key in ("classes", "class_weights"):
                own = getattr(self, key)
                object.__setattr__(self, key, own and own[::-1])  # the section is frozen
        return self

    @model_validator(mode="after")
    def _card_or_file(self) -> Data:
        if (self.name is None) == (self.path is None):
            raise ValueError("give either name (a card) or path (your own file)")
        if self.path is None:
            own = "test_path target test_target categorical classes drop target_bounds missing target_transform"
            extra = [k for k in (*own.split(), "format", "on_disk", "positive", "rows") if getattr(self, k)]
            if self.bounds is not None and not isinstance(self.bounds, dict):
                extra.append("one pair of bounds")
            if self.task != "classification":
                extra.append("task")
            if self.private_columns:
                extra.append("private bounds")
            if extra:
                raise ValueError(f"{', '.join(extra)}: only for a file of your own (path); the card says it already")
        elif self.target_bounds is not None and self.task != "regression":
            raise ValueError("target_bounds: is for task: regression; classes have none")
        elif self.target_transform is not None and self.target_bounds is None:
            raise ValueError("target_transform: needs target_bounds, the public [low, high] of the target")
        elif self.target is None and not self.path.endswith(".npz") and not self._of_tokens:
            what = "npy file needs target, the .npy file of its labels"
            named = "table needs target, the name of the label column"
            raise ValueError(f"a {what if self.path.endswith('.npy') else named}")
        if self.positive is not None and self.classes and str(self.positive) not in map(str, self.classes[1:2]):
            raise ValueError(f"positive: is {self.positive!r}, but must be one of two classes")
        given = [key for key in ("positive", "class_weights", "costs") if getattr(self, key) is not None]
        if (
            given
            and self.task != "classification"
            and (given, self.task) != (["class_weights"], "token-classification")
        ):
            raise ValueError(f"{given[0]}: is for classes of records, not for task: {self.task}")
        self._check_several()
        if self.class_weights is not None and self.classes and len(self.class_weights) != len(self.classes):
            told = f"{len(self.class_weights)} weights for {len(self.classes)} classes"
            raise ValueError(f"class_weights: {told}; give one for each, in the order of classes")
        npy = self.test_path is not None and self.test_path.endswith(".npy")
        if npy != (self.test_target is not None):
            raise ValueError("test_target goes with a test_path that is a .npy file, whose labels it holds")
        return self

    @property
    def labels_are_arrays(self) -> bool:
        """Return True if the label of one record is an array: a class at each place, or one for each class."""
        return self.task in SEVERAL

    @property
    def names_of_several(self) -> list[Any] | None:
        """Return the names of a record's several labels, or of the classes of its places; None without."""
        return self.classes if self.task in ("multi-label", "token-classification") else None

    @property
    def _of_tokens(self) -> bool:
        """Return True if labels are not read from a column: those of tokens, and of a folder of texts."""
        return self.task == "next-token" or (self.text is not None and self.text.column is None)

    def _check_several(self) -> None:
        if self.text is not None:
            beside = "inputs categorical bounds columns missing drop augment on_disk features preprocess"
            extra = [key for key in beside.split() if getattr(self, key)]
            if extra:
                raise ValueError(f"{extra[0]}: data.text is all of a record's input; leave this out")
            if self.name is not None and self.text.column is None:
                raise ValueError("text.column: missing; name the column of the card that holds the texts")
            if self.task not in ("classification", "regression", "next-token"):
                raise ValueError(f"task: {self.task} needs arrays of tokens and labels (.npz), not text")
        arrays = self.path is not None and self.path.endswith((".npz", ".npy"))
        if self.inputs is not None and not (self.path or "").endswith(".npz"):
            raise ValueError("inputs: are named arrays of a .npz file (path)")
        if self.task in ("token-classification", "multi-label") and (not arrays or self.classes is None):
            raise ValueError(f"task: {self.task} reads labels of a .npz or .npy file, and needs classes: a public list")
        if self.task == "next-token" and (self.classes or self.target):
            raise ValueError("task: next-token takes its labels from the tokens; leave classes and target out")

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Return the weights of the classes' losses, the largest 1; None if all count alike."""
        told = self.class_weights
        return None if told is None else tuple(one / max(told) for one in told)

    @property
    def log_scale(self) -> bool:
        """Return True if targets are trained on a log scale, by `target_transform` and the public bounds."""
        if self.target_transform != "auto" or self.target_bounds is None:
            return self.target_transform == "log"
        low, high = self.target_bounds
        return low >= 0 and high >= (LOG_FROM * low if low > 0 else LOG_FROM_0)

    @property
    def unit(self) -> Unit | None:
        """Return the recipe's unit of privacy (`RecordUse`)."""
        return self._use.unit

    @property
    def folds(self) -> int | None:
        """Return the recipe's number of folds (`RecordUse`)."""
        return self._use.folds

    @property
    def by_place(self) -> bool:
        """Return True if a record's place decides its part (`RecordUse`)."""
        return self._use.by_place

    @property
    def owner_column(self) -> str | None:
        """Return the column or array of the records' own file that names each row's user; None if there is none."""
        return None if self.unit is None or self.unit.in_a_file else self.unit.column

    @property
    def measured_privately(self) -> bool:
        """Return True if held-out records are private, and measured by one noisy release."""
        return self.evaluation not in (None, "public")

    @property
    def expects_test(self) -> bool:
        """Return True if the file has to hold test records: nothing else says which are public."""
        return self._use.private and self.evaluation is None and self._may_hold_test(self.folds)

    def _may_hold_test(self, folds: int | None) -> bool:
        """Return True for a npz file, which may hold test records, unless the recipe cuts it."""
        cut = self.split is not None or folds is not None or self.test_path is not None
        return (self.path or "").lower().endswith(".npz") and not cut

    @property
    def groups(self) -> list[str]:
        """Return the columns by whose values held-out records are measured."""
        return self.evaluation.by if isinstance(self.evaluation, ByGroup) else []

    @property
    def pooled(self) -> bool:
        """Return True if the recipe's split or folds divide the rows of all files anew."""
        return self.split is not None or self.folds is not None

    @property
    def cuts(self) -> bool:
        """Return True if this section or the recipe's folds divide records by coins, beyond the card's own split."""
        return self.folds is not None or any(own is not None for own in (self.split, self.validation, self.public))

    def measured(self, folds: int | None) -> Data:
        """Return the section of a private recipe with `evaluation` and, if it is private, a split that holds out.

        Left out, it is private for a user's own file without test records. A npz file may hold test records, so it is
        taken to have some unless the recipe cuts it; `preparation.py` refuses a file that then has none.
        """
        if self.evaluation == "public" or self.path is None or self.test_path is not None:
            return self
        holds_none = self.split is not None and self.split.test == 0
        if self.evaluation is None and (self._may_hold_test(folds) or holds_none):
            return self
        split = self.split if folds is not None else self.split or Split()
        return self.changed(evaluation=self.evaluation or "private", split=split)

    def protecting(
        self, unit: Unit | None, folds: int | None = None, by_place: bool = False, private: bool = False
    ) -> Data:
        """Return a copy of which `RecordUse` is what the arguments say."""
        made = self.model_copy()
        made._use = RecordUse(unit, folds, by_place, private)
        return made

    @property
    def card_file(self) -> str | None:
        """Return the path of the user's own card, as the recipe writes it; None for other cards and for files."""
        return self.name if (self.name or "").endswith((".yaml", ".yml")) else None

    @property
    def private_columns(self) -> dict[str, bool]:
        """Return the columns whose bounds or categories are released; True for categories."""
        told = {False: self.bounds, True: self.categorical}
        return {
            name: kind
            for kind, own in told.items()
            if isinstance(own, dict)
            for name, value in own.items()
            if value == "private"
        }

    @property
    def by_column(self) -> bool:
        """Return True if the last step makes features of single columns, over public cells (`bin` without pairs)."""
        last = self.preprocess[-1].bin if self.preprocess else None
        return last is not None and last.pairs is None

    @property
    def stays_on_disk(self) -> bool:
        """Return True if rows are read from a file in each step, as features or as codes."""
        return bool(self.on_disk) or (self.path or "").endswith(".npy")

    @property
    def of_codes(self) -> bool:
        """Return True if the last step rounds columns to a public grid, so that rows are kept as codes."""
        last = self.preprocess[-1].bin if self.preprocess else None
        return last is not None and last.steps is not None

    @property
    def of_texts(self) -> bool:
        """Return True if a column of text is used, as the recipe says (not the card)."""
        return any(isinstance(use, TextColumn) for use in (self.columns or {}).values())

    @property
    def fillings(self) -> dict[str, Missing]:
        """Return the value for missing cells, by column."""
        told = self.missing or {}
        return {name: one if isinstance(one, Missing) else Missing(value=one) for name, one in told.items()}

    @property
    def files(self) -> list[str]:
        """Return the user's own files of records, labels and users (one per row), as the recipe names them."""
        npy = self.path is not None and self.path.endswith(".npy")
        given = (self.path, self.test_path, *((self.target, self.test_target) if npy else ()))
        owners = [self.unit.column] if self.unit is not None and self.unit.in_a_file else []
        return [*(name for name in given if name is not None), *owners]
