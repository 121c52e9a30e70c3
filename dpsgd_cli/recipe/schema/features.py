"""`data.features`: a frozen extractor that runs before any preprocessing. It acts on each record alone.

What they are stands in `data/features.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpsgd_cli.recipe.schema.base import Count, Section


class Extractor(Section):
    """What every extractor shares."""

    pool: Count | None = Field(None, description="Average the maps to this many places a side; left out, keep them.")
    groups: Count | None = Field(
        None, description="Cut each record's channels into this many groups and give each mean 0 and variance 1."
    )


class ScatteringFeatures(Extractor):
    """A wavelet scattering transform to order 2: no weights, no data."""

    kind: Literal["scattering"] = "scattering"
    scales: Annotated[int, Field(ge=1, le=4)] = Field(2, description="J: the grid has side / 2^J places a side.")
    orientations: Annotated[int, Field(ge=1, le=16)] = Field(8, description="L: directions of the wavelets.")


class TorchvisionFeatures(Extractor):
    """A torchvision network with ImageNet weights, up to one of its parts."""

    kind: Literal["torchvision"] = "torchvision"
    network: str = Field("vgg16", description="Its name in torchvision.models.")
    weights: str | None = Field(
        None, description="File of weights, relative to the recipe; left out, torch's own cache. Nothing is downloaded."
    )
    part: str = Field("features", description="The submodule whose output is taken.")
    side: Count | None = Field(None, description="Images are resized to this side first; left out, kept.")


class PretrainedFeatures(Extractor):
    """A network that another recipe trained on public data, without its last layer."""

    kind: Literal["pretrained"] = "pretrained"
    result: str = Field(description="Its result directory (save_model: true), relative to the recipe.")
    public: bool = Field(False, description="true declares that the data it was trained on are public.")

    @model_validator(mode="after")
    def _public(self) -> PretrainedFeatures:
        if not self.public:
            raise ValueError(
                f"a network trained on private data is no free extractor; public: true declares that those of"
                f" {self.result} are public"
            )
        return self


Features = Annotated[ScatteringFeatures | TorchvisionFeatures | PretrainedFeatures, Field(discriminator="kind")]
