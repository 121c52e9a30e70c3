"""The extractor of `data.features`, and the steps of `data.preprocess`, which transform features after they are read.

Their code is in `data/features.py`, `data/preprocess.py` and `data/bins.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from dpsgd_cli.common.sections import Count, Interval, Positive, Section


class Extractor(Section):
    """A frozen feature extractor. It runs before any preprocessing, on each record alone."""

    pool: Count | None = Field(None, description="Average the maps to this many places a side; left out, keep them.")
    groups: Count | None = Field(
        None, description="Cut each record's channels into this many groups and give each mean 0 and variance 1."
    )


class ScatteringFeatures(Extractor):
    """A wavelet scattering transform to order 2, without weights or data."""

    kind: Literal["scattering"] = "scattering"
    scales: Annotated[int, Field(ge=1, le=4)] = Field(2, description="J: the grid has side / 2^J places a side.")
    orientations: Annotated[int, Field(ge=1, le=16)] = Field(8, description="L: directions of the wavelets.")


class PretrainedFeatures(Extractor):
    """A network that another recipe trained on public data, without its last layer."""

    kind: Literal["pretrained"] = "pretrained"
    result: str = Field(
        description="Its result directory (save_model: true), relative to the recipe.",
        examples=["results/public-net-1a2b3c4d"],
    )
    public: bool = Field(
        False, description="true declares that the data it was trained on are public.", examples=[True]
    )

    @model_validator(mode="after")
    def _public(self) -> PretrainedFeatures:
        if not self.public:
            raise ValueError(
                f"a network trained on private data is no free extractor; public: true declares that those of"
                f" {self.result} are public"
            )
        return self


Features = Annotated[ScatteringFeatures | PretrainedFeatures, Field(discriminator="kind")]


class OneHot(Section):
    columns: list[str] | None = Field(
        None, description="Categorical columns to expand; all of them when left out.", examples=[["job"]]
    )


class Scale(Section):
    by: Literal["bounds", "standard", "min-max"] = Field(
        "bounds",
        description="`bounds` maps each numeric column from its public [low, high] to [0, 1] (values outside are"
        " clamped); `standard` and `min-max` are fitted on the training rows, which is NOT private and is recorded.",
    )
    to: Interval = Field((0.0, 1.0), description="Target interval of `bounds` and `min-max`.")


class UnitNorm(Section):
    at_most: bool = Field(False, description="Only shrink rows longer than 1 instead of normalising every row.")


class Bias(Section):
    value: float = Field(1.0, description="Constant of the appended column.")


class Pca(Section):
    components: Count = Field(description="Number of principal directions kept.")
    noise_multiplier: Positive | None = Field(
        None, description="Gaussian noise on the covariance of unit-norm rows, charged to the ledger."
    )
    whiten: bool | Annotated[float, Field(gt=0, lt=1)] = Field(
        False,
        description="Scale the projections to equal second moments, taken from the released covariance: free. A number"
        " p goes part of the way: moments to the power 1 - p.",
    )
    public: bool = Field(False, description="Declare the covariance public: no noise, recorded as a declaration.")
    of: Literal["training", "public"] = Field(
        "training", description="Whose covariance: the training records', or that of data.public, which costs nothing."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Pca:
        if self.of == "public" and (self.noise_multiplier is not None or self.public):
            raise ValueError("of: public takes the covariance of public records; leave noise_multiplier and public out")
        if self.of == "training" and (self.noise_multiplier is None) == (not self.public):
            raise ValueError("give either noise_multiplier (private) or public: true")
        return self


Bins = Annotated[int, Field(ge=2, le=1000)]


BINS = (4, 16)
"""Numbers of bins if the recipe gives none."""
WAVES_UNTOLD = 16
"""Number of cosines for `auto`, unless the budget sets it."""
GRID = 2048
"""Steps of the grid that `auto` rounds the numbers of large tables to."""


class Bin(Section):
    """Every column as cosines or one-hots, over public bounds or values; rows at most 1 long. Data-independent."""

    waves: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = Field(
        "auto",
        description="Of a numeric column so many cosines, twice: over its bounds, and over asinh of them. Fast ones are"
        " small, so that smooth shapes are learnt from little. Of few whole numbers (`integers`) one-hots instead.",
    )
    bins: Bins | Annotated[list[Bins], Field(min_length=1)] | None = Field(
        None,
        description="One-hots in place of cosines: of a numeric column so many bins, twice: over equal steps, and over"
        " equal steps of asinh; a list: for each. Whole numbers have edges between them, and one bin each where they"
        " are no more than this.",
    )
    products: Literal["auto"] | bool = Field(
        "auto",
        description="Beside cosines, for every two columns of at most 50 categories, the products of their categories,"
        " or first two cosines, at half weight: what they say together. auto: if the budget pays for them.",
    )
    pairs: Bins | None = Field(
        None,
        description="One-hots of every two columns, numeric ones in this many coarse bins, beside bins of each alone (4"
        " and 16 where bins are left out).",
    )
    integers: list[str] | Literal["all"] = Field(
        default_factory=list,
        description="Numeric columns of whole numbers, or all of them: other numbers in them are rounded. Bounds do not"
        " tell: a column that is not named here holds any number within its bounds.",
    )
    grid: Literal["auto"] | Annotated[int, Field(ge=2, le=16_384)] | None = Field(
        "auto",
        description="Keep rows as codes, in a hundredth of the memory, and round numbers to so many equal steps between"
        " the bounds, and as many of asinh. Not with products, pairs or texts. auto: 2048 for tables of more than 134"
        " million features. null: rows hold features, of numbers that are rounded to 2048 steps.",
    )

    @model_validator(mode="after")
    def _bins_or_waves(self) -> Bin:
        if self.waves != "auto" and self.cosines is None:
            raise ValueError("bins and pairs stand in place of waves; leave them out, or waves")
        if self.products is True and self.cosines is None:
            raise ValueError("products are of cosines and categories; leave bins and pairs out, or products")
        if isinstance(self.grid, int) and (self.cosines is None or self.products is True):
            raise ValueError("grid is for cosines without products; leave bins, pairs and products out, or grid")
        return self

    def holds_whole(self, column: str) -> bool:
        """Return True if a numeric column is declared to hold whole numbers."""
        return self.integers == "all" or column in self.integers

    @property
    def cosines(self) -> int | None:
        """Return the number of cosines of a numeric column over its bounds; None if bins replace them."""
        if self.bins is not None or self.pairs is not None:
            return None
        return WAVES_UNTOLD if self.waves == "auto" else self.waves

    @property
    def steps(self) -> int | None:
        """Return the number of steps of the grid; None if numbers are not rounded."""
        return None if self.grid == "auto" else self.grid

    @property
    def widths(self) -> list[int]:
        """Return the numbers of bins; a column that is binned is cut once into each."""
        if self.bins is None:
            return list(BINS)
        return self.bins if isinstance(self.bins, list) else [self.bins]


class PreprocessStep(Section):
    """One step of the pipeline: a mapping with exactly one of these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    one_hot: OneHot | None = Field(
        None, alias="one-hot", description="Expand categorical columns.", examples=[{"columns": ["job"]}]
    )
    bin: Bin | None = Field(None, description="Cosines or one-hots of every column, over public bounds.")
    scale: Scale | None = Field(None, description="Scale numeric columns.")
    unit_norm: UnitNorm | None = Field(
        None, alias="unit-norm", description="Divide each row by its L2 norm.", examples=[{"at_most": True}]
    )
    bias: Bias | None = Field(None, description="Append a constant column.")
    pca: Pca | None = Field(None, description="Project onto principal directions.")

    @model_validator(mode="after")
    def _exactly_one(self) -> PreprocessStep:
        if len(self.model_fields_set) != 1 or self.step is None:
            raise ValueError(f"each step needs exactly one of {', '.join(PREPROCESS)} ({{}} for its defaults)")
        return self

    @property
    def kind(self) -> str:
        """Return the YAML key of the step."""
        field = next(iter(self.model_fields_set))
        return str(type(self).model_fields[field].alias or field)

    @property
    def step(self) -> Section | None:
        """Return the settings of the step; None if it was given none."""
        return next((getattr(self, name) for name in self.model_fields_set), None)


PREPROCESS = tuple(field.alias or name for name, field in PreprocessStep.model_fields.items())
"""Keys of all steps in a recipe."""
OWN_FILE_STEPS = (PreprocessStep(scale=Scale()), PreprocessStep(one_hot=OneHot()))
"""Default steps for a file of the user's own."""
