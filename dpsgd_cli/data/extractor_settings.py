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


Features = Annotated[
    ScatteringFeatures | PatchFeatures | HogFeatures | ColourFeatures | PretrainedFeatures | HuggingFaceFeatures,
    Field(discriminator="kind"),
]
