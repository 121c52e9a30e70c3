"""The `data.features:` section: frozen extractors of features, which act on each record alone.

`features.py` has their code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from dpsgd_cli.common.sections import Count, DrawSeed, Section
from dpsgd_cli.data.step_settings import Drawn


class Extractor(Section):
    """A frozen feature extractor. It runs before any preprocessing, on each record alone."""

    pool: Count | None = Field(None, description="Average the maps to this many places a side; left out, keep them.")
    groups: Count | None = Field(
        None, description="Cut each record's channels into this many groups and give each mean 0 and variance 1."
    )
    mirror: bool = Field(False, description="Average the features of an image and of its mirror image.")


class ScatteringFeatures(Extractor):
    """A wavelet scattering transform to order 2, without weights or data."""

    kind: Literal["scattering"] = "scattering"
    scales: Annotated[int, Field(ge=1, le=4)] = Field(2, description="J: the grid has side / 2^J places a side.")
    orientations: Annotated[int, Field(ge=1, le=16)] = Field(8, description="L: directions of the wavelets.")
    grey: bool = Field(False, description="Of the mean of the colours alone.")
    unit_orders: bool = Field(
        False, alias="unit-orders", description="Each order at unit norm, of square roots in orders 1 and 2."
    )

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class PatchFeatures(Extractor):
    """Similarities of an image's places to random patches of synthetic images. A mirrored image has equal features."""

    kind: Literal["patches"] = "patches"
    patches: Annotated[int, Field(ge=2, le=65_536, multiple_of=2)] = Field(
        2048, description="How many, mirror images included."
    )
    size: Annotated[int, Field(ge=2)] = Field(6, description="Pixels a side of a patch.")
    stride: Count = Field(1, description="Pixels from a place to the next.")
    shrink: Count = Field(1, description="Images are shrunk to one pixel of so many a side first.")
    pool: Count = Field(2, description="Likenesses are averaged to this many places a side.")
    images: Drawn = Field("dead-leaves", description="What the patches are cut from.")
    seed: DrawSeed = Field(0, description="Public seed of the images and the patches.")


class HogFeatures(Extractor):
    """Histograms of oriented gradients (Dalal and Triggs 2005), of the strongest colour at each pixel."""

    kind: Literal["hog"] = "hog"
    cell: Annotated[int, Field(ge=2)] = Field(4, description="Pixels a side of a histogram.")
    orientations: Annotated[int, Field(ge=2, le=36)] = Field(9, description="Bins of the unsigned direction.")


class ColourFeatures(Extractor):
    """Mean of each colour over a grid, at unit norm."""

    kind: Literal["colour-means"] = "colour-means"
    pool: Count = Field(4, description="Places a side.")


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


class Declared(Extractor):
    """An extractor whose numbers come from outside, which the recipe declares public."""

    public: bool = Field(description="Must be written as true: no private record shaped its numbers.")

    @model_validator(mode="after")
    def _declared(self) -> Declared:
        if not self.public:
            raise ValueError("public: a network that private records shaped is no free extractor; true declares none")
        return self


class HuggingFaceFeatures(Declared):
    """A frozen model of transformers in a local folder: the mean of its last hidden states over places that count."""

    kind: Literal["huggingface"] = "huggingface"
    folder: str = Field(
        description="Folder that save_pretrained wrote, relative to the recipe; never downloaded.",
        examples=["models/minilm"],
    )


class PythonFeatures(Declared):
    """A frozen network of the user's own. It is called with one record at a time, so it cannot look at another."""

    kind: Literal["python"] = "python"
    file: str = Field(description="A Python file, relative to the recipe.", examples=["network.py"])
    function: str = Field("build", description="Function `(input_shape) -> network` in it; a network maps (1, ...).")


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Aligned(Section):
    """A column of the records that the file of features repeats, so that their order is checked."""

    column: str = Field(
        description="Column (of a npz file: array) of the records. The file has it under the same name, or the SHA-256"
        " of each cell's UTF-8 as COLUMN_sha256.",
        examples=["sentence"],
    )
    decides: bool = Field(
        False,
        description="true: the column alone decides the features, so rows with equal cells must have equal ones.",
    )


class FileFeatures(Section):
    """Features that were made outside: row i of a file belongs to record i. They replace the record's own inputs."""

    kind: Literal["file"] = "file"
    file: str = Field(
        description="A npz, npy, safetensors or parquet file with the features x (N, D), relative to the recipe; it may"
        " hold x_test and name its producer.",
        examples=["embeddings.npz"],
    )
    test_file: str | None = Field(
        None, description="Features of the records' own test part, where file has no x_test.", examples=["later.npz"]
    )
    sha256: Sha256 | None = Field(
        None,
        description="Of file: needed with a shipped card, refused beside data.path, where it reveals records.",
        examples=["ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920"],
    )
    test_sha256: Sha256 | None = Field(
        None,
        description="The same of test_file.",
        examples=["831169c7e2e429d6026e1bdbb542f33b636e3e596caad9602ebc953c205928b7"],
    )
    producer: str = Field(
        description="What made them, with its version; a file that names a producer must name this one.",
        examples=["all-MiniLM-L6-v2@c9745ed1"],
    )
    aligned: Literal["order"] | Aligned = Field(
        description="How it is known that row i belongs to record i: by a column that the file repeats, or order, which"
        " declares it.",
        examples=[{"column": "sentence"}],
    )
    public: bool = Field(
        description="Must be written as true: no private record shaped the producer, and it made the features of each"
        " record from that record alone."
    )

    @model_validator(mode="after")
    def _declared(self) -> FileFeatures:
        if not self.public:
            raise ValueError(
                "public: features that other records shaped reveal them; true declares that the producer is public and"
                " that each record's features were made from that record alone"
            )
        return self

    @property
    def column(self) -> str | None:
        """Return the column by which rows are compared; None if their order is declared."""
        return None if self.aligned == "order" else self.aligned.column

    @property
    def decides(self) -> bool:
        """Return True if the column alone decides the features."""
        return self.aligned != "order" and self.aligned.decides

    @property
    def names(self) -> list[str]:
        """Return the files, as the recipe names them."""
        return [self.file, *([] if self.test_file is None else [self.test_file])]

    @property
    def declaration(self) -> str:
        """Return what is taken to be public, and what is declared of the rows."""
        how = "which is declared" if self.column is None else f"by the column {self.column}, which was compared"
        return (
            f"The features in {' and '.join(self.names)} were made by {self.producer}, which is declared public, from"
            f" each record alone; row i belongs to record i, {how}."
        )


Features = Annotated[
    ScatteringFeatures
    | PatchFeatures
    | HogFeatures
    | ColourFeatures
    | PretrainedFeatures
    | HuggingFaceFeatures
    | PythonFeatures
    | FileFeatures,
    Field(discriminator="kind"),
]
